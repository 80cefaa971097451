"""RestoreKV against a decoder in NumPy that reads a text and its learned tokens as one sequence, and answers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import policies
from kvjax.gates.attach import with_gates
from kvjax.gates.files import Gates
from kvjax.parts import LearnedTokens
from kvjax.policies import kvzip, restorekv
from kvjax.reading.beside import with_learned
from tests import tiny
from tests.dense import assert_close
from tests.methods.learned_rows import cache_of, logits_behind, sequence
from tests.patience import PATIENCE

OPTIONS = ("base=snapkv,base.budget=12,base.window=2,tokens=3", "base=knorm,base.budget=0.5,tokens=5")
SIZE, WINDOW, TOKENS = 32, 13, 3
ROWS = [np.random.default_rng(4).integers(0, tiny.VOCAB, n) for n in (32, 5, 19)]  # the second fits into any budget
SILENT = {"instruction": (7, 60), "starting": (9, 4), "suffix": (33,)}
BASES = {
    "snapkv": policies.snapkv(12, window=2, pool="none"),
    "kvzip": kvzip(0.5, sinks=2, score=replace(kvzip().score, chunk=16, **SILENT)),
    "adakv": policies.adakv(policies.knorm(12), normalise=False),
}


@cache
def model(heads: int = 8, kv_heads: int = 2) -> tuple[kvjax.models.Decoder, Gates]:
    """Two layers, the second with a sliding window, with gates; and these."""
    params = tiny.decoder(heads, kv_heads, (None, WINDOW))
    gates = tiny.learned_tokens(params.config, method="restorekv")
    return with_gates(params, gates), gates


def smaller(base: Any, row: np.ndarray) -> Any:
    """The base with the budget that learned tokens leave."""
    budget = base.budget
    inner = budget.budget if base.allocates else budget
    entries = int(inner.capacity(0, np.array([len(row)]), 2)[0]) - TOKENS
    own = type(policies.knorm(1).budget)(entries)
    return replace(base, budget=replace(budget, budget=own) if base.allocates else own)


def test_learned_tokens_leave_entries_for_which_the_budget_pays() -> None:
    """In each of two layers, of the first three learned tokens. A prompt within the budget has none."""
    params = tiny.decoder(4, 2, (None, None))
    gates, lengths = tiny.learned_tokens(params.config, method="restorekv"), [11, 8]
    params, rows = with_gates(params, gates), [ROWS[0][:11], ROWS[2][:8]]
    each = [sequence(params, gates, row, TOKENS) for row in rows]
    cache = cache_of(params, restorekv(policies.knorm(8), TOKENS), each, lengths, 12, state=None)
    paid, beside = with_learned(params, cache)
    assert beside.next_position.tolist() == [11 + TOKENS, 8]
    for i, held in enumerate(beside.entries):
        assert paid.entries[i].capacity.tolist() == [[8 - TOKENS] * 2, [8] * 2]
        assert held.positions.tolist() == [[[11, 12, 13]] * 2, [[-1] * 3] * 2]
        for ours, expected in ((held.keys, each[0][i].keys), (held.values, each[0][i].values)):
            assert_close(ours[0], expected[11:].swapaxes(0, 1))


@pytest.mark.long
@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "base"), [(8, 2, "snapkv"), (8, 2, "kvzip"), (2, 2, "adakv"), (7, 1, "kvzip")]
)
def test_a_text_behind_it_reads_learned_entries(heads: int, kv_heads: int, base: str) -> None:
    """Groups of 4, 1 and 7: what the base retains with n entries less, and logits of the text that follows."""
    params, gates = model(heads, kv_heads)
    policy = restorekv(BASES[base], TOKENS)
    _, found = tiny.prefill(params, policy, ROWS, SIZE)
    steps, text = [], np.array([[7, 60, 2], [9, 4, 33], [12, 1, 63]])
    held = [tiny.held(found, b) for b in range(3)]
    for token in text.T:
        logits, found = tiny.step(params, found, jnp.asarray(token), jnp.ones(3, bool))
        steps.append(np.asarray(logits))
    for b, row in enumerate(ROWS):
        n = 0 if b == 1 else TOKENS
        assert int(found.length[b]) == len(row) + n + 3
        alone = kvjax.prefill(params, [row], policy=smaller(BASES[base], row) if n else "full")
        behind = list(range(len(row), len(row) + n))
        assert held[b] == [[head + behind for head in layer] for layer in tiny.held(alone, 0)]
        expected = logits_behind(params, sequence(params, gates, row, n), held[b], text[b])
        assert_close(np.stack(steps, axis=1)[b], expected)


@pytest.mark.long
def test_the_budget_pays_for_learned_tokens() -> None:
    """As many entries as the base has, in pools of the same bytes."""
    params, _ = model()
    base = policies.adakv(policies.knorm(12), normalise=False)
    cache, alone = (kvjax.prefill(params, ROWS, policy=own) for own in (restorekv(base, TOKENS), base))
    for b, row in enumerate(ROWS):
        count = sum(len(head) for head in tiny.held(cache, b)[0])
        assert count == sum(len(head) for head in tiny.held(alone, b)[0]) == 2 * min(len(row), 12)
    assert cache.nbytes == alone.nbytes
    plans = [
        kvjax.plan_cache(params.config, own, batch=3, length=32, new_tokens=8, dtype=jnp.float32)
        for own in (restorekv(base, TOKENS), base)
    ]
    assert plans[0].nbytes == plans[1].nbytes


@pytest.mark.slow
def test_ways_to_read_a_prompt_agree() -> None:
    """In chunks, for several policies, in two turns and through an engine."""
    params, _ = model()
    spec = f"restorekv:base=snapkv,base.budget=12,base.window=2,tokens={TOKENS}"
    whole = kvjax.generate(params, ROWS, policy=spec, max_new_tokens=6)
    chunked = kvjax.generate(params, ROWS, policy=spec, max_new_tokens=6, chunk=8)
    np.testing.assert_array_equal(chunked.tokens, whole.tokens)
    (each,) = [c for c in kvjax.prefill_each(params, ROWS, policies=[spec])]
    after = kvjax.generate(params, cache=kvjax.prefill(params, ROWS, policy=spec), prompt=ROWS, max_new_tokens=4)
    np.testing.assert_array_equal(kvjax.generate(params, ROWS, cache=each, max_new_tokens=4).tokens, after.tokens)
    assert int(after.cache.length[0]) == 2 * 32 + TOKENS + 3  # a later turn has no learned tokens of its own
    with kvjax.Engine(params, policy=spec, rows=2, max_prompt=32, max_new_tokens=8) as engine:
        for b, row in enumerate(ROWS):
            answer = engine.submit(row, max_new_tokens=6).result(timeout=PATIENCE)
            np.testing.assert_array_equal(answer.tokens, whole.tokens[b])


@pytest.mark.slow
def test_saved_caches_and_text(tmp_path: Any) -> None:
    params, _ = model()
    policy = restorekv(BASES["snapkv"], TOKENS)
    assert policies.parse(repr(policy)) == policy
    made = kvjax.prefill(params, ROWS, policy=policy)
    kvjax.save_cache(tmp_path / "cache", made, params)
    read = kvjax.restore_cache(tmp_path / "cache", params)
    np.testing.assert_array_equal(read.length, made.length)
    ours, theirs = (kvjax.generate(params, ROWS, cache=each, max_new_tokens=4).tokens for each in (read, made))
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
def test_bfloat16() -> None:
    params, gates = model()
    low = with_gates(jax.tree.map(lambda x: x.astype(jnp.bfloat16), tiny.decoder(8, 2, (None, WINDOW))), gates)
    policy = restorekv(policies.knorm(12), TOKENS)
    ours, theirs = (kvjax.prefill(each, ROWS, policy=policy) for each in (low, params))
    assert ours.dtype == jnp.bfloat16
    for mine, exact in ((ours.entries[0], theirs.entries[0]),):
        at = np.asarray(exact.positions[0, 0]) >= 32
        assert at.sum() == TOKENS
        close = np.asarray(mine.values[0, 0][at], np.float32) - np.asarray(exact.values[0, 0][at])
        assert np.abs(close).max() < 0.05 * np.abs(np.asarray(exact.values[0, 0][at])).max()


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
@pytest.mark.parametrize(("data", "model_axis"), [(4, 2), (2, 4)])
def test_meshes_retain_the_same(data: int, model_axis: int) -> None:
    """The second mesh has two devices per kv head."""
    plain, _ = model()
    rows = [*ROWS, ROWS[0]]
    spec = f"restorekv:base=snapkv,base.budget=12,base.window=2,tokens={TOKENS}"
    theirs = kvjax.generate(plain, rows, policy=spec, max_new_tokens=4)
    ours = kvjax.generate(kvjax.shard(plain, kvjax.make_mesh(data, model_axis)), rows, policy=spec, max_new_tokens=4)
    np.testing.assert_array_equal(ours.tokens, theirs.tokens)
    assert [tiny.held(ours.cache, b) for b in range(4)] == [tiny.held(theirs.cache, b) for b in range(4)]


def test_what_is_refused() -> None:
    params, _ = model()
    with pytest.raises(ValueError, match="runs 6 learned tokens, and the gates of 'restorekv' have 5: expected at mo"):
        kvjax.prefill(params, ROWS, policy=restorekv(policies.knorm(12), 6))
    with pytest.raises(ValueError, match="reads gates of 'restorekv', and the parameters have none"):
        kvjax.prefill(tiny.decoder(), ROWS, policy=restorekv(policies.knorm(12), 3))
    with pytest.raises(ValueError, match=r"a budget of 8 entries: expected 9 or more, which is tokens=8 \+ 1"):
        restorekv(policies.knorm(8))
    with pytest.raises(ValueError, match=r"^restorekv: its base has learned tokens of its own, which would be lost"):
        restorekv(restorekv(policies.knorm(12), 4))
    with pytest.raises(ValueError, match=r"^restorekv: .*every=1.*decoding would evict them: expected every=None"):
        restorekv(policies.h2o(64))
    with pytest.raises(ValueError, match="expected a budget that is allocated, such as UniformShares"):
        replace(policies.knorm(64), learned=LearnedTokens("restorekv"))
    with pytest.raises(ValueError, match=r"^count=0: expected an integer >= 1$"):
        LearnedTokens("restorekv", 0)
