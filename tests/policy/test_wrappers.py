"""Wrappers and budgets that take another policy, over every preset: what the base sees, and which entries stay."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import policies
from kvjax.methods import registry
from kvjax.parts import AdaptiveShares, Everything, Fixed, TopTokens
from kvjax.policy import LayerShape, Moment, Score, ScoreWrapper, most_entries
from tests import tiny
from tests.methods.literal_budgets import adaptive, best, projected, two_stages
from tests.policy.presets import of_its_test
from tests.policy.recording import Recording, notes
from tests.policy.small import small
from tests.products import part

WRAPPERS = {name: part for name, part in registry.parts().own.items() if issubclass(part, ScoreWrapper)}
STATES = {  # the needs that a wrapper says it changes; any other one may change none
    "BlockByBlock": {"slotwise", "by_count", "marks"},
    "ProjectedValues": {"slotwise", "by_count", "marks"},
    "QueryHeadAttention": {"queries", "marks"},
    "QuerySample": {"queries", "keeps_queries", "marks"},
}
for name in policies.PRESETS:
    STATES |= of_its_test(name, "CHANGES", {})
FEW = ("h2o", "morphkv", "kvzip", "expected_attention")
# Scores that carry something else from step to step than `FEW`, or nothing, each under one wrapper; and those that a
# wrapper refuses.
OTHERS = {
    "BlockByBlock": ("lagkv",),
    "ProjectedValues": ("keyformer", "leverage_score", "lagkv", "criticalkv", "tova"),
    "QueryHeadAttention": ("scissorhands",),
    "QuerySample": ("expected_attention",),
}
ONE = tiny.decoder(8, 4, gates=True)
TWO = tiny.decoder(8, 4, (None, None), gates=True)
RNG = np.random.default_rng(7)
ROWS = [RNG.integers(0, tiny.VOCAB, n) for n in (22, 7)]
SIZE = 24
ANSWER = RNG.integers(0, tiny.VOCAB, (3, len(ROWS)))


def over_scores():
    """Wrappers over one preset for each score."""
    presets = {small(name).score: name for name in (*policies.PRESETS, *FEW)}.values()
    others = [(wrapper, preset) for wrapper, own in OTHERS.items() for preset in own]
    return part(product(WRAPPERS, presets), [*product(WRAPPERS, FEW), *others])


def model(preset):
    """Of one layer where each layer has the same budget for itself."""
    return ONE if isinstance(small(preset).budget, Everything | Fixed | AdaptiveShares) else TWO


def unless_refused(build, name):
    """The policy that `build` makes; None where it is refused with a reason that names that part."""
    try:
        return build()
    except ValueError as refusal:
        if name not in str(refusal):
            raise
        return None


def run(policy, name):
    """The notes of a prompt that a model of one layer reads, and of three tokens of an answer if they evict."""
    notes(name)
    _, filled = tiny.prefill(ONE, policy, ROWS, SIZE)
    prompt = notes(name)
    for token in ANSWER if policy.evicts(0, 1) else ():
        _, filled = tiny.step(ONE, filled, token, np.ones(len(ROWS), bool))
    return prompt, notes(name)


@cache
def alone(preset):
    """Of a preset's score without a wrapper."""
    policy = small(preset)
    return run(replace(policy, score=Recording(policy.score, "alone")), "alone")


def comparable(found):
    """The notes that must not depend on a wrapper: all but the scores, which come once more if they depend on counts.

    By the time of decoding other entries may have stayed, so that only the form and the queries are the same. A program
    may note things in any order.
    """
    for what, shown in sorted(found, key=lambda note: note[0]):
        if not what.startswith("scores"):
            form = jax.tree.structure(shown), [np.shape(x) for x in jax.tree.leaves(shown)]
            alike = {"queries", "positions", "lengths"} if "decoding=True" in what else set(shown or ())
            yield what, form, [x for name in sorted(alike) for x in jax.tree.leaves(shown[name])]


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(("wrapper", "preset"), over_scores())
def test_a_base_sees_what_it_sees_alone(wrapper, preset):
    """It observes, replays, asks and lays out the same; of what it needs, only what the wrapper says is different."""
    policy = small(preset)
    wrapped = unless_refused(
        lambda: replace(policy, score=WRAPPERS[wrapper](Recording(policy.score, "wrapped"))), wrapper
    )
    if wrapped is None:
        return
    needs, base = vars(wrapped.score.needs), vars(policy.score.needs)
    assert {name for name in needs if needs[name] != base[name]} <= STATES.get(wrapper, set())
    assert policy.score.needs.marks <= wrapped.score.needs.marks
    for before, after in zip(alone(preset), run(wrapped, "wrapped"), strict=True):
        expected, got = list(comparable(before)), list(comparable(after))
        assert [(what, form) for what, form, _ in got] == [(what, form) for what, form, _ in expected]
        for (what, _, ours), (_, _, theirs) in zip(got, expected, strict=True):
            for x, y in zip(ours, theirs, strict=True):
                np.testing.assert_allclose(x, y, atol=1e-5, rtol=1e-5, err_msg=what)


@dataclass(frozen=True)
class Speaking(Score):
    """A score that says which of its methods was called, with what."""

    def init(self, shape):
        return None, jnp.zeros((shape.batch, shape.kv_heads))

    def asks(self, per_row, positions):
        return "asked", per_row, positions

    def across(self, per_row):
        return [None if own is None else own + 1 for own in per_row]

    def passes(self, tokens, lengths, texts):
        return ["passes", tokens, lengths, texts]

    def __call__(self, entries, moment):
        return "scores", entries, moment


@pytest.mark.parametrize("wrapper", [ScoreWrapper, *WRAPPERS.values()])
def test_what_is_asked_and_what_layers_tell_each_other_are_the_base_s(wrapper):
    score, shape = wrapper(Speaking()), LayerShape(2, 4, 2, 8, jnp.dtype("float32"), 32)
    assert score.passes("tokens", "lengths", "texts") == ["passes", "tokens", "lengths", "texts"]
    _, state = score.init(shape)
    asked, own, positions = score.asks(state, "positions")
    assert (asked, own.tolist(), positions) == ("asked", [[0, 0]] * 2, "positions")
    nothing, after = score.across([None, state])
    assert nothing is None
    assert jax.tree.structure(after) == jax.tree.structure(state)
    changes = [after - before for before, after in zip(*map(jax.tree.leaves, (state, after)), strict=True)]
    assert [change.tolist() for change in changes if change.any()] == [[[1, 1]] * 2]
    if wrapper is ScoreWrapper:
        assert score("entries", "moment") == ("scores", "entries", "moment")


@cache
def retained_alone(preset):
    """The number of entries [L, H] that each row's heads retain under a preset."""
    policy, params = small(preset), model(preset)
    if entrywise(policy) and not policy.allocates:
        lengths, layers = np.array(list(map(len, ROWS))), params.config.num_layers
        budgets = np.array([policy.capacity(layer, lengths, layers) for layer in range(layers)])
        return [np.repeat(np.minimum(budgets[:, b : b + 1], len(row)), 4, axis=1) for b, row in enumerate(ROWS)]
    _, filled = tiny.prefill(params, policy, ROWS, SIZE)
    return [np.array([[len(head) for head in layer] for layer in tiny.held(filled, b)]) for b in range(len(ROWS))]


def compared(policy, params):
    """A cache, and by layer what a score named "base" was shown and gave: while heads were compared, and at last."""
    notes("base")
    _, filled = tiny.prefill(params, policy, ROWS, SIZE)
    layers = [{} for _ in params.layers]
    for what, shown in notes("base"):
        if what.startswith("scores"):
            layers[int(what[-1])][shown["counts"] is None] = shown
    return filled, [(found.get(True), found.get(False, found.get(True))) for found in layers if found]


def raised(shown):
    """The base's scores [B, H, M], +inf for protected entries and -inf for empty slots."""
    scores = np.where(shown["protected"], np.inf, shown["scores"]).astype(np.float64)
    return np.where(np.asarray(shown["entries"].positions) >= 0, scores, -np.inf)


def in_order(x, shown, b):
    """An array [B, H, M, ...] of a row's entries in order of position, without empty slots: [1, H, N, ...]."""
    held = np.asarray(shown["entries"].positions[b])
    return np.stack([np.asarray(x[b])[h][np.argsort(own)[np.sum(own < 0) :]] for h, own in enumerate(held)])[None]


@partial(jax.jit, static_argnums=0)
def retained(policy, entries, next_position, protected, scores):
    """The positions [B, H, S]. The layer matters to the score alone, which has judged already."""
    moment = Moment(next_position, TWO.attention_layers[0], protected=protected, counts=entries.capacity)
    return policy.retain(entries, moment, scores, SIZE).positions


def by_the_parts(policy, shown, scores, counts):
    """The positions [B][H] that the policy's own selection and merge leave, given scores [B, H, M] and counts."""
    entries = replace(shown["entries"], capacity=np.asarray(counts))
    given = entries, shown["next_position"], shown["protected"], np.asarray(scores, np.float32)
    return [[sorted(head[head >= 0].tolist()) for head in row] for row in np.asarray(retained(policy, *given))]


def entrywise(policy):
    """Whether the best scores stay; if not, the policy's own selection and merge tell what does."""
    return policy.select == TopTokens() and not policy.merge.effects.at_prompt


# Others are d2o and kvcompose, of which dynamickv has the budgets by layer and kvmerger the merge at a prompt, and like
# those here.
BASES = ("h2o", "kvzip", "kvmerger", "pyramidkv", "chunkkv", "kvcrush", "knorm")


@pytest.mark.long(first=1)
@pytest.mark.slow(first=1)
@pytest.mark.parametrize("preset", part(policies.PRESETS, (*BASES, "dynamickv")))
def test_adakv_over_every_preset(preset):
    """Heads of a layer compete for the entries that the preset gives the layer, or the combination is refused.

    The preset's learned tokens are among these entries in every head.
    """
    base, params = small(preset), model(preset)
    policy = unless_refused(lambda: policies.adakv(base, normalise="signed" not in base.score.needs.marks), "adakv: ")
    if policy is None:
        return
    filled, layers = compared(replace(policy, score=Recording(base.score, "base")), params)
    least = 0 if base.every is None else base.minimum
    for layer, (first, last) in enumerate(layers):
        counts, learned = np.zeros((len(ROWS), 4), int), []
        for b, row in enumerate(ROWS):
            mean = int(base.capacity(layer, np.array([len(row)]), len(layers))[0])
            if base.allocates:
                mean = retained_alone(preset)[b][layer, 0]
            beside = base.learned_count if len(row) > mean else 0
            learned.append(list(range(len(row), len(row) + beside)))
            ranked = in_order(raised(first), first, b)[0]
            counts[b] = adaptive(ranked, mean - beside, least, normalise=policy.budget.normalise)
        counts = np.minimum(counts, [[len(row)] for row in ROWS])
        if entrywise(policy):
            stay = [best(in_order(raised(last), last, b), counts[b : b + 1])[0] for b in range(len(ROWS))]
        else:
            stay = by_the_parts(policy, last, raised(last), counts)
        expected = [[head + more for head in row] for row, more in zip(stay, learned, strict=True)]
        assert [tiny.held(filled, b)[layer] for b in range(len(ROWS))] == expected
    assert len(layers) == params.config.num_layers


def staged(params, shown, layer, counts):
    """Scores [B, H, M] by which heads retain both stages: the entries of the first above all others."""
    scores, protected = np.asarray(shown["scores"], np.float64), np.asarray(shown["protected"])
    norms = projected_layer(params, layer, np.asarray(shown["entries"].values, np.float64))
    scores = np.where(protected, np.inf, (scores + 1e-4) * norms)
    for b, h in np.ndindex(counts.shape):
        order = np.argsort(-raised(shown)[b, h], kind="stable")
        scores[b, h, order[: int(counts[b, h] * 0.5 + 1e-4)]] += (
            2 * np.abs(scores[b, h][np.isfinite(scores[b, h])]).max()
        )
    return np.where(np.asarray(shown["entries"].positions) >= 0, scores, -np.inf)


def projected_layer(params, layer, values):
    """The mean L1 norms [B, H, M] of a layer's values [B, H, M, D] behind the output projection."""
    rows = [projected(params, np.stack([own] * len(params.layers)), order=1)[layer].mean(axis=1) for own in values]
    return np.stack(rows)


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("preset", part(policies.PRESETS, BASES))
def test_criticalkv_over_every_preset(preset):
    """Each head retains as many entries as without it, in two stages, or the combination is refused."""
    base, params = replace(small(preset), learned=None), model(preset)  # test_restorekv.py has learned tokens
    policy = unless_refused(lambda: policies.criticalkv(base), "criticalkv: ")
    if policy is None:
        return
    recorded = replace(policy.score, base=Recording(base.score, "base"))
    filled, layers = compared(replace(policy, score=recorded), params)
    for layer, (_, shown) in enumerate(layers):
        positions = np.asarray(shown["entries"].positions)
        assert shown["scores"][positions >= 0].min() >= 0, "signed, and not declared so"
        if entrywise(policy):
            counts = np.stack([x[layer] for x in retained_alone(preset)])
            norms = projected_layer(params, layer, np.asarray(shown["entries"].values, np.float64))
            stay = [
                two_stages(in_order(raised(shown), shown, b), in_order(norms, shown, b), counts[b : b + 1])[0]
                for b in range(len(ROWS))
            ]
        else:
            counts = np.asarray(shown["counts"])
            stay = by_the_parts(policy, shown, staged(params, shown, layer, counts), counts)
        assert [tiny.held(filled, b)[layer] for b in range(len(ROWS))] == stay
    assert len(layers) == (0 if most_entries(base.budget, 0, 1, 1) is None else params.config.num_layers)
