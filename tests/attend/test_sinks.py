"""Attention sinks in prompts, chunks, steps, replays and in what scores are shown, against dense attention in NumPy.

There, a sink is one more column of each row of logits, and its weight is dropped.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.attend import Reading, Stepping
from kvjax.cache import Layers
from kvjax.kv_cache import KVCache
from kvjax.models import Decoder, join_sinks, rotate
from kvjax.models.rope import NO_ROPE
from kvjax.policies import parse
from kvjax.reading.room import plan_read
from tests import dense, tiny
from tests.methods import one_layer
from tests.policy.recording import Recording, notes

ROWS = [np.random.default_rng(n).integers(0, tiny.VOCAB, n) for n in (22, 3, 17)]
SIZE = 24
STEPS = np.random.default_rng(1).integers(0, tiny.VOCAB, (6, len(ROWS)))
WINDOW = 9
POOLED = "adakv:base=h2o,base.budget=12,base.recent=3,groups=2"


@cache
def model(layers: int = 2) -> Decoder:
    """Layers with a window and with full attention. Some sinks are above most logits, and some below."""
    windows = (WINDOW, None) if layers == 2 else (None,) * layers
    params = Decoder(replace(tiny.decoder(windows=windows).config, attention_sinks=True), nnx.Rngs(0))
    for i, layer in enumerate(params.layers):
        layer.attention.sinks = nnx.Param(jnp.array([2.0, -1.0, 0.5, 1.0]) - i)
    return params


def sinks_of(params: Decoder, layer: int) -> np.ndarray:
    return np.asarray(params.attention_layers[layer].sinks)


@jax.jit
def _dense_logits(params: Decoder, tokens: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
    """Logits [1, N, V], and the rotated queries of each layer. All weights are in memory, and so is a sink's column."""
    queries = []
    N = tokens.shape[1]
    distance = jnp.arange(N)[:, None] - jnp.arange(N)

    def attend(layer, q, k, v, nothing):
        q, k = (rotate(x, jnp.arange(N)[None, None], layer.rope.frequencies(x.shape[-1])) for x in (q, k))
        queries.append(q)
        G = q.shape[1] // k.shape[1]
        logits = layer.scale * jnp.einsum("BHND,BHMD->BHNM", q, jnp.repeat(k, G, axis=1))
        logits = jnp.where((distance >= 0) & (distance < (layer.window or N)), logits, -jnp.inf)
        column = jnp.broadcast_to(layer.sinks[:, None, None], (*logits.shape[:3], 1))
        weights = jax.nn.softmax(jnp.concatenate([logits, column], axis=-1), axis=-1)[..., :-1]
        return jnp.einsum("BHNM,BHMD->BHND", weights, jnp.repeat(v, G, axis=1)), nothing

    return params.logits(params(tokens, attend)[0]), queries


def dense_run(params: Decoder, tokens: np.ndarray, size: int = 48) -> tuple[np.ndarray, list[np.ndarray]]:
    """Logits [N, V], and the rotated queries [Hq, N, D] of each layer."""
    logits, queries = _dense_logits(params, np.pad(tokens, (0, size - len(tokens)))[None])
    return np.asarray(logits[0, : len(tokens)]), [np.asarray(q[0, :, : len(tokens)]) for q in queries]


def test_training() -> None:
    params = model()
    for row, logits in zip(ROWS, tiny.full_logits(params, ROWS, SIZE), strict=True):
        np.testing.assert_allclose(logits, dense_run(params, row)[0], atol=2e-5)


@pytest.mark.long(first=1)
@pytest.mark.slow(first=2)
@pytest.mark.parametrize(
    ("text", "chunk"),
    [
        ("full", None),
        ("full", 5),
        ("h2o:budget=40", None),
        ("h2o:budget=40", 7),
        (POOLED.replace("=12", "=40"), None),
        ("morphkv:budget=40,window=4", None),
    ],
)
def test_prompts_chunks_and_steps(text: str, chunk: int | None) -> None:
    """With room for everything, in slots and in a pool, logits are those of dense attention."""
    params = model()
    logits, filled = tiny.prefill(params, text, ROWS, SIZE, chunk=chunk)
    found = [np.asarray(logits)]
    for tokens in STEPS:
        logits, filled = tiny.step(params, filled, tokens, np.ones(len(ROWS), bool))
        found.append(np.asarray(logits))
    for b, row in enumerate(ROWS):
        expected = dense_run(params, np.concatenate([row, STEPS[:, b]]))[0][len(row) - 1 :]
        np.testing.assert_allclose([step[b] for step in found], expected, atol=2e-5)


def test_prompts_and_steps_weigh_entries_and_sinks() -> None:
    """Contexts, and what a score is shown of a prompt and of a step, which the second row lacks; by the definition."""
    lengths, N, H, G = np.array([6, 3]), 6, 2, 2
    q, k, v = one_layer.random_streams(1, 2, H, G, N + 1)
    sinks, policy = np.array([2.0, -1.0, 0.5, 1.0]), parse("h2o:budget=12,recent=3,group=max")

    @jax.jit
    def run(q, k, v):
        config, layer = one_layer.describe(q, k)
        layer = replace(layer, rope=NO_ROPE, sinks=jnp.asarray(sinks))
        cache = KVCache.empty(config, policy, jnp.asarray(lengths), N, jnp.float32)
        plan = plan_read(cache, [0], new=N, room=0, compress=True, final=True)
        positions = np.maximum(np.arange(N) - N + lengths[:, None], -1)
        attend = Reading(policy, policy.limits(1), plan)(positions, lengths, lengths)
        context, entries = attend(layer, *(x[:, :, :N] for x in (q, k, v)), cache.entries)
        attend = Stepping(policy, policy.limits(1))(jnp.asarray(lengths), jnp.array([True, False]))
        more, after = attend(layer, *(x[:, :, N:] for x in (q, k, v)), Layers((entries[0].grow(N + 1),)))
        return jnp.concatenate([context, more], axis=2), entries[0], after[0]

    contexts, read, stepped = run(q, k, v)
    for b, h in np.ndindex(2, H):
        first, last = N - lengths[b], N + (b == 0)
        received = np.zeros((last, N + 1))  # of each query, the larger of two query heads
        for t, n in product(range(first, last), range(h * G, (h + 1) * G)):
            weights = np.exp(k[b, h, first : t + 1] @ q[b, n, t] / np.sqrt(8))
            weights = weights / (weights.sum() + np.exp(sinks[n]))
            np.testing.assert_allclose(contexts[b, n, t], weights @ v[b, h, first : t + 1], rtol=1e-4, atol=1e-5)
            received[t, first : t + 1] = np.maximum(received[t, first : t + 1], weights)
        for entries, total in ((read, received[:N].sum(axis=0)), (stepped, received.sum(axis=0))):
            at = np.asarray(entries.positions[b, h])
            np.testing.assert_allclose(entries.per_slot[b, h][at >= 0], total[first + at[at >= 0]], rtol=1e-4)
            assert set(at) - {-1} == set(range(lengths[b] + (b == 0 and entries is stepped)))


def reduced(weights: np.ndarray, kv_heads: int, group: str) -> np.ndarray:
    """Weights [B, Hq, W, M] over the group, then summed over the W queries: [B, H, M]."""
    grouped = weights.reshape(len(weights), kv_heads, -1, *weights.shape[2:])
    return getattr(np, group)(grouped, axis=2).sum(axis=2)


@pytest.mark.long(first=1)
@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("h2o:budget=12,recent=3", None),
        ("h2o:budget=12,recent=3,group=max", None),
        ("tova:budget=12", 1),
        ("scissorhands:budget=12,window=8,recent=4,drop=0.25", None),
        ("morphkv:budget=12,window=6,block=3", None),
        (POOLED, None),
    ],
)
def test_what_scores_are_shown(text: str, last: int | None) -> None:
    """Log-sum-exps and weights of prompts and steps, `received` and `asked`."""
    params, policy = model(1), parse(text)
    sinks, scale, H = sinks_of(params, 0), params.config.scale, params.config.num_kv_heads
    wanted = policy.score.needs.received
    assert wanted is not None
    policy = replace(policy, score=Recording(policy.score, name=text))
    notes(text)
    _, filled = tiny.prefill(params, policy, ROWS, SIZE)
    seen = [notes(text)]
    for tokens in STEPS:
        _, filled = tiny.step(params, filled, tokens, np.ones(len(ROWS), bool))
        seen.append(notes(text))
    sums = np.full((len(ROWS), len(sinks), 64), np.nan)  # the log-sum-exp of the query at each position
    checked = {"received": 0, "asked": 0}
    for step, found in enumerate(seen):
        observed = [shown for what, shown in found if what.startswith("observe")]
        asks = [shown["asked"] for what, shown in found if what == "asks"]
        assert observed
        assert all(f"decoding={step > 0}" in what for what, _ in found if what.startswith("observe"))
        whole = np.zeros(observed[0]["lse"].shape)
        for shown in observed:  # a pool is observed piece by piece
            inputs = shown["queries"], shown["keys"], shown["positions"], shown["held"], scale
            weights, _, _ = dense.attention(*inputs, lse=shown["lse"])
            whole += np.where(np.isfinite(shown["lse"]), weights.sum(axis=-1), 0)
            if shown["received"] is not None:
                checked["received"] += step > 0
                given = weights if last is None else weights[:, :, -last:]
                np.testing.assert_allclose(shown["received"], reduced(given, H, wanted.reduction.group), atol=1e-5)
            if shown["asked"] is not None:
                queries, asked = asks[0]
                lse = np.stack([sums[b][:, at] for b, at in enumerate(asked)])
                asking = np.where(asked >= 0, asked, -1)
                weights, _, _ = dense.attention(
                    queries, shown["keys"], asking, shown["held"], scale, lse=np.nan_to_num(lse)
                )
                checked["asked"] += int((asked >= 0).sum())
                np.testing.assert_allclose(shown["asked"], reduced(weights, H, wanted.reduction.group), atol=1e-5)
        lse, positions = observed[0]["lse"], observed[0]["positions"]
        real = np.broadcast_to((positions >= 0)[:, None], lse.shape)
        own = np.exp(sinks[:, None] - np.where(real, lse, 0))
        np.testing.assert_allclose((whole + own)[real], 1, atol=1e-5)  # entries and sink are all that a query sees
        for b, at in enumerate(positions):
            sums[b][:, at[at >= 0]] = lse[b][:, at >= 0]
    assert checked["received"]
    assert bool(checked["asked"]) == text.startswith("morphkv")


@pytest.mark.slow
def test_replays() -> None:
    """The prompt that runs a second time behind itself has queries and sums as a text that says everything twice."""
    params, text = model(2), "kvcompose:budget=12"
    policy = parse(text)
    policy = replace(policy, score=Recording(policy.score, name=text))
    notes(text)
    tiny.prefill(params, policy, ROWS, SIZE)
    replayed = [(what, shown) for what, shown in notes(text) if "observe" in what and shown["replay"] is not None]
    assert len(replayed) == 2
    for b, row in enumerate(ROWS):
        _, queries = dense_run(params, np.concatenate([row, row]))
        for what, shown in replayed:
            layer = int(what.split()[3].strip(","))
            np.testing.assert_allclose(
                shown["queries"][b, :, -len(row) :], queries[layer][:, len(row) :], atol=2e-5, err_msg=what
            )
            _, lse, _ = dense.attention(
                shown["queries"],
                shown["keys"],
                shown["positions"],
                shown["held"],
                params.config.scale,
                params.config.windows[layer],
                sinks=sinks_of(params, layer),
            )
            np.testing.assert_allclose(shown["lse"][b, :, -len(row) :], lse[b, :, -len(row) :], atol=1e-5)


@pytest.mark.slow
def test_kvzip_counts_sinks() -> None:
    """With one chunk the softmax is over the whole prompt, the repeated one, and the sinks."""
    params = model(1)
    text = "kvzip:budget=12,sinks=2,score.chunk=30,score.instruction='',score.starting='',score.suffix=''"
    policy = parse(text)
    policy = replace(policy, score=Recording(policy.score, name=text))
    notes(text)
    tiny.prefill(params, policy, ROWS, SIZE)
    found = notes(text)
    (shown,) = (shown for what, shown in found if "observe" in what and shown["replay"] is not None)
    scored = next(shown for what, shown in found if what.startswith("scores"))
    own = shown["queries"], shown["keys"], shown["positions"], shown["held"], params.config.scale
    weights, _, _ = dense.attention(*own, sinks=sinks_of(params, 0))
    most = weights.reshape(len(ROWS), 2, 2, *weights.shape[2:]).max(axis=(2, 3))
    for b, row in enumerate(ROWS):
        for h in range(2):
            expected = {int(p): w for p, w in zip(shown["held"][b, h], most[b, h], strict=True) if 0 <= p < len(row)}
            at, scores = scored["entries"].positions, scored["scores"]
            given = {int(p): x for p, x in zip(at[b, h], scores[b, h], strict=True) if p >= 0}
            np.testing.assert_allclose(
                [given[p] for p in range(len(row))], [expected[p] for p in range(len(row))], 1e-4
            )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_query_that_sees_nothing(dtype: jnp.dtype) -> None:
    """It keeps a context of 0 and a log-sum-exp of -inf, however large the sink is. Extreme sinks give no NaN."""
    lse = jnp.array([[[-jnp.inf, 0.0, -1e4, 1e4]]])
    context = jnp.ones((1, 1, 4, 2), dtype).at[:, :, 0].set(0)
    for sink in (-1e4, 0.0, 1e4):
        joined, sums = join_sinks(context, lse, jnp.array([sink], dtype))
        assert joined.dtype == dtype
        assert sums.dtype == jnp.float32
        share = 1 / (1 + np.exp(np.clip(float(jnp.array(sink, dtype)) - np.array([-np.inf, 0, -1e4, 1e4]), -99, 99)))
        np.testing.assert_allclose(np.asarray(joined, np.float32)[0, 0, :, 0], share * [0, 1, 1, 1], atol=1e-2)
        assert np.isneginf(sums[0, 0, 0])
        assert np.isfinite(sums[0, 0, 1:]).all()


@pytest.mark.slow
def test_a_prompt_that_is_read_once_for_two_policies() -> None:
    params, policies = model(), ["h2o:budget=12", "snapkv:budget=12,window=4"]
    for once, text in zip(kvjax.prefill_each(params, ROWS, policies=policies), policies, strict=True):
        alone = kvjax.prefill(params, ROWS, policy=text)
        for b in range(len(ROWS)):
            assert tiny.held(once, b) == tiny.held(alone, b)
