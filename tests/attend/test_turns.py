"""Turns into a layer that has been read, one layer by itself: rows without a token, and a window that has moved on."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.attend import Reading, ReadPlan, Stepping, positions_behind
from kvjax.kv_cache import KVCache
from kvjax.policies import parse
from tests.methods import one_layer

SNAPKV = parse("snapkv:budget=6,window=2,kernel=3,pool=avg")
Q, K, V = one_layer.random_streams(0, 2, 2, 2, 13)


@partial(jax.jit, static_argnames=("window", "plan"))
def turn(entries: Any, length: Any, lengths: Any, x: Any, *, plan: ReadPlan, window: int | None = None) -> Any:
    """The entries after up to N tokens of rows that have had `length`, which are the last of q, k and v."""
    attend = Reading(SNAPKV, SNAPKV.limits(1), plan)(
        positions_behind(length, lengths, x[0].shape[2]), lengths, length + lengths
    )
    return attend(replace(one_layer.describe(*x[:2])[1], window=window), *x, entries)[1]


@partial(jax.jit, static_argnames="window")
def step(entries: Any, length: Any, x: Any, *, window: int) -> Any:
    attend = Stepping(SNAPKV, SNAPKV.limits(1))(length, jnp.ones(len(length), bool))
    return attend(replace(one_layer.describe(*x[:2])[1], window=window), *x, entries)[1]


def tokens(first: int, last: int) -> tuple[np.ndarray, ...]:
    return tuple(x[:, :, first:last] for x in (Q, K, V))


def empty() -> Any:
    config, _ = one_layer.describe(Q, K)
    return KVCache.empty(config, SNAPKV, jnp.full(2, 13), 13, jnp.float32).entries


def test_rows_without_a_token_retain_what_they_hold() -> None:
    """Row 1 holds more than its budget, and nothing has come by which it could be scored again."""
    no, all_rows = np.zeros(2, int), np.full(2, 6)
    read = turn(empty(), no, all_rows + 2, tokens(0, 8), plan=ReadPlan((6,), (6,), True))
    grown = turn(read, all_rows + 2, all_rows - 4, tokens(8, 10), plan=ReadPlan((8,), (None,), True))
    plan = ReadPlan((8,), (8,), True, spares=True)
    after, both = (
        turn(grown, all_rows + 4, np.array(lengths), tokens(10, 13), plan=plan) for lengths in ([3, 0], [3, 3])
    )
    assert one_layer.held(after, 0) == one_layer.held(both, 0)
    assert [len(head) for head in one_layer.held(after, 0)] == [6, 6]
    assert one_layer.held(after, 1) == one_layer.held(grown, 1)
    assert [len(head) for head in one_layer.held(grown, 1)] == [8, 8]
    assert after[0].capacity.tolist() == [[6, 6]] * 2
    assert not after[0].has_state


def test_a_window_that_steps_have_overwritten_is_read_in_order() -> None:
    """SnapKV's scores pool neighbours in the text, which are no neighbours in the slots."""
    length, whole = np.zeros(2, int), np.full(2, 13)
    expected = turn(empty(), length, whole, tokens(0, 13), plan=ReadPlan((6,), (6,), True), window=9)
    found = turn(empty(), length, whole - 5, tokens(0, 8), plan=ReadPlan((9,), (None,), False), window=9)
    for at in range(8, 11):
        found = step(found, whole - 13 + at, tokens(at, at + 1), window=9)
    assert (np.diff(found[0].positions) < 0).any()
    found = turn(found, whole - 2, whole - 11, tokens(11, 13), plan=ReadPlan((6,), (6,), True), window=9)
    for row in range(2):
        assert one_layer.held(found, row) == one_layer.held(expected, row)
        assert all(len(head) == 6 and head[-2:] == [11, 12] for head in one_layer.held(found, row))
