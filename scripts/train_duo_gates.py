"""Trains DuoAttention's gates (arXiv 2410.10819, section 2.2), which say how much answers need each kv head.

    python scripts/train_duo_gates.py CHECKPOINT --output duo_gates.json       # any checkpoint that kvjax reads
    python scripts/train_duo_gates.py kvjax/demo_model --output kvjax/demo_model/duo_gates.json --texts demo \\
        --steps 200 --lengths 256 512 --sinks 16 --recent 64 --batch 2

A head's output is alpha * full + (1 - alpha) * streaming attention, with one alpha in [0, 1] per kv head that starts at
1. The loss is the mean squared difference between the last hidden states and those of the unchanged model, at the
tokens of the answer, + 0.05 * mean(alpha). Texts state ten pass keys among filler and then recite them. The weights of
the model do not change.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

import kvjax
from kvjax.evaluation.tasks.demo import Deck, codes, weave
from kvjax.evaluation.tasks.vocabulary import encode
from kvjax.models import AttentionLayer, Decoder, join_sinks, rotate
from kvjax.pallas_kernels import capped

KEYS = 10
REGULARISATION = 0.05
LEARNING_RATE = 0.02

Gates = Float[Array, "L H"]
Text = tuple[Int[np.ndarray, "N"], Bool[np.ndarray, "N"]]  # ids, and which of them are recited

FILLER = (
    "The road went on along the river and past the mill.",
    "Nobody in the village could remember so dry a summer.",
    "She closed the window and went back to her letters.",
    "In the evening the boats came in with little to sell.",
    "They talked of the weather, of prices and of the old bridge.",
    "A light burned in the school until late at night.",
)
THINGS = (
    "apple",
    "bread",
    "chair",
    "cloud",
    "drum",
    "eagle",
    "fence",
    "glass",
    "horse",
    "island",
    "jar",
    "kite",
    "lamp",
    "moon",
)


def recital_of_words(length: int, rng: np.random.Generator) -> Text:
    """In the demo model's words, which one tokenizer alone knows."""
    names, things, statements = codes(KEYS, Deck(rng))
    parts, recited = [], []
    for i in rng.permutation(KEYS):
        ask, answer = encode(f"recall what the code of {names[i]} is :"), encode(f"{names[i]} is {things[i]} .")
        parts += [ask, answer]
        recited += [np.zeros(len(ask), bool), np.ones(len(answer), bool)]
    text = weave(statements, length - sum(map(len, parts)), rng)
    return np.concatenate([text, *parts]), np.concatenate([np.zeros(len(text), bool), *recited])


def recital(tokenizer: Any, length: int, rng: np.random.Generator) -> Text:
    """In plain English."""

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    things = rng.permutation(THINGS)[:KEYS]
    sentences = [ids(f" The pass key of the {thing} is {rng.integers(10_000, 100_000)}.") for thing in things]
    question = ids("\n\nWhat are the pass keys?\n\n")
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    answer = [token for i in rng.permutation(KEYS) for token in sentences[i]]
    room = length - len(begin) - len(question) - 2 * len(answer)
    if room < 0:
        raise SystemExit(f"a text of {length} tokens has no room for {KEYS} pass keys; give longer --lengths")
    around: list[int] = []
    while len(around) < room:
        around += ids(" " + str(rng.choice(FILLER)))
    cuts = np.sort(rng.integers(0, room + 1, KEYS))
    pieces = np.split(np.array(around[:room], np.int64), cuts)
    text = [*begin, *pieces[0]]
    for sentence, piece in zip(sentences, pieces[1:], strict=True):
        text += [*sentence, *piece]
    tokens = np.array([*text, *question, *answer], np.int32)
    return tokens, np.arange(length) >= length - len(answer)


def gated(gates: Gates | None, sinks: int, recent: int) -> Callable[..., tuple[Array, Any]]:
    """Attention whose heads look at everything as far as their gates say; at everything if there are none."""

    @partial(jax.checkpoint, static_argnums=0)
    def heads(layer: Any, q: Array, k: Array, v: Array, alpha: Array | None, attention_sinks: Array | None) -> Array:
        B, Hq, N, D = q.shape
        at = jnp.arange(N)
        rope = layer.rope.row_frequencies(D, jnp.full(B, N))
        rope = layer.rope.frequencies_of(D, rope)
        q, k = (rotate(x, at[None, None], rope, layer.rope.attention_factor) for x in (q, k))
        logits = jnp.einsum("BHGND,BHSD->BHGNS", q.reshape(B, k.shape[1], -1, N, D), k).astype(jnp.float32)
        distance = at[:, None] - at
        full = (distance >= 0) & (distance < (layer.window or N))
        near = full & ((at < sinks) | (distance < recent))

        def seeing(mask: Array) -> Array:
            masked = jnp.where(mask, capped(logits * layer.scale, layer.softcap), -jnp.inf)
            weights = jax.nn.softmax(masked, axis=-1)
            context = jnp.einsum("BHGNS,BHSD->BHGND", weights.astype(v.dtype), v)
            if attention_sinks is None:
                return context
            lse = jax.nn.logsumexp(masked, axis=-1).reshape(B, Hq, N)
            return join_sinks(context.reshape(B, Hq, N, D), lse, attention_sinks)[0].reshape(context.shape)

        out = seeing(full)
        if alpha is not None:
            alpha = alpha[:, None, None, None].astype(v.dtype)
            out = alpha * out + (1 - alpha) * seeing(near)
        return out.reshape(B, Hq, N, D)

    def attend(layer: AttentionLayer, q: Array, k: Array, v: Array, cache: Any) -> tuple[Array, Any]:
        alpha = None if gates is None else gates[layer.index]
        return heads(_Static(layer), q, k, v, alpha, layer.sinks), cache

    return attend


class _Static:
    """What of a layer is no array, so that it may be a static argument."""

    def __init__(self, layer: AttentionLayer):
        self.rope, self.window, self.scale, self.softcap = layer.rope, layer.window, layer.scale, layer.softcap


def train(
    params: Decoder,
    draw: Callable[[int, np.random.Generator], Text],
    *,
    steps: int,
    batch: int,
    lengths: list[int],
    sinks: int,
    recent: int,
    seed: int,
) -> Gates:
    config = params.config
    fifth = max(steps // 5, 1)
    schedule = optax.join_schedules(
        [
            optax.linear_schedule(0.0, LEARNING_RATE, fifth),
            optax.constant_schedule(LEARNING_RATE),
            optax.linear_schedule(LEARNING_RATE, 0.0, fifth),
        ],
        [fifth, steps - fifth],
    )
    optimizer = optax.adamw(schedule, weight_decay=0.0)
    gates = jnp.ones((config.num_layers, config.num_kv_heads))
    state = optimizer.init(gates)

    def loss(gates: Gates, params: Decoder, tokens: Array, answers: Array) -> tuple[Array, Array]:
        wanted, _ = params(tokens, gated(None, sinks, recent))
        hidden, _ = params(tokens, gated(gates, sinks, recent))
        says = jnp.roll(answers, -1, axis=1)  # the states that foretell what is recited
        apart = jnp.mean(jnp.square((params.norm(hidden) - params.norm(wanted)).astype(jnp.float32)), axis=-1)
        difference = jnp.sum(apart * says) / jnp.sum(says)
        return difference + REGULARISATION * jnp.mean(jnp.abs(gates)), difference

    @jax.jit
    def step(gates: Gates, state: Any, params: Decoder, tokens: Array, answers: Array) -> tuple[Gates, Any, Array]:
        (_, difference), gradient = jax.value_and_grad(loss, has_aux=True)(gates, params, tokens, answers)
        update, state = optimizer.update(gradient, state, gates)
        return jnp.clip(optax.apply_updates(gates, update), 0.0, 1.0), state, difference

    began = time.monotonic()
    for i in range(steps):
        rng = np.random.default_rng([seed, i])
        texts = [draw(int(lengths[i % len(lengths)]), rng) for _ in range(batch)]
        tokens, answers = (jnp.asarray(np.stack(column)) for column in zip(*texts, strict=True))
        gates, state, difference = step(gates, state, params, tokens, answers)
        if (i + 1) % 25 == 0 or i + 1 == steps:
            means = " ".join(f"{gate:.2f}" for gate in np.asarray(gates).ravel()[:32])
            print(f"step {i + 1} {time.monotonic() - began:.0f} s  difference {difference:.4f}  {means}", flush=True)
    return gates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="a folder in Hugging Face form, or a repository on the hub")
    parser.add_argument("--output", type=Path, required=True, help="a .json file")
    parser.add_argument("--texts", choices=("passkeys", "demo"), default="passkeys", help="demo: in its words")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[1024, 2048, 4096], help="tokens of the texts, in turn"
    )
    parser.add_argument("--sinks", type=int, default=128)
    parser.add_argument("--recent", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    params, tokenizer = kvjax.load(options.checkpoint)
    if options.texts == "passkeys" and tokenizer is None:
        raise SystemExit(f"{options.checkpoint} has no tokenizer, which texts in English need")
    draw = recital_of_words if options.texts == "demo" else partial(recital, tokenizer)
    how = {name: getattr(options, name) for name in ("steps", "batch", "lengths", "sinks", "recent", "seed")}
    gates = np.asarray(train(params, draw, **how), np.float64)
    facts = {"layers": gates.shape[0], "kv_heads": gates.shape[1], "texts": options.texts, **how}
    options.output.write_text(json.dumps({**facts, "gates": gates.round(4).tolist()}) + "\n")


if __name__ == "__main__":
    main()
