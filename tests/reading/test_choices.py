"""Choices of the host by sizes alone: batches and chunks, how a call ends, the slots of layers and of a pool."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.attend import ReadPlan, positions_behind
from kvjax.cache import UNLIMITED, Layers, Segments, Slots, Usage, bucket, room_for, rows_to_grow
from kvjax.cache.paging import whole_pages
from kvjax.kv_cache import KVCache
from kvjax.pallas_kernels import PAGE
from kvjax.policies import parse
from kvjax.reading.allocate import limits
from kvjax.reading.prompt import Batch, Plan, _some_wait
from kvjax.reading.read_each import End
from kvjax.reading.room import Ending, ending, only_once, plan_read
from kvjax.reading.widening import Widths
from tests import tiny
from tests.methods import one_layer

LENGTHS = (1, 5, 13)
ONE = jax.ShapeDtypeStruct((1,), np.int32)


def test_sizes() -> None:
    expected = {1: 16, 16: 16, 17: 24, 24: 24, 25: 32, 32: 32, 33: 48, 48: 48, 49: 64, 64: 64, 65: 96, 97: 128}
    assert {size: bucket(size) for size in expected} == expected
    assert [room_for(n) for n in (0, 1, 64, 65, 128)] == [0, 64, 64, 128, 128]


@pytest.mark.parametrize("size", [None, *range(1, 19)])
def test_chunks_are_the_columns_of_a_batch(size: int | None) -> None:
    """Each has the same size, also the padded first one; all rows end in the last."""
    rows = [100 * b + 1 + np.arange(n) for b, n in enumerate(LENGTHS)]
    batch = Batch.of(rows)
    assert batch.tokens.shape == (3, 16)
    assert Batch.of(rows, 13).tokens.shape == (3, 13)
    parts = batch.chunks(size)
    assert [part.tokens.shape for part in parts] == [(3, size or 16)] * -(-16 // (size or 16)) or len(parts) == 1
    for b, row in enumerate(rows):
        texts = [part.tokens[b, part.tokens.shape[1] - part.lengths[b] :] for part in parts]
        assert np.concatenate(texts).tolist() == row.tolist()
        assert parts[-1].lengths[b] == min(len(row), size or 16)


def test_positions_of_tokens_that_follow_a_cache() -> None:
    found = positions_behind(np.array([0, 7, 4]), np.array([3, 1, 0]), 4)
    assert found.tolist() == [[-1, 0, 1, 2], [-1, -1, -1, 7], [-1] * 4]


PLAIN, EVICTS, ALLOCATES, BOTH = "snapkv", "h2o", "adakv", "adakv:base=h2o"
COMPRESSED, LEFT = Ending(True, False, True), Ending(False, False, False)
ENDED, ALLOCATED = Ending(False, False, True), Ending(False, True, False)


@pytest.mark.parametrize(
    ("policy", "filled", "endings"),
    [
        (PLAIN, False, {"auto": COMPRESSED, "never": LEFT, "end": COMPRESSED, "chunk": COMPRESSED}),
        (PLAIN, True, {"auto": ENDED, "never": ENDED, "end": COMPRESSED, "chunk": COMPRESSED}),
        (EVICTS, False, {"auto": COMPRESSED, "never": LEFT, "end": COMPRESSED, "chunk": COMPRESSED}),
        (EVICTS, True, {"auto": COMPRESSED, "never": ENDED, "end": COMPRESSED, "chunk": COMPRESSED}),
        (ALLOCATES, False, {"auto": ALLOCATED, "never": LEFT, "end": ALLOCATED, "chunk": None}),
        (ALLOCATES, True, {"auto": ENDED, "never": ENDED, "end": None, "chunk": None}),
        (BOTH, False, {"auto": ALLOCATED, "never": LEFT, "end": ALLOCATED, "chunk": None}),
        (BOTH, True, {"auto": COMPRESSED, "never": COMPRESSED, "end": None, "chunk": None}),
        ("kvzap:level=head", False, {"auto": COMPRESSED, "end": COMPRESSED, "chunk": COMPRESSED}),
        ("kvzap:level=head", True, {"auto": ENDED, "never": ENDED, "end": None, "chunk": None}),
        ("kvzap:level=head,every=1", True, {"auto": COMPRESSED, "end": COMPRESSED, "chunk": COMPRESSED}),
        ("think", False, {"auto": COMPRESSED, "end": COMPRESSED, "chunk": None}),
        ("finch:positions=in_cache", False, {"auto": COMPRESSED, "end": COMPRESSED, "chunk": None}),
        ("streaming_llm:positions=in_cache", True, {"end": COMPRESSED, "chunk": COMPRESSED}),
    ],
)
def test_how_a_call_ends(policy: str, filled: bool, endings: dict[Any, Ending | None]) -> None:
    """None is refused. A budget that has been allocated lies in a pool, whose heads that evict have no more slots."""
    parsed = parse(policy)
    pool = SimpleNamespace(preallocates=filled and parsed.allocates)
    cache: Any = SimpleNamespace(policy=parsed, filled=filled, entries=pool)
    for compress, expected in endings.items():
        if expected is not None:
            assert ending(cache, compress) == expected, compress
            continue
        with pytest.raises(ValueError, match=f"^compress='{compress}' "):
            ending(cache, compress)
    assert (only_once(parsed) is None) == (endings["chunk"] is not None or policy.startswith("kvzap"))


def empty(policy: str, rows: int = 1) -> KVCache:
    """The shapes of an empty cache for prompts of 24 tokens."""
    params = tiny.decoder()  # which is cached, so that it must not be made while something is traced
    return jax.eval_shape(lambda: tiny.empty(params, policy, np.full(rows, 24), 24))


def of_slots(*sizes: int) -> Layers:
    return Layers(tuple(Slots.only(positions=np.zeros((1, 1, n))) for n in sizes))


@pytest.mark.parametrize(
    ("now", "occupied", "new", "room", "kept", "window", "slots"),
    [
        (0, 0, 11, 2, None, None, 13),  # a prompt that begins has exactly its slots
        (10, 8, 2, 0, None, None, 10),  # what fits stays as it is
        (10, 8, 1, 2, None, None, 16),  # what does not grows to a bucket
        (10, 0, 9, 2, None, None, 11),
        (30, 8, 2, 0, None, None, 30),
        (30, 8, 2, 3, 12, None, 15),  # a layer that is compressed has what it retains and the room
        (10, 8, 9, 0, None, 12, 12),
        (10, 8, 9, 0, None, 24, 24),
        (10, 8, 9, 0, None, 25, 24),
        (30, 8, 2, 3, 12, 15, 15),
        (30, 8, 2, 3, 12, 14, 14),
    ],
)
def test_slots_of_a_layer(now: int, occupied: int, new: int, room: int, kept: Any, window: Any, slots: int) -> None:
    """Beside a layer that is as it was."""
    layers = of_slots(5, now)
    after = layers.slots_after([5, occupied], new=new, room=[-new, room], kept=[None, kept], windows=[None, window])
    assert after == (5, slots)
    if kept is None:
        usage = Usage([5, occupied + new], [0, 0])
        growth = layers.growth(usage, [0, room], windows=[None, window])
        wanted = layers.slots_after([5, occupied + new], new=0, room=[0, room], kept=[None] * 2, windows=[None, window])
        assert growth == (None if wanted == (5, now) else wanted)
    assert layers.filling([True, True], [None, now]) == (True, False)
    assert layers.filling([False, True], [None, now + 1]) == (False, True)
    assert (layers[0].slots, layers.bounds, layers.mean_slots) == (5, (5, now), (5, now))
    settled: Any = SimpleNamespace(positions=np.zeros((1, 1, 7)))
    assert layers.with_layer(0, replace(layers[0], settled=settled)).mean_slots == (12, now)


@pytest.mark.parametrize(
    ("policy", "room", "slots"),
    [
        ("full", 4, 28),
        ("snapkv:budget=40,window=4", 4, 28),
        ("h2o:budget=40", 4, 40),  # an answer fills the budget before it evicts
        ("h2o:budget=40", 0, 24),  # none follows
        ("h2o:budget=12", 4, 24),
        ("h2o:budget=1.0", 4, 24),
        ("adakv:base=h2o,base.budget=40", 4, 40),
        ("rising:base=knorm,share=0.5", 4, 26),
    ],
)
def test_slots_of_a_prompt_that_is_not_compressed(policy: str, room: int, slots: int) -> None:
    cache = empty(policy)
    assert plan_read(cache, [0], new=24, room=room, compress=False, final=False).slots == (slots,)


@pytest.mark.parametrize(
    ("policy", "occupied", "slots", "spares"),
    [
        ("snapkv:budget=12,window=4", 12, 12, True),
        ("snapkv:budget=12,window=4", 20, 20, True),
        ("h2o:budget=12", 12, 12, False),  # no row holds more
        ("h2o:budget=12", 20, 20, True),
    ],
)
def test_slots_where_rows_without_a_token_are_not_compressed(
    policy: str, occupied: int, slots: int, spares: bool
) -> None:
    cache = empty(policy)
    plan = plan_read(cache, [occupied], new=4, room=0, compress=True, final=True, spares=True)
    assert plan == ReadPlan((slots,), (slots,), True, spares=spares)


@pytest.mark.parametrize(("filled", "kept"), [(True, bucket(24 + 3)), (False, 12)])
def test_a_turn_retains_more_where_the_budget_rises(filled: bool, kept: int) -> None:
    """By half of its tokens; a prompt has the half of its own."""
    cache = replace(empty("rising:base=knorm,share=0.5"), filled=filled)
    plan = plan_read(cache, [24 * filled], new=6, room=0, compress=True, final=True)
    assert plan.kept == (kept,)


ALL, WAITS_BEFORE, WAITS_LAST = [5, 5], [5, 4], [4, 0]  # tokens of rows, in 8 columns


@pytest.mark.parametrize(
    ("policy", "filled", "compress", "chunk", "lengths", "spares"),
    [
        ("snapkv:budget=12,window=4", True, "end", None, WAITS_LAST, (False, True)),
        ("snapkv:budget=12,window=4", True, "end", None, ALL, (False, False)),
        ("snapkv:budget=12,window=4", True, "auto", None, WAITS_LAST, (False, False)),
        ("snapkv:budget=12,window=4", False, "end", None, WAITS_LAST, (False, False)),
        ("snapkv:budget=12,window=4", True, "chunk", 4, WAITS_BEFORE, (True, False)),
        ("snapkv:budget=12,window=4", True, "chunk", 4, WAITS_LAST, (True, True)),
        ("snapkv:budget=12,window=4", True, "chunk", 4, ALL, (False, False)),
        ("snapkv:budget=12,window=4", False, "chunk", 4, WAITS_BEFORE, (False, False)),
        ("snapkv:budget=12,window=4", True, "end", 4, WAITS_BEFORE, (False, False)),
        ("h2o:budget=12", True, "auto", None, WAITS_LAST, (False, True)),
    ],
)
def test_which_chunks_leave_rows_without_a_token_as_they_are(
    policy: str, filled: bool, compress: Any, chunk: int | None, lengths: list[int], spares: tuple[bool, bool]
) -> None:
    """Those before the last one, and the last. Of a cache that is begun by them, no row holds anything yet."""
    cache, occupied = replace(empty(policy, rows=2), filled=filled), [20 * filled]
    batch = Batch.of([np.arange(n) for n in lengths], 8)
    plan = Plan.of(cache, batch, ending(cache, compress), occupied, chunk=chunk, compress=compress)
    assert (plan.between.spares, plan.spares) == spares
    assert (plan.begins, plan.new, plan.chunk) == (not filled, chunk or 8, chunk)
    assert plan.occupied == (None if chunk else occupied)


def test_which_rows_wait() -> None:
    """Of lengths that are traced only the policy is known: what scored a prompt may be forgotten."""
    for lengths, waits in ([3, 0], True), ([3, 1], False):
        for array in np.array(lengths), jnp.array(lengths):
            assert _some_wait(Batch(array, array), parse("snapkv")) == waits
    for policy, waits in ("snapkv", True), ("h2o", False):
        found: list[bool] = []
        jax.eval_shape(lambda x, policy=policy, found=found: found.append(_some_wait(Batch(x, x), parse(policy))), ONE)
        assert found == [waits]
    assert not _some_wait(Batch(ONE, ONE), parse("snapkv"))


def test_slots_of_the_chunks_of_a_prompt() -> None:
    """Those before the last make the slots of all their tokens; the room is of the last, or of the allocation."""
    for policy, room in ("snapkv:budget=12,window=4", 3), ("adakv:base=snapkv,base.budget=12,base.window=4", 0):
        cache = empty(policy)
        batch, end = Batch.of([np.arange(24)]), ending(cache, "auto")
        chunked, whole = (Plan.of(cache, batch, end, [0], room=3, chunk=chunk, compress="auto") for chunk in (8, None))
        assert (chunked.between.slots, whole.between.slots) == ((16,), (0,))
        assert whole.last(cache).slots == (12 + room,) if room else (24,)
        assert chunked.last(cache).kept == whole.last(cache).kept


def test_rows_of_a_pool() -> None:
    """The head with the least room decides. The segments of a sliding-window layer grow to its window."""
    assert [whole_pages(rows) for rows in (0, 1, PAGE, PAGE + 1)] == [0, PAGE, PAGE, 2 * PAGE]
    nothing, positions, start = None, np.zeros((2, 3, 48)), (np.zeros((2, 6)),) * 2
    pool: Any = Segments(*(nothing,) * 2, positions, start, (), (), (), *(nothing,) * 3, growing=4)
    usage = Usage([9, 9], [40, 17])
    growth = [pool.growth(usage, (1, room), windows=(None, None)) for room in (16, 17, 18, 33, 34)]
    assert growth == [None, None, (PAGE, 48 + 4 * PAGE), (PAGE, 48 + 4 * PAGE), (2 * PAGE, 48 + 4 * 2 * PAGE)]
    assert pool.growth(usage, (1, 34), windows=(None, 8)) == (2 * PAGE, 48 + 2 * (2 + 1) * PAGE)
    assert pool.growth(Usage([9], [UNLIMITED]), (UNLIMITED,), windows=(None,)) is None
    after = pool.slots_after([9, 17], new=7, room=(0, 0), kept=(None, None), windows=(None, None))
    assert after == (whole_pages(24),) * 2
    assert [rows_to_grow(64, (None, 16, 100), heads=2, growing=n) for n in (0, 3, 4, 6)] == [0, 192, 256, 288]
    assert pool.filling((), ()) == (True, True)
    assert replace(pool, growing=0).filling((), ()) == (False, False)
    assert replace(pool, growing=1).within(17).longest == whole_pages(24)
    assert pool.mean_slots == (3 * 48 / 12,)


def test_plans_of_some_layers() -> None:
    plan = ReadPlan((4, 5, 6, 7), (None, 2, 3, None), True, (None, 8, 9, None))
    part = plan.of_layers(1, 2)
    assert part == ReadPlan((5, 6), (2, 3), True, (8, 9))
    assert [part.settles(i) for i in (0, 1)] == [8, 9]
    assert ReadPlan((4, 5), (None, 2), False).of_layers(1, 1) == ReadPlan((5,), (2,), False)
    assert ReadPlan((4,), (None,), False).settles(0) is None


def test_layers_of_a_kind_have_the_slots_of_the_largest() -> None:
    """Layers 0, 2 and 3 are of a kind; the last one is not compressed, and its slots are its own."""
    plan = ReadPlan((12, 9, 14, 30), (12, 9, 14, None), True)
    held: Any = of_slots(6, 2, 1, 8)
    widths = Widths.of(parse("snapkv"), held, plan, ["a", "b", "a", "a"])
    assert widths.wide == ReadPlan((14, 9, 14, 30), (14, 9, 14, None), True)
    assert (widths.before, widths.own) == ((6, 2, 6, 8), (12, 9, 14, 30))
    for policy, other in (("chunkkv", plan), ("snapkv", ReadPlan((12, 9), (12, 9), True, (20, 20)))):
        alone = Widths.of(parse(policy), held, other, ["a", "b", "a", "a"])
        assert (alone.wide, alone.before, alone.own) == (other, held.bounds, None)


def test_ends_that_one_program_serves() -> None:
    plan = ReadPlan((12, 14), (12, 14), True)
    end = End(parse("snapkv"), plan)
    assert not end.alike
    assert end.widened() == End(end.policy, ReadPlan((14, 14), (14, 14), True))
    assert end.widened().alike
    assert End(end.policy, ReadPlan((9, 9), (None, None), True)).alike
    assert [end.of_layer(i).plan for i in (0, 1)] == [ReadPlan((n,), (n,), True) for n in (12, 14)]
    own = End(parse("chunkkv"), plan), End(end.policy, ReadPlan((12, 14), (None, 14), True))
    assert [one.widened() for one in own] == list(own)


@pytest.mark.parametrize(
    ("read", "count", "expected"),
    [
        (8, [8, 8], [12, 12]),  # a prompt within the budget is filled while decoding
        (12, [12, 12], [12, 12]),
        (20, [20, 4], [20, 4]),  # one head retains all of a longer prompt
        (20, [19, 5], [19, 5]),
        (8, [7, 8], [7, 12]),  # it was compressed in an earlier call
    ],
)
def test_limits_of_heads_while_decoding(read: int, count: list[int], expected: list[int]) -> None:
    held = one_layer.entries_at([[*range(read)]] * 2)
    layer, next_position = replace(held, capacity=jnp.full((1, 2), 12)), jnp.array([read])
    found = limits(parse("h2o:budget=12"), layer, jnp.array([count]), next_position)
    assert found[0].tolist() == expected
    grows = limits(parse("snapkv:budget=64"), layer, jnp.array([count]), next_position)
    assert grows[0].tolist() == [UNLIMITED] * 2
