"""LaCache against the released compaction of a list, one token at a time."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import Slots
from kvjax.policies import parse
from tests import tiny
from tests.methods import one_layer

# What the tests of all presets run (tests/policy/presets.py).
OPTIONS = (
    "budget=12,sinks=1,recent=3",
    "budget=12,run=4,keep=2,sinks=2,recent=3,positions=in_cache",
    "budget=0.5,run=3,sinks=0,recent=1,every=None",
)


class List:
    """The cache of one layer, in order of position."""

    def __init__(self, layer, budget, sinks, recent, run, keep):
        self.budget, self.sinks, self.recent, self.run, self.keep = budget, sinks, recent, run, keep
        self.offset = layer % (run - keep + 1)
        self.tokens, self.cursor, self.leaving = [], sinks, []

    def add(self, token):
        if len(self.tokens) == self.budget:
            if not self.leaving:
                if self.cursor + self.keep > self.budget - self.recent - 1:
                    self.cursor = self.sinks
                run = self.tokens[self.cursor : self.cursor + self.run]
                stays = run[self.offset : self.offset + self.keep]
                self.leaving = [token for token in run if token not in stays]
                self.cursor += self.keep
            self.tokens.remove(self.leaving.pop(0))
        self.tokens.append(token)


@pytest.mark.parametrize(
    ("layer", "sinks", "expected"),
    [
        (0, 1, [0, 1, 5, 7, 9, 10, 11, 12]),  # 2, 4, 6 and 8 leave their pairs, then 3 leaves (1, 3)
        (1, 1, [0, 4, 6, 8, 9, 10, 11, 12]),  # 1, 3, 5 and 7 leave, then 2 leaves (2, 4)
        (2, 1, [0, 1, 5, 7, 9, 10, 11, 12]),
        (0, 2, [0, 1, 2, 6, 9, 10, 11, 12]),  # 3, 5 and 7 leave, then 4 leaves (2, 4) and 8 leaves (6, 8)
    ],
)
def test_thirteen_tokens_in_eight_slots(layer, sinks, expected):
    literal = List(layer, 8, sinks, 2, 2, 1)
    for token in range(13):
        literal.add(token)
    assert literal.tokens == expected
    policy = parse(f"lacache:budget=8,sinks={sinks},recent=2")
    entries = one_layer.entries_at([[*range(13)]])
    entries = replace(entries, capacity=jnp.array([[8]]))
    left = one_layer.compress(policy, entries, one_layer.moment(13, index=layer), 8)
    assert left.positions[0, 0].tolist() == expected


@pytest.mark.slow(first=2)
@pytest.mark.parametrize(("run", "keep", "budget"), [(5, 2, 14), (2, 1, 12), (3, 1, 13), (4, 3, 12)])
def test_prompts_and_steps_are_the_list(run, keep, budget):
    """Three layers; prompts of five budgets, longer than one and shorter than what is protected, then 25 steps."""
    sinks, recent, steps, lengths = 2, 4, 25, (60, 15, 2)
    params, rng = tiny.decoder(windows=(None,) * 3), np.random.default_rng(run)
    rows = [rng.integers(0, tiny.VOCAB, n) for n in lengths]
    policy = f"lacache:budget={budget},run={run},keep={keep},sinks={sinks},recent={recent}"
    _, cache = tiny.prefill(params, policy, rows, 64, room=steps)
    literal = [[List(layer, budget, sinks, recent, run, keep) for layer in range(3)] for _ in rows]
    for own, length in zip(literal, lengths, strict=True):
        for layer in own:
            for token in range(length):
                layer.add(token)
    for step in range(steps + 1):
        for row, own in enumerate(literal):
            assert tiny.held(cache, row) == [[layer.tokens] * 2 for layer in own]
            for layer in own:
                layer.add(lengths[row] + step)
        _, cache = tiny.step(params, cache, rng.integers(0, tiny.VOCAB, 3), np.ones(3, bool))


def test_positions_are_the_scores_while_heads_are_compared():
    keys, positions = jnp.zeros((1, 1, 4, 2)), jnp.array([[[-1, 0, 5, 3]]])
    entries = Slots(keys, keys, positions, jnp.full((1, 1), 4))
    scores = parse("lacache:budget=12,sinks=1,recent=3").score(entries, one_layer.moment(6))
    assert scores[0, 0].tolist() == [-1, 0, 5, 3]


def test_layers_together_hold_more_than_one_does():
    """Two layers retain what one would with nearly twice the budget."""
    layers = [List(layer, 40, 4, 8, 2, 1) for layer in range(2)]
    for token in range(60):
        for layer in layers:
            layer.add(token)
    assert set(layers[0].tokens) | set(layers[1].tokens) == set(range(60))
