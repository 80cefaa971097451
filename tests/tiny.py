"""A small decoder, and the calls of it that tests have in common."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import kvjax
from kvjax import policies
from kvjax.attend.causal import causal
from kvjax.gates.adapters import adapter_sizes
from kvjax.gates.files import Gates
from kvjax.gates.forms import FORMS
from kvjax.kv_cache import KVCache
from kvjax.models import Decoder, DecoderConfig, Latent, Mixture, Recurrence, Rope, SigmoidRouting
from kvjax.policy import Policy
from kvjax.reading.layers import step as one_step
from kvjax.reading.prompt import Batch, read_prompt
from kvjax.statistics.forms import STATISTICS

VOCAB = 64
LATENT = Latent(rank=12, rotated=4, unrotated=6, value=10, query_rank=14)
SHARED = Mixture(8, 3, 12, dense_layers=(0,), shared=24, shared_gate=False, sigmoid=SigmoidRouting(4, 2, 1.5))


@cache
def decoder(
    heads: int = 4,
    kv_heads: int = 2,
    windows: tuple[int | None, ...] = (None,),
    vocab: int = VOCAB,
    mixture: Mixture | None = None,
    gates: bool = False,
) -> Decoder:
    """A decoder with random weights: one layer per window, of width 32, with heads of 8 channels.

    With `gates`, it has random gates of each method whose gates lie beside the parameters, and random statistics.
    """
    config = DecoderConfig("llama", vocab, 32, 48, heads, kv_heads, 8, windows, Rope(1e4), 4096, mixture=mixture)
    params = Decoder(config, nnx.Rngs(0))
    if not gates:
        return params
    learned = (learned_tokens(config, method=method) for method in ("lookaheadkv", "restorekv"))
    for each in (*random_gates(len(windows), kv_heads, heads // kv_heads), *learned):
        params = kvjax.with_gates(params, each)
    return kvjax.with_statistics(params, random_statistics(config))


@cache
def hybrid(before: tuple[int, ...] = (2, 0, 1), vocab: int = VOCAB) -> Decoder:
    """A decoder with gated attention, and so many recurrent layers before each of its attention layers."""
    config = DecoderConfig(
        **{"family": "qwen3_5_text", "vocab_size": vocab, "hidden_size": 32, "mlp_size": 48, "num_heads": 4},
        **{"num_kv_heads": 2, "head_dim": 16, "windows": (None,) * len(before), "rope": Rope(1e4, None, 0.25)},
        **{"max_positions": 4096, "qk_norm": True, "unit_offset_norms": True, "output_gate": True},
        recurrence=Recurrence(before, key_heads=2, value_heads=4, key_dim=8, value_dim=6, taps=4),
    )
    return Decoder(config, nnx.Rngs(0))


def latent_config(latent: Latent = LATENT, heads: int = 8) -> DecoderConfig:
    """Two layers of attention over latents, with an MLP and with experts."""
    return DecoderConfig(
        **{"family": "deepseek_v3", "vocab_size": VOCAB, "hidden_size": 32, "mlp_size": 48, "num_heads": heads},
        **{"num_kv_heads": 1, "head_dim": latent.key_dim, "windows": (None, None), "max_positions": 4096},
        **{"rope": Rope(1e4, None, latent.rotated_fraction), "attention_scale": latent.scale},
        **{"latent": latent, "mixture": SHARED},
    )


@cache
def latents(latent: Latent = LATENT, heads: int = 8) -> Decoder:
    """A decoder with random weights of that config. Norms and biases are random too."""
    noise = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: jnp.asarray(np.asarray(x) + 0.1 * noise.normal(size=x.shape).astype(x.dtype)),
        Decoder(latent_config(latent, heads), nnx.Rngs(0)),
    )


def random_statistics(config: DecoderConfig) -> dict[str, np.ndarray]:
    """Statistics that a model's queries could have: covariances are positive, norms at least those of the mean."""
    rng = np.random.default_rng(2)
    found = {name: rng.normal(size=shape(config)).astype(np.float32) for name, shape in STATISTICS.items()}
    found["query_cov"] = np.einsum("...ij,...kj->...ik", found["query_cov"], found["query_cov"]) / config.head_dim
    first, second = np.split(found["query_mean"], 2, axis=-1)
    found["query_norms"] = np.hypot(first, second) + np.abs(found["query_norms"])
    return found


def random_gates(layers: int, kv_heads: int, group: int, width: int = 32) -> tuple[Gates, ...]:
    """Gates of each method that scores hidden states, for a decoder of that width."""
    rng = np.random.default_rng(1)
    sizes: dict[str, dict[str, int | None]] = {
        "kvzap": {"input_dim": width, "output_dim": kv_heads, "hidden_dim": 5},
        "fastkvzip": {"input_dim": width, "nhead": kv_heads, "ngroup": group, "output_dim": 6, "sink": 3},
    }
    return tuple(drawn_gates(rng, method, own, layers, 1.0) for method, own in sizes.items())


def learned_tokens(config: DecoderConfig, count: int = 5, method: str = "lookaheadkv") -> Gates:
    """Random learned tokens and adapters of rank 2."""
    sizes = {**adapter_sizes(config), "rank": 2, "tokens": count}
    return drawn_gates(np.random.default_rng(3), method, sizes, config.num_layers, 0.3)


def drawn_gates(
    rng: np.random.Generator, method: str, sizes: Mapping[str, int | None], layers: int, scale: float
) -> Gates:
    """Gates of normal numbers of that deviation."""
    shapes = [FORMS[method].shapes_of(i, sizes) for i in range(layers)]
    each = [{name: (scale * rng.normal(size=x)).astype(np.float32) for name, x in own.items()} for own in shapes]
    return Gates(method, sizes, tuple(each))


def left_pad(rows: list[np.ndarray], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [B, size], padded on the left, and lengths [B]."""
    tokens = np.zeros((len(rows), size), np.int32)
    for padded, row in zip(tokens, rows, strict=True):
        padded[size - len(row) :] = row
    return tokens, np.array([len(row) for row in rows], np.int32)


def empty(params: Decoder, policy: Policy | str, lengths: np.ndarray, size: int) -> KVCache:
    policy = policies.parse(policy) if isinstance(policy, str) else policy
    return KVCache.empty(params.config, policy, jnp.asarray(lengths), size, jnp.float32)


def prefill(params, policy, rows, size, *, room=8, chunk=None, compress="auto"):
    """(logits, cache) after reading the rows, padded on the left to `size`."""
    tokens, lengths = left_pad(rows, size)
    cache = empty(params, policy, lengths, size)
    return read_prompt(params, cache, Batch(tokens, lengths), room=room, chunk=chunk, compress=compress)


step = jax.jit(one_step)
_causal_logits = jax.jit(lambda params, x: params.logits(params(x, causal(jnp.arange(x.shape[1])[None]))[0]))


def full_logits(params: Decoder, rows: list[np.ndarray], size: int) -> list[np.ndarray]:
    """Logits [n, V] at every position of each row under plain causal attention; padding is on the right."""
    padded = np.zeros((len(rows), size), np.int32)
    for line, row in zip(padded, rows, strict=True):
        line[: len(row)] = row
    logits = np.asarray(_causal_logits(params, padded))
    return [line[: len(row)] for line, row in zip(logits, rows, strict=True)]


def held(cache: KVCache, row: int) -> list[list[list[int]]]:
    """The positions that a row holds, ascending, by layer and head."""
    layers = cache.entries.by_head(row)
    assert all((head >= -1).all() for layer in layers for head in layer)  # -1 is no entry
    return [[sorted(head[head >= 0].tolist()) for head in layer] for layer in layers]
