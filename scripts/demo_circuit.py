"""The demo model's starting point: an induction circuit written into the weights, which training then refines.

Induction (find where the present word stood before, say what followed) takes a small model long to discover and little
to perfect. Layer 0 copies to each token the codes of the two tokens before it; layer 1 finds the tokens
whose code matches the one that the query carries, and predicts what it finds there.
"""

from __future__ import annotations

import numpy as np

from kvjax.models import DecoderConfig

FAST_PAIRS = 12  # rotary pairs, from the fastest, by which layer 0 tells neighbours apart
SLOW_PAIRS = 13  # rotary pairs, from the slowest, that hardly turn over a text: layer 1 compares contents on them
NEIGHBOUR_LOGIT, MATCH_LOGIT = 10.0, 14.0  # a pair's part in attending to a neighbour; a full match of codes
OUTPUT_GAIN = 2.0
QUIET = 0.1  # what the circuit does not use starts this small in what it writes, so as not to drown it


def induction_circuit(params: dict[str, np.ndarray], config: DecoderConfig, seed: int) -> dict[str, np.ndarray]:
    """`params` by dotted path, with embeddings and the first two layers' attention replaced by the circuit.

    Needs tied embeddings and two kv heads with a group of two, as the demo model has.
    """
    rng = np.random.default_rng(seed)
    params = {path: np.array(value) for path, value in params.items()}
    for path in params:
        if path.endswith((".output", ".down")):
            params[path] *= QUIET
    M, D = config.hidden_size, config.head_dim
    code = 2 * SLOW_PAIRS
    basis = np.linalg.qr(rng.normal(size=(M, M)))[0].T
    # The residual stream: a constant direction, the token's own part, and a code for each of two tokens before.
    constant, before, own = basis[0], np.split(basis[1 : 1 + 2 * code], 2), basis[1 + 2 * code :]
    words = rng.normal(size=(config.vocab_size, len(own))) @ own
    params["embed"] = words / np.linalg.norm(words, axis=1, keepdims=True) + constant

    # RMSNorm brings a stream of squared length s to M: what a unit vector becomes before each of the two layers.
    unit0, unit1 = (M / 2) ** 0.5, (M / 4) ** 0.5
    encode = own[:code] * (len(own) / code) ** 0.5  # a code has about unit length
    query, key, value, output = (params[f"layers.0.attention.{name}"] for name in ("query", "key", "value", "output"))
    pairs = np.arange(FAST_PAIRS)
    angles = config.rope.frequencies(D)[:FAST_PAIRS]
    gain = (NEIGHBOUR_LOGIT / config.scale) ** 0.5 / unit0
    key[:] *= QUIET
    key[:, :, pairs] += gain * constant[:, None, None]
    for head, distance in enumerate((1, 2)):
        query[:, head] *= QUIET
        query[:, head, pairs] += gain * constant[:, None] * np.cos(distance * angles)
        query[:, head, pairs + D // 2] -= gain * constant[:, None] * np.sin(distance * angles)
        output[head, :code] = before[distance - 1] / unit0
    value[:, :, :code] = encode.T[:, None]

    query, key, value, output = (params[f"layers.1.attention.{name}"] for name in ("query", "key", "value", "output"))
    slow = np.concatenate([np.arange(D // 2 - SLOW_PAIRS, D // 2), np.arange(D - SLOW_PAIRS, D)])
    gain = (MATCH_LOGIT / config.scale) ** 0.5 / unit1
    key[:] *= QUIET
    # Query head 0 at "ann is" finds what stood two after "ann"; query head 2 finds what stood right after its own word.
    for head, carried in ((0, before[0]), (2, encode)):
        query[:, head] *= QUIET
        query[:, head, slow] = gain * carried.T
    key[:, 0, slow], key[:, 1, slow] = gain * before[1].T, gain * before[0].T
    halves = own[:D], own[-D:]
    for kv_head, half in enumerate(halves):
        value[:, kv_head, : len(half)] = half.T
        for head in (2 * kv_head, 2 * kv_head + 1):
            output[head, : len(half)] = half * OUTPUT_GAIN / unit1
    output[1::2] *= QUIET
    return {path: value.astype(np.float32) for path, value in params.items()}
