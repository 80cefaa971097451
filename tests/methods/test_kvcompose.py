"""KVCompose against its equations 14 to 24 in NumPy, on the attention rows of a decoder that reads its text twice."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.cache import Slots
from kvjax.mesh.heads import ALL_HEADS
from kvjax.methods.kvcompose import TaskWeights
from kvjax.parts import CompositeShares, Fixed, GlobalShares, TaskAttention
from kvjax.policies import adakv, kvcompose, parse
from kvjax.policy import Attended, Moment
from tests import tiny
from tests.dense import assert_close
from tests.methods import allocating
from tests.methods.literal_budgets import adaptive, best, projected
from tests.methods.reference import Reader

SIZE, LAYERS = 32, 2
RNG = np.random.default_rng(3)
ROWS = [RNG.integers(0, tiny.VOCAB, n) for n in (26, 9, 17)]
PROMPTS = ((5, 11, 3), (60, 2))


def decoder(group: int):
    return tiny.decoder(2 * group, 2, (None,) * LAYERS)


@cache
def reader(group: int, row: int) -> Reader:
    text = Reader(decoder(group))
    text.read(ROWS[row])
    return text


@cache
def task_weights(group: int, row: int, source: str) -> np.ndarray:
    """A[l, h, g, m, c]: what the rows m of a task give to the context's tokens c."""
    text, n = reader(group, row), len(ROWS[row])
    if source == "self":
        return text.weights(range(n), range(n))
    tasks = [ROWS[row]] if source == "replay" else [np.array(prompt) for prompt in PROMPTS]
    parts = []
    for task in tasks:
        text.read(task)
        parts.append(text.weights(range(n, n + len(task)), range(n)))
        text.forget(n)
    return np.concatenate(parts, axis=-2)


def equations(weights, norms=None, rows="max", group="mean", head_mean=True):
    """Equations 14 to 16: S [L, H, N]; of attention that norms [L, H, G, N] weigh, where they are given."""
    if norms is not None:
        weights = weights * norms[..., None, :]
    s1 = weights.sum(axis=-2) / (weights > 0).sum(axis=-2) if rows == "mean" else getattr(weights, rows)(axis=-2)
    s2 = getattr(s1, group)(axis=2)
    return s2 + s2.mean(axis=1, keepdims=True) if head_mean else s2


def norms_of(params, values, kind):
    """Of each value V: |V|, or |V W_O| with the rows of W_O that belong to the query head; [L, H, G, N]."""
    if kind == "none":
        return None
    if kind == "v":
        return np.linalg.norm(values, axis=-1)[:, :, None]
    return projected(params, values, order=2)


def compose(scores, mean, structured=True, min_tokens=0, first_layer=False, heads="mean"):
    """Equations 17 to 24: positions kept, by layer and head."""
    L, H, _ = scores.shape
    order = np.argsort(-scores, axis=-1, kind="stable")
    ranked = np.take_along_axis(scores, order, axis=-1)
    pools = getattr(ranked, heads)(axis=1, keepdims=True) if structured else ranked  # I [L, 1, N], or S' [L, H, N]
    if first_layer:
        pools[0] = pools.max(axis=0)
    pools[..., :min_tokens] = np.inf
    top = np.argsort(-pools, axis=None, kind="stable")[: mean * L * pools.shape[1]]
    counts = np.zeros(pools.shape[:2], int)
    np.add.at(counts, np.unravel_index(top, pools.shape)[:2], 1)
    return best(scores, np.broadcast_to(counts, (L, H)))


def filled_by(params, policy) -> kvjax.KVCache:
    """What a policy retains of the rows. Only what is allocated by the scores differs from `kvcompose(8)`."""
    if policy == kvcompose(8):
        return tiny.prefill(params, policy, ROWS, SIZE)[1]
    all_tokens = allocating.read(params, kvcompose(8), ROWS, SIZE)
    return allocating.reallocated(params, all_tokens, policy, SIZE)


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    ("group", "options"),
    [
        (1, {"budget": 8}),
        (4, {"budget": 8}),
        (7, {"budget": 8}),
        (4, {"budget": 0.5, "structured": False, "min_tokens": 2}),
        (4, {"budget": 3, "first_layer": True}),
        (4, {"budget": 8, "heads": "max"}),
        (4, {"budget": 8, "recent": 3}),
        (4, {"budget": 8, "structured": False, "recent": 3}),
    ],
)
def test_retains_what_the_equations_keep(group: int, options: dict) -> None:
    cache = filled_by(decoder(group), kvcompose(**options))
    budget, recent = options["budget"], options.get("recent", 0)
    others = {name: value for name, value in options.items() if name not in ("budget", "recent")}
    for b, row in enumerate(ROWS):
        mean = int(len(row) * budget) if isinstance(budget, float) else budget
        scores = equations(task_weights(group, b, "replay")).copy()
        scores[..., len(row) - recent :] = np.inf
        kept = compose(scores, mean, **others)
        assert tiny.held(cache, b) == kept
        assert sum(len(head) for layer in kept for head in layer) == min(mean, len(row)) * LAYERS * 2
    assert len({len(layer[0]) for layer in tiny.held(cache, 0)}) == LAYERS, "or layers would not have competed"


@pytest.mark.slow(first=2)
@pytest.mark.parametrize(("source", "rows"), [("self", "mean"), ("replay", "sum"), ("prompt", "max")])
def test_scores(source: str, rows: str) -> None:
    """Reductions of every source, with and without the mean over heads and the norms of values (26 and 27)."""
    params, group = decoder(4), 4
    policy = kvcompose(8, score=TaskAttention(source, PROMPTS if source == "prompt" else "", rows))
    score = policy.score
    cache = allocating.read(params, policy, ROWS, SIZE)
    variants = (("mean", True, "none"), ("max", True, "v"), ("max", False, "vo"), ("mean", False, "vo"))
    for fold, head_mean, value_norm in variants:
        variant = replace(score, group=fold, head_mean=head_mean, value_norm=value_norm)
        for i, (record, layer) in enumerate(zip(params.attention_layers, cache.entries, strict=True)):
            ours = np.asarray(variant(layer, Moment(cache.length, record)))
            for b, row in enumerate(ROWS):
                norms = norms_of(params, reader(group, b).values(), value_norm)
                expected = equations(task_weights(group, b, source), norms, rows, fold, head_mean)[i]
                held = np.asarray(layer.positions[b])
                by_position = np.zeros_like(expected)
                for h in range(len(held)):
                    by_position[h, held[h][held[h] >= 0]] = ours[b, h][held[h] >= 0]
                assert held.max() == len(row) - 1
                assert_close(by_position, expected)


@pytest.mark.slow
def test_a_layer_without_entries() -> None:
    """A token to come attends to itself alone in it; the answer and later turns go on, whatever the lengths."""
    params = nnx.clone(decoder(4))
    attention = params.layers[1].attention
    attention.query = nnx.Param(jnp.zeros_like(attention.query[...]))  # which spreads attention as evenly as can be
    answer = np.random.default_rng(1).integers(0, tiny.VOCAB, (6, len(ROWS)))
    cache = filled_by(params, kvcompose(2))
    texts = []
    for b, row in enumerate(ROWS):
        texts.append(Reader(params))
        texts[b].read(row)
        kept = tiny.held(cache, b)
        assert [len(head) for layer in kept for head in layer] == [4, 4, 0, 0]
        texts[b].retain(kept)
    for token in answer[:3]:
        logits, cache = tiny.step(params, cache, token, np.ones(len(ROWS), bool))
        for b, text in enumerate(texts):
            assert_close(logits[b], text.read(token[b : b + 1]))
            assert tiny.held(cache, b) == text.held()
    logits, cache = kvjax.extend(params, cache, answer[3:].T)
    for b, text in enumerate(texts):
        assert_close(logits[b], text.read(answer[3:, b]))
        assert tiny.held(cache, b) == text.held()


# G8: 2 layers, 2 kv heads, 4 tokens of which half are kept.
S2 = np.array([[[0.9, 0.1, 0.5, 0.3], [0.2, 0.8, 0.4, 0.6]], [[0.3, 0.2, 0.1, 0.0], [0.1, 0.1, 0.2, 0.9]]], np.float32)
LAYER = tiny.decoder(1, 1).attention_layers[0]


def augmented(s2: np.ndarray) -> np.ndarray:
    """Our equation 16, given S2."""
    score, scores = TaskAttention(), []
    for own in s2:
        H, N = own.shape
        state = TaskWeights(jnp.array(own)[None, :, None], jnp.ones((1, H, N), jnp.int32))
        positions = jnp.broadcast_to(jnp.arange(N), (1, H, N))
        empty = jnp.zeros((1, H, N, 1))
        entries = Slots(empty, empty, positions, jnp.full((1, H), N), state)
        scores.append(np.asarray(score(entries, Moment(jnp.array([N]), LAYER)))[0])
    return np.stack(scores)


def kept(scores: np.ndarray, budget: CompositeShares | GlobalShares) -> list[list[set[int]]]:
    means = jnp.full((len(scores), 1), budget.budget.entries)
    counts = budget.allocate(jnp.array(scores)[:, None], means, 0, ALL_HEADS)
    return [
        [set(np.argsort(-head, kind="stable")[:n].tolist()) for head, n in zip(layer, own, strict=True)]
        for layer, own in zip(scores, np.asarray(counts)[:, 0], strict=True)
    ]


def test_g8_composite_tokens() -> None:
    scores = augmented(S2)
    expected = [
        [[1.45, 0.55, 0.95, 0.75], [0.75, 1.25, 0.85, 1.05]],
        [[0.5, 0.35, 0.25, 0.45], [0.3, 0.25, 0.35, 1.35]],
    ]
    np.testing.assert_allclose(scores, expected, rtol=1e-6)
    assert kept(scores, CompositeShares(Fixed(2))) == [[{0, 2, 3}, {1, 2, 3}], [{0}, {3}]]


@pytest.mark.parametrize(("heads", "sizes"), [("mean", [2, 2]), ("max", [3, 1])])
def test_composites_by_their_mean_or_their_maximum(heads: str, sizes: list[int]) -> None:
    """Of means 1, .5, .45, .1 and .95, .6, .3, .1; of maxima 1, .9, .8, .1 and .95, .6, .3, .1 (equation 19)."""
    first = [[0.9, 1.0, 0.1, 0.8], [0.1, 0.1, 1.0, 0.1]]
    second = [[0.95, 0.6, 0.3, 0.1], [0.6, 0.95, 0.1, 0.3]]
    scores = np.array([first, second], np.float32)
    assert [len(own[0]) for own in kept(scores, CompositeShares(Fixed(2), heads=heads))] == sizes


def test_heads_of_a_layer_may_compete_for_its_composites() -> None:
    """AdaKV on top: the layers' numbers are KVCompose's, and heads of a layer divide them by their scores."""
    cache = filled_by(decoder(4), adakv(kvcompose(8)))
    for b in range(len(ROWS)):
        scores = equations(task_weights(4, b, "replay"))
        sizes = [len(layer[0]) for layer in compose(scores, 8)]
        assert tiny.held(cache, b) == best(scores, [adaptive(x, n) for x, n in zip(scores, sizes, strict=True)])


def test_g8b_the_released_code_raises_the_first_layer() -> None:
    scores = augmented(S2[::-1])
    assert [len(heads[0]) for heads in kept(scores, CompositeShares(Fixed(2)))] == [1, 3]
    assert [len(heads[0]) for heads in kept(scores, CompositeShares(Fixed(2), first_layer=True))] == [2, 2]


def test_g8c_a_layer_may_lose_everything_unless_there_is_a_floor() -> None:
    s2 = S2.copy()
    s2[1, 1] = [0.1, 0.1, 0.2, 0.5]
    scores = augmented(s2)
    assert [len(heads[0]) for heads in kept(scores, CompositeShares(Fixed(2)))] == [4, 0]
    assert [len(heads[0]) for heads in kept(scores, CompositeShares(Fixed(2), min_tokens=1))] == [3, 1]


def test_g8d_rows_before_group() -> None:
    weights = np.array([[[0.1, 0.6, 0.2, 0.1], [0.3, 0.3, 0.2, 0.2]], [[0.5, 0.1, 0.2, 0.2], [0.1, 0.1, 0.7, 0.1]]])
    score = TaskAttention(head_mean=False)  # a group of two heads, two rows, four tokens
    keys = jnp.eye(4)[None, None]
    state = TaskWeights(jnp.zeros((1, 1, 2, 4)), jnp.zeros((1, 1, 4), jnp.int32))
    entries = Slots(keys, keys, jnp.arange(4)[None, None], jnp.array([[4]]), state)
    queries = jnp.log(jnp.array(weights, jnp.float32))[None]
    lse, positions, layer = jnp.zeros((1, 2, 2)), jnp.array([[4, 5]]), replace(LAYER, scale=1.0)
    wish = score.needs.received
    assert wish is not None
    received = entries.received(q=queries, lse=lse, query_positions=positions, **layer.logits, reduction=wish.reduction)
    replay = (jnp.array([0]), jnp.array([4]))
    attended = Attended(queries, positions, lse, received, jnp.array([2]), layer, replay=replay)
    state, _ = score.observe(entries, attended)
    np.testing.assert_allclose(state.weights[0, 0], [[0.3, 0.6, 0.2, 0.2], [0.5, 0.1, 0.7, 0.2]], rtol=1e-6)
    scores = score(replace(entries, per_slot=state), Moment(jnp.array([4]), LAYER))
    np.testing.assert_allclose(scores[0, 0], [0.40, 0.35, 0.45, 0.20], rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: kvcompose(score=TaskAttention("prompt")), "source='prompt' with prompts=''"),
        (lambda: kvcompose(score=TaskAttention(prompts="Why?")), "source='replay' with prompts="),
        (lambda: kvcompose(score=TaskAttention("prompt", ((), (1,)))), "none of them empty"),
        (lambda: kvcompose(score=TaskAttention("prompt", [(1,)])), r"prompts=\[\(1,\)\]: expected a text, or a tuple"),
        (lambda: kvcompose(score=TaskAttention(value_norm=True)), "value_norm=True: expected 'none' or 'v' or 'vo'"),
        (lambda: kvcompose(8, groups=2), "groups=2 with structured=True"),
        (lambda: kvcompose(8, heads="max", structured=False), "heads='max' with structured=False"),
        (lambda: kvcompose(8, structured=False, first_layer=True), "first_layer=True with structured=False"),
        (lambda: replace(kvcompose(8), budget=Fixed(8)), "^TaskAttention: source='replay' .* Fixed"),
        (
            lambda: replace(kvcompose(8, score=TaskAttention("self")), budget=Fixed(8), every=1),
            "^TaskAttention: it scores a prompt",
        ),
        (lambda: kvcompose(8, min_tokens=9), "min_tokens=9 of a mean of 8"),
    ],
)
def test_what_makes_no_sense_is_refused(make, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


@pytest.mark.slow
def test_prompts_as_text(tokenizer, tiny) -> None:
    """Texts need a tokenizer, whose special tokens they do without."""
    policy = parse("kvcompose:budget=8,score.source=prompt,score.prompts=ba be bi")
    assert policy == kvcompose(8, score=TaskAttention("prompt", "ba be bi"))
    assert policy.score.needs.texts == ("ba be bi",)
    text = " ".join(["ba", "ce", "di"] * 5)
    ids = tuple(tokenizer.encode("ba be bi", add_special_tokens=False))
    by_ids = kvcompose(8, score=TaskAttention("prompt", (ids,)))
    caches = [kvjax.prefill(tiny, text, policy=each, tokenizer=tokenizer) for each in (policy, by_ids)]
    for own, same in zip(*map(jax.tree.leaves, caches), strict=True):
        np.testing.assert_array_equal(own, same)
    with pytest.raises(ValueError, match="replays the text 'ba be bi' and there is no tokenizer"):
        kvjax.generate(tiny, [1, 2, 3], policy=policy, max_new_tokens=1)
