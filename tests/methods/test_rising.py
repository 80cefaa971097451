"""A budget that is a share of all tokens seen: which entries heads hold, in how many slots, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

import kvjax
from kvjax.methods.rising import SeenShare
from kvjax.policies import adakv, h2o, knorm, parse, rising, snapkv
from tests import tiny

# What the tests of all presets run (tests/policy/presets.py).
OPTIONS = ("base=knorm,share=0.5", "base=h2o,share=0.3,every=3")

PARAMS = tiny.decoder(windows=(None, None))
ROWS = [np.random.default_rng(6).integers(0, tiny.VOCAB, n) for n in (31, 12, 5)]


def norms_of(cache, row, known):
    """The norm of the key of each token that a head of the second layer holds or has held, by head and position."""
    layer = cache.entries[1]
    for head, positions in enumerate(np.asarray(layer.positions[row])):
        for slot in np.flatnonzero(positions >= 0):
            norm = np.linalg.norm(np.asarray(layer.keys[row, head, slot], np.float64))
            known.setdefault(head, {})[int(positions[slot])] = norm
    return known


@pytest.mark.long(first=1)
@pytest.mark.slow(first=1)
@pytest.mark.parametrize(("share", "every"), [(0.5, 1), (0.3, 3), (1.0, 1)])
def test_heads_hold_the_share_of_all_tokens(share, every):
    """Prompts, then 40 steps: the smallest norms stay, floor(share * n) of them, in no more slots than that needs."""
    policy = rising(knorm(), share, every)
    _, full = tiny.prefill(PARAMS, "full", ROWS, 32)
    _, cache = tiny.prefill(PARAMS, policy, ROWS, 32, room=0)
    cache = kvjax.with_room(cache, 40)
    assert cache.entries.bounds[0] <= kvjax.cache.bucket(int(share * 31) + int(40 * share) + every + 1)
    known = [norms_of(full, row, {}) for row in range(len(ROWS))]
    held = []
    for row, lengths in enumerate(map(len, ROWS)):
        most = max(int(share * lengths + 1e-9), every)
        held.append([set(sorted(known[row][h], key=known[row][h].get)[:most]) for h in range(2)])
    for step in range(40):
        assert [[set(head) for head in tiny.held(cache, row)[1]] for row in range(3)] == held
        _, cache = tiny.step(PARAMS, cache, np.full(3, step), np.full(3, True))
        for row, own in enumerate(held):
            norms_of(cache, row, known[row])
            n = len(ROWS[row]) + step
            for h, head in enumerate(own):
                if len(head) >= max(int(share * (n + 1) + 1e-9), every):
                    head -= set(sorted(head, key=known[row][h].get)[-every:])
                head.add(n)


def test_a_later_turn_is_part_of_what_was_seen():
    """The share is of both turns, also where a short turn follows a long one."""
    policy = rising(knorm(), 0.5)
    _, cache = tiny.prefill(PARAMS, policy, ROWS, 32, room=0)
    _, cache = kvjax.extend(PARAMS, cache, *tiny.left_pad([np.arange(n) for n in (6, 20, 1)], 20))
    assert [{len(head) for head in tiny.held(cache, row)[0]} for row in range(3)] == [{18}, {16}, {3}]
    assert cache.entries.bounds[0] <= 32, "slots for half of the tokens"


def test_generate_sets_the_slots_of_the_answer_aside():
    out = kvjax.generate(PARAMS, ROWS, policy=rising(knorm(), 0.25), max_new_tokens=64, eos=())
    assert {len(head) for head in tiny.held(out.cache, 0)[0]} == {(31 + 63) // 4}
    assert out.cache.entries.bounds[0] < 31 // 4 + 64, "fewer than the answer has tokens"


def test_without_room_an_answer_ends_with_an_error():
    """A head that is not full yet needs a slot, and there is none."""
    _, cache = tiny.prefill(PARAMS, rising(knorm(), 0.5), ROWS, 32, room=0)
    token = np.zeros((3, 1), np.int32)
    marked, steps = jax.jit(kvjax.extend), 0
    while np.isfinite(marked(PARAMS, cache, token)[0]).all():
        _, cache = kvjax.extend(PARAMS, cache, token)
        steps += 1
    assert (31 + steps + 1) // 2 == cache.entries.bounds[0] + 1, "the longest row fills all slots"
    with pytest.raises(ValueError, match=r"the cache has room for 0 tokens, not 1; call kvjax.with_room"):
        kvjax.extend(PARAMS, cache, token)
    _, cache = kvjax.extend(PARAMS, kvjax.with_room(cache, 1), token)


@pytest.mark.long
def test_an_engine_answers_as_generate_does():
    policy = rising(h2o(), 0.4, every=2)  # the norms of one token's keys are equal but for their rounding
    alone = [kvjax.generate(PARAMS, [row], policy=policy, max_new_tokens=12, eos=()).tokens[0] for row in ROWS]
    with kvjax.Engine(PARAMS, policy=policy, rows=2, max_prompt=32, max_new_tokens=12) as engine:
        found = [engine.submit(row, max_new_tokens=12, eos=()) for row in ROWS]
        for expected, ticket in zip(alone, found, strict=True):
            np.testing.assert_array_equal(ticket.result().tokens, expected)


def test_refusals():
    for text, error in {
        "share=0.00001": "^rising: share=1e-05: expected a share of all tokens of 1/10000 or more",
        "base=snapkv": "pools entries|max pooling|Pooling",
        "base=dynamickv": "^rising: it replaces its base's budget, and .* is part of that base's method",
    }.items():
        with pytest.raises(ValueError, match=error):
            parse(f"rising:{text}")
    with pytest.raises(ValueError, match="SeenShare"):
        adakv(rising(h2o()))
    with pytest.raises(ValueError, match="a share of the answer too: expected every=1 or more"):
        replace(snapkv(), budget=SeenShare(0.5))
