"""Entries that no query sees, behind a sliding window or by a bias of -inf, are to a score as if they were absent."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import Slots
from kvjax.methods.attention_matching import FittedEntries
from kvjax.methods.common import query_bits
from kvjax.methods.common.query_sample import Sample, Sampled
from kvjax.methods.kvcompose import _viewers
from kvjax.models import AttentionLayer
from kvjax.parts import (
    ExpectedAttention,
    GlobalAttention,
    JointImportance,
    NoisyAttention,
    NonCausalAttention,
    Pooling,
    RecurrenceInterval,
    RobustAttention,
)
from kvjax.policy import Attended, LayerShape, Moment, Score
from tests.methods import one_layer

B, H, G, M, D, WINDOW = 2, 2, 2, 10, 4, 5
ASKED = np.array([7, 8, 9])  # the positions of the queries
UNSEEN, BIASED = (0, 1, 2), 6  # entries that none of them sees
HIDDEN = np.isin(np.arange(M), [*UNSEEN, BIASED])
# Row 0 has all entries, row 1 only those that are seen.
POSITIONS = np.broadcast_to(np.stack([np.arange(M), np.where(HIDDEN, -1, np.arange(M))])[:, None], (B, H, M))
BIAS = np.where(POSITIONS == BIASED, -np.inf, 0.0)
LAYER = AttentionLayer(0, one_layer.ROPE, WINDOW, 0.5, jnp.zeros((H * G, D, 1)))
VIEWERS = np.array([sum(p <= t < p + WINDOW for t in ASKED) for p in range(M)])


def drawn() -> tuple[Slots, Attended]:
    """Entries without a state, and three queries of each head that have attended to them; both rows are alike."""
    rng = np.random.default_rng(0)
    q, k, v = (np.repeat(rng.normal(size=(1, *shape, D)), B, axis=0) for shape in ((H * G, 3), (H, M), (H, M)))
    seen = (np.arange(M) <= ASKED[:, None]) & (np.arange(M) > ASKED[:, None] - WINDOW) & ~HIDDEN
    logits = np.where(seen, q @ np.repeat(k, G, axis=1).swapaxes(-1, -2) / 2, -np.inf)
    lse = np.log(np.exp(logits).sum(axis=-1))
    queries, keys, values, sums, bias = (jnp.asarray(x, jnp.float32) for x in (q, k, v, lse, BIAS))
    entries = Slots(keys, values, jnp.asarray(POSITIONS, jnp.int32), jnp.full((B, H), M), bias=bias)
    return entries, Attended(queries, jnp.tile(ASKED, (B, 1)), sums, None, jnp.full(B, 3), LAYER)


@pytest.mark.parametrize(
    "score",
    [
        JointImportance(3, Pooling("max", 1), 1.0, 0.5),
        GlobalAttention(3, 0.5, 1.0, 0.5),
        RecurrenceInterval(0.2),
        RobustAttention(0.3),
        ExpectedAttention(sinks=3, future=2),
        NonCausalAttention(M),
        NoisyAttention(temperature=1.5, growth=0.5),
        NoisyAttention(temperature=0.1, growth=0.5),  # by the largest logit
    ],
    ids=lambda score: type(score).__name__,
)
def test_scores(score: Score) -> None:
    @jax.jit
    def observed() -> tuple[Any, Any, Any]:
        entries, attended = drawn()
        per_slot, per_row = score.init(LayerShape(B, H * G, H, D, jnp.dtype("float32"), 1, M))
        per_slot, per_row = score.observe(replace(entries, per_slot=per_slot, per_row=per_row), attended)
        judged = score(replace(entries, per_slot=per_slot, per_row=per_row), Moment(jnp.full(B, M), LAYER))
        return judged, per_slot, per_row

    judged, per_slot, per_row = observed()
    judged = judged[..., : ASKED[0]]  # those that may leave
    assert np.ptp(judged[..., ~HIDDEN[: ASKED[0]]]) > 0
    pools = isinstance(score, NonCausalAttention)  # neighbours in the text, which differ
    for x in jax.tree.leaves(per_slot if pools else (judged, per_slot)):
        seen = ~HIDDEN[: x.shape[-1]]
        np.testing.assert_allclose(x[0][..., seen], x[1][..., seen], rtol=1e-5)
    if isinstance(score, GlobalAttention):  # of those that it has no longer seen in row 0
        assert per_row.left[0].tolist() == [M - WINDOW + 1] * H


def test_numbers_of_queries_that_see_an_entry() -> None:
    """By the bits of a query, and as KVCompose counts them."""

    @jax.jit
    def noted() -> Any:
        entries, attended = drawn()
        bits = jnp.zeros((B, H, 1, M), jnp.uint32)
        return query_bits.number(query_bits.noted(bits, 4, entries, attended, lambda relative, seen: seen)[0])

    expected = np.broadcast_to(VIEWERS, (H, M))
    np.testing.assert_array_equal(noted()[0], expected)
    asked = SimpleNamespace(positions=ASKED[None], lengths=np.array([3]), window=WINDOW)
    np.testing.assert_array_equal(_viewers(POSITIONS[:1], asked)[0], expected)
    np.testing.assert_array_equal(_viewers(POSITIONS[1:], asked)[0], np.where(HIDDEN, 0, expected))


def test_a_fit_asks_as_the_next_query_does() -> None:
    @jax.jit
    def logits() -> Any:
        entries, attended = drawn()
        sample = Sample(attended.queries, jnp.tile(ASKED, (B, H, 1)), jnp.ones((B, H, 3)))
        held = replace(entries, per_row=Sampled(sample, None))
        kept = jnp.zeros((B, H, 2), jnp.int32)
        return FittedEntries()._problems(held, Moment(jnp.full(B, M), LAYER), kept, jnp.zeros((B, H, M))).logits

    sees = (POSITIONS > M - WINDOW) & np.isfinite(BIAS)
    np.testing.assert_array_equal(logits(), np.where(sees, 0, -np.inf))
