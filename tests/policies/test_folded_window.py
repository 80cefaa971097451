"""What blocks of queries fold to: the same choices whatever the block, and the bytes that the docstring states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import jax
import numpy as np
import pytest

from kvjax import policies
from kvjax.extend import extend
from kvjax.extend import step as one_step
from kvjax.pallas_kernels import Reduction, use
from kvjax.parts import FoldedWindow
from tests import tiny
from tests.dense import assert_close

reading = jax.jit(extend)


@pytest.mark.parametrize("fusion", ["sum", "max"])
@pytest.mark.parametrize("chunk", [None, 5])
def test_every_block_keeps_the_same_tokens(fusion, chunk):
    """Of prompts shorter and longer than the window, read in one piece or in chunks that cut blocks."""
    params = tiny.decoder(heads=4, kv_heads=2)
    rng = np.random.default_rng(1)
    rows = [rng.integers(0, tiny.VOCAB, n) for n in (31, 18, 3)]
    held = []
    for block in (1, 3, 6):
        policy = policies.morphkv(budget=16, window=6, fusion=fusion, block=block)
        _, cache = tiny.prefill(params, policy, rows, 32, chunk=chunk)
        history = [[tiny.held(cache, b) for b in range(3)]]
        for i in range(20):
            _, cache = tiny.step(params, cache, np.array([i, 2 * i, 3 * i]), np.array([True, True, i % 2 == 0]))
            history.append([tiny.held(cache, b) for b in range(3)])
        held.append(history)
    assert held[0] == held[1] == held[2]
    assert len(held[0][-1][0][0][0]) == 16


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("fusion", ["sum", "max"])
def test_asking_ahead_changes_nothing(fusion, bits):
    """Beside a layer with a sliding window, with rows that idle, before and after a turn of several tokens."""
    params = tiny.decoder(windows=(14, None))
    rng = np.random.default_rng(2)
    rows, tokens = [rng.integers(0, tiny.VOCAB, n) for n in (31, 18, 3)], rng.integers(0, tiny.VOCAB, (14, 3))
    policy = policies.morphkv(budget=16, window=9, fusion=fusion, block=3)
    if bits:
        policy = policies.quantize(policy, bits=bits)
    histories = []
    for score in (policy.score, replace(policy.score, ahead=False)):
        history = []
        logits, cache = tiny.prefill(params, replace(policy, score=score), rows, 32, room=32)
        for i, token in enumerate(tokens):
            if i == 7:
                turn = tokens[:4].T
                logits, cache = reading(params, cache, turn, np.array([4, 0, 2]))
            logits, cache = tiny.step(params, cache, token, np.array([True, i % 3 > 0, True]))
            history.append((logits, [tiny.held(cache, b) for b in range(3)]))
        histories.append(history)
    assert policy.score.ahead
    for (ours, held), (theirs, expected) in zip(*histories, strict=True):
        assert held == expected
        assert_close(ours, theirs)


@pytest.mark.parametrize(("every", "given"), [(1, ["keys and values"]), (2, ["keys", "keys and values"])])
def test_where_each_step_evicts_it_reads_keys_once(every, given):
    """By the products and kernels of a step that are given all keys."""
    params, policy = tiny.decoder(), policies.morphkv(budget=20, window=9, block=3, every=every)
    _, cache = tiny.prefill(params, policy, [np.arange(30)], 32)
    with use("triton-interpret"):
        program = jax.make_jaxpr(one_step)(params, cache, np.array([1]), np.array([True]))
    keys = cache.layers[0].keys.shape
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


@pytest.mark.parametrize("every", [1, 2])
def test_bytes_of_the_state(every):
    """R / block floats a slot, one more where each step evicts; R queries with a log-sum-exp each, their positions."""
    params = tiny.decoder(heads=4, kv_heads=2)
    _, cache = tiny.prefill(params, f"morphkv:budget=16,window=6,block=2,every={every}", [np.arange(20)], 24)
    blocks, leaving = cache.layers[0].per_slot
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
        (lambda: policies.morphkv(budget=64, window=32, block=0), "integer >= 1"),
        (lambda: policies.morphkv(budget=64, normalise="distant", block=4), "block=4 with normalise='distant'"),
        (lambda: FoldedWindow(8, 1, Reduction(), ahead=True), "asks no query again"),
        (lambda: FoldedWindow(8, 4, Reduction(rows="mean")), "accepted are rows 'sum' and 'max'"),
        (lambda: FoldedWindow(8, 4, Reduction(rows="sum", group="max")), "of a group reduced first"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ValueError, match=message):
        make()
