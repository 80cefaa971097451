"""EpiKV against its scores and evictions written out in float64 NumPy, one row at a time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.attend.causal import causal
from kvjax.methods.epikv import READ, HiddenChange
from kvjax.parts import Fixed
from kvjax.policies import parse
from tests import tiny

# What the tests of all presets run (tests/policy/presets.py).
OPTIONS = ("budget=12,window=3,recent=2", "budget=0.5,window=4,recent=1,sinks=1,every=2")
SCORES = (HiddenChange(window=3),)

LAYERS = 5
EARLY, LATE = 1, 3  # 10 / 32 and 21 / 32 of 5 layers
RNG = np.random.default_rng(4)


@pytest.fixture(scope="module")
def params():
    return tiny.decoder(8, 2, (None,) * LAYERS)


class Row:
    """One row: the positions that it holds, the scores of generated tokens, and the changes of two layers."""

    def __init__(self, length: int, budget: int, window: int, recent: int):
        self.budget, self.window, self.recent = budget, window, recent
        self.now = length
        self.scores: dict[int, float] = {}
        self.held = list(range(length))[-budget:]
        self.gaps: dict[int, list[float]] = {EARLY: [], LATE: []}

    def step(self, every: int) -> None:
        """Makes room for a token. Read tokens are worth more than generated ones, and newer ones more than older."""
        if len(self.held) >= self.budget:
            old = [p for p in self.held if p < self.now - self.recent]
            old.sort(key=lambda p: (0, self.scores[p]) if p in self.scores else (1, p))
            self.held = [p for p in self.held if p not in old[:every]]
        self.held.append(self.now)
        self.now += 1

    def see(self, before: np.ndarray, after: np.ndarray) -> None:
        """Scores the token that was added, by the hidden states [L, E] of the token before and of itself."""
        deviations = []
        for layer, gaps in self.gaps.items():
            gaps.append(float(np.linalg.norm(after[layer] - before[layer])))
            own = np.array(gaps[-self.window :])
            deviations.append((own[-1] - own.mean()) / (own.std() + 1e-6))
        self.scores[self.now - 1] = deviations[0] - deviations[1]


def per_rows(cache) -> list:
    """The state per row of each layer."""
    return [layer.per_row for layer in cache.entries]


def last_of(cache, row: int) -> np.ndarray:
    """What each layer remembers of the last token, [L, E]."""
    return np.stack([np.asarray(own.last[row, 0], np.float64) for own in per_rows(cache)])


def residuals(params, row) -> np.ndarray:
    """The residual stream that enters each layer, [L, N, E], by causal attention over a whole text."""
    seen, attend = [], causal(np.arange(len(row))[None])

    def look(layer, *args):
        seen.append(np.asarray(layer.residual[0], np.float64))
        return attend(layer, *args)

    params(np.asarray(row)[None], look)
    return np.stack(seen)


@pytest.mark.parametrize(("every", "recent"), [(1, 2), pytest.param(3, 1, marks=pytest.mark.slow)])
def test_is_the_literal_bookkeeping(params, every, recent):
    """Prompts longer and shorter than the budget; 24 steps, of which rows miss some."""
    budget, window, lengths, size, steps = 12, 5, (16, 6, 1), 16, 24
    policy = f"epikv:budget={budget},window={window},recent={recent},every={every}"
    rows = [RNG.integers(0, tiny.VOCAB, n) for n in lengths]
    tokens = RNG.integers(0, tiny.VOCAB, (steps, len(rows)))
    incoming = RNG.random((steps, len(rows))) < 0.85
    _, cache = tiny.prefill(params, policy, rows, size)
    literal = [Row(n, budget, window, recent) for n in lengths]
    evicted = 0
    for token, comes in zip(tokens, incoming, strict=True):
        before, (_, cache) = cache, tiny.step(params, cache, token, comes)
        for b, own in enumerate(literal):
            if comes[b]:
                own.step(every)
                own.see(last_of(before, b), last_of(cache, b))
            assert tiny.held(cache, b) == [[sorted(own.held)] * 2] * LAYERS
            evicted += own.held[0] > 0
    assert evicted
    oldest = sorted(literal[2].scores)[: -len(literal[2].held)]
    assert set(oldest) & set(literal[2].held), "not simply the newest"


@pytest.mark.long
def test_the_last_hidden_state_is_what_enters_each_layer(params):
    """Of prompts that are padded on the left, and after a step within the budget."""
    rows = [RNG.integers(0, tiny.VOCAB, n) for n in (9, 4)]
    token = RNG.integers(0, tiny.VOCAB, 2)
    _, cache = tiny.prefill(params, "epikv:budget=20,recent=2", rows, 10)
    _, after = tiny.step(params, cache, token, np.ones(2, bool))
    for b, row in enumerate(rows):
        expected = residuals(params, np.append(row, token[b]))
        np.testing.assert_allclose(last_of(cache, b), expected[:, -2], atol=2e-5)
        np.testing.assert_allclose(last_of(after, b), expected[:, -1], atol=2e-5)


@pytest.mark.long
def test_a_later_turn_counts_as_prompt(params):
    """Its tokens, and those of the first prompt, are known as read; the answer between them has scores."""
    policy = parse("epikv:budget=40,recent=2")
    first = kvjax.generate(params, RNG.integers(0, tiny.VOCAB, (1, 6)), policy=policy, max_new_tokens=5)
    again = kvjax.generate(params, RNG.integers(0, tiny.VOCAB, (1, 4)), cache=first.cache, max_new_tokens=3)
    layer = again.cache.entries[2]
    state = dict(zip(np.asarray(layer.positions[0, 1]).tolist(), np.asarray(layer.per_slot[0, 1]), strict=True))
    read = {p for p in state if p >= 0 and state[p] == READ}
    length = int(again.cache.length[0])
    assert length - len(read) in (6, 7, 8)  # of two answers
    assert set(range(6)) <= read
    generated = [p for p in range(6, 11) if p not in read]
    assert len(generated) >= 4
    assert len({float(state[p]) for p in generated}) == len(generated)


def test_beside_a_layer_that_keeps_everything_the_nearest_one_tells():
    """Layers 0 and 1 of five keep no state, so that layer 2 stands for layer 1."""
    score = HiddenChange()
    shape = kvjax.policy.LayerShape(1, 2, 2, 4, jnp.dtype("float32"), 8, 3)
    _, change = score.init(shape)
    states = [None, None, *(change._replace(deviation=jnp.full((1, 2), x)) for x in (0.5, 2.0, 7.0))]
    after = score.across(states)
    assert after[:2] == [None, None]
    assert [float(own.score[0, 0]) for own in after[2:]] == [0.5 - 2.0] * 3
    assert score.across([None, None]) == [None, None]


def test_budgets_with_whole_layers_are_refused():
    budget = kvjax.parts.VarianceShares(Fixed(12), dense_first=1, dense_last=0)
    with pytest.raises(ValueError, match="HiddenChange: it scores the tokens of all layers by two of them"):
        kvjax.Policy(HiddenChange(), budget, every=1)


def test_bfloat16(params):
    """What a layer remembers has the model's dtype, and evictions go on."""
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    answer = kvjax.generate(
        low, RNG.integers(0, tiny.VOCAB, (2, 8)), policy="epikv:budget=10,recent=2", max_new_tokens=9
    )
    assert per_rows(answer.cache)[0].last.dtype == jnp.bfloat16
    assert all(len(head) <= 10 for layer in tiny.held(answer.cache, 0) for head in layer)
