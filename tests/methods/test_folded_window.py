"""Weights folded by blocks of queries: the choices of the literal algorithm, and the bytes that docstrings state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest

from kvjax import policies
from kvjax.extend import extend
from kvjax.pallas_kernels import Reduction, use
from kvjax.parts import FoldedWindow, WindowAttention
from kvjax.policy import Moment
from kvjax.reading.layers import step as one_step
from tests import tiny
from tests.dense import assert_close
from tests.methods import one_layer
from tests.methods.literal_heads import Generation, SlidingHead
from tests.products import part

reading = jax.jit(extend)


WINDOWS, LENGTHS, TURN, STEPS = (20, None), (31, 18, 3), (4, 0, 2), 14


def goes_on(row, i):
    """The second row idles in every third step."""
    return row != 1 or i % 3 > 0


@cache
def literal(fusion):
    """(logits, positions held) of each row after its prompt and after each step, by Algorithm 1 on stored weights.

    Before step 7 rows 0 and 2 read a turn of several tokens. The first layer has a sliding window.
    """
    rows, tokens = texts()
    histories = []
    for row, text in enumerate(rows):
        generation = Generation(
            tiny.decoder(windows=WINDOWS),
            lambda layer, head: SlidingHead(sight=WINDOWS[layer], budget=16, window=6, fusion=fusion),
        )
        history = [(generation.prompt(text), generation.held())]
        for i in range(STEPS):
            if i == 7 and TURN[row]:
                generation.prompt(tokens[4 - TURN[row] : 4, row])
            if goes_on(row, i):
                history.append((generation.decode(tokens[i, row]), generation.held()))
        histories.append(history)
    assert min(head.closest for layer in generation.heads for head in layer) > 1e-6
    return histories


def texts():
    rng = np.random.default_rng(2)
    return [rng.integers(0, tiny.VOCAB, n) for n in LENGTHS], rng.integers(0, tiny.VOCAB, (STEPS, 3))


BLOCKS = [(3, False, None), (3, True, 5), (1, False, None), (6, True, None)]
# Each fusion with and without asking ahead.
CHOSEN = [(*BLOCKS[0], "sum"), (*BLOCKS[1], "sum"), (*BLOCKS[2], "max"), (*BLOCKS[3], "max")]


@pytest.mark.long
@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    ("block", "ahead", "chunk", "fusion"),
    part([(*block, fusion) for block in BLOCKS for fusion in ("sum", "max")], CHOSEN),
)
def test_every_block_is_algorithm_1(block, ahead, chunk, fusion):
    """Of prompts longer and shorter than budget and window, with idle rows, before and after a turn."""
    params, (rows, tokens) = tiny.decoder(windows=WINDOWS), texts()
    policy = policies.morphkv(budget=16, window=6, fusion=fusion, block=block)
    assert policy.score.ahead == (block > 1)
    policy = replace(policy, score=replace(policy.score, ahead=ahead))
    logits, cache = tiny.prefill(params, policy, rows, 32, room=32, chunk=chunk)
    ours = [[(logits[row], tiny.held(cache, row))] for row in range(3)]
    for i in range(STEPS):
        if i == 7:
            _, cache = reading(params, cache, tokens[:4].T, np.array(TURN))
        logits, cache = tiny.step(params, cache, tokens[i], np.array([goes_on(row, i) for row in range(3)]))
        for row in range(3):
            if goes_on(row, i):
                ours[row].append((logits[row], tiny.held(cache, row)))
    for row, history in enumerate(literal(fusion)):
        for (own, held), (expected, positions) in zip(ours[row], history, strict=True):
            assert held == positions
            assert_close(own, expected, 1e-4, 1e-3)
    assert len(tiny.held(cache, 0)[1][0]) == 16


@pytest.mark.slow(first=2)
@pytest.mark.parametrize(("block", "every", "fusion"), [(3, 1, "sum"), (2, 2, "max")])
def test_folds_are_the_scores_of_all_queries_of_the_window(block, every, fusion):
    """After prompts longer and shorter than budget and window, and after each of 8 steps that evict."""
    policy = policies.morphkv(budget=16, window=6, block=block, every=every, fusion=fusion)
    assert policy.score.ahead == (every == 1)
    whole, lengths = WindowAttention(6, policy.score.reduction), np.array([26, 11, 3])
    q, k, v = one_layer.random_streams(3, 3, 2, 3, 26 + 8)

    @jax.jit
    def both(entries, now):
        _, layer = one_layer.describe(q, k)
        given = (replace(entries, per_slot=None), whole), (entries, policy.score)
        return [score(own, Moment(now, layer)) for own, score in given]

    _, entries = one_layer.read(policy, lengths, 26, q, k, v)
    for t in range(9):
        expected, found = map(np.asarray, both(entries[0], lengths + t))
        distant = np.asarray(entries[0].positions) < (lengths + t - 6)[:, None, None]
        distant &= np.asarray(entries[0].positions) >= 0
        assert_close(found[distant], expected[distant])
        assert t < 3 or distant[:2].any(axis=(1, 2)).all()
        if t < 8:
            token = (x[:, :, 26 + t : 27 + t] for x in (q, k, v))
            _, entries = one_layer.step(policy, lengths + t, entries, *token)


@pytest.mark.slow
@pytest.mark.parametrize("fusion", ["sum", "max"])
def test_asking_ahead_changes_nothing_on_quantised_keys(fusion):
    params, (rows, tokens) = tiny.decoder(), texts()
    policy = policies.quantize(policies.morphkv(budget=16, window=6, fusion=fusion, block=3), bits=8)
    histories = []
    for score in (policy.score, replace(policy.score, ahead=False)):
        logits, cache = tiny.prefill(params, replace(policy, score=score), rows, 32)
        history = [(logits, [tiny.held(cache, row) for row in range(3)])]
        for token in tokens:
            logits, cache = tiny.step(params, cache, token, np.ones(3, bool))
            history.append((logits, [tiny.held(cache, row) for row in range(3)]))
        histories.append(history)
    assert policy.score.ahead
    for (ours, held), (theirs, expected) in zip(*histories, strict=True):
        assert held == expected
        assert_close(ours, theirs)


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(("every", "given"), [(1, ["keys and values"]), (2, ["keys", "keys and values"])])
def test_where_each_step_evicts_it_reads_keys_once(every, given):
    """By the products and kernels of a step that are given all keys."""
    params, policy = tiny.decoder(), policies.morphkv(budget=20, window=9, block=3, every=every)
    _, cache = tiny.prefill(params, policy, [np.arange(30)], 32)
    with use("triton-interpret"):
        program = jax.make_jaxpr(one_step)(params, cache, np.array([1]), np.array([True]))
    keys = cache.entries[0].keys.shape
    products = [e for e in equations(program.jaxpr) if e.primitive.name in ("pallas_call", "dot_general")]
    counts = [sum(x.aval.shape == keys for x in product.invars) for product in products]
    assert [("keys", "keys and values")[n - 1] for n in counts if n] == given


def equations(jaxpr) -> Iterator:
    """Of a program and of all that is within it, but for the insides of kernels."""
    for equation in jaxpr.eqns:
        yield equation
        if equation.primitive.name != "pallas_call":
            for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 2])
def test_bytes_of_the_state(every):
    """R / block floats a slot, one more where each step evicts; R queries with a log-sum-exp each, their positions."""
    params = tiny.decoder(heads=4, kv_heads=2)
    _, cache = tiny.prefill(params, f"morphkv:budget=16,window=6,block=2,every={every}", [np.arange(20)], 24)
    blocks, leaving = cache.entries[0].per_slot
    assert blocks.shape == (1, 2, 3, 16)
    assert (leaving is None) == (every > 1)
    entries, numbers = 2 * 16 * (2 * 8 + 1) * 4 + 2 * 4, 3 + (every == 1)
    assert cache.nbytes == entries + 2 * numbers * 16 * 4 + 4 * 6 * (8 + 1) * 4 + 2 * 6 * 4


def test_default_blocks_take_at_most_eight_numbers_a_slot():
    for window, block in ((32, 4), (200, 25), (30, 5), (31, 31), (4, 1)):
        score = policies.morphkv(budget=2048, window=window).score
        assert (score.window, score.block) == (window, block)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: policies.morphkv(budget=64, window=32, block=5), "divisor of the window, 32"),
        (lambda: policies.morphkv(budget=64, normalise="distant", block=4), "block=4 with normalise='distant'"),
        (lambda: FoldedWindow(8, 1, Reduction(), ahead=True), "no query is scored again"),
        (lambda: FoldedWindow(8, 4, Reduction(rows="mean"), ahead=False), "expected rows 'sum' or 'max'"),
        (lambda: FoldedWindow(8, 4, Reduction(rows="sum", group="max"), ahead=False), "of a group reduced first"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ValueError, match=message):
        make()
