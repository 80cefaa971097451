"""KVzip against its definition in NumPy, on the attention rows of a decoder that repeats its text chunk by chunk."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache import Slots
from kvjax.mesh.heads import ALL_HEADS
from kvjax.models import AttentionLayer
from kvjax.models.rope import NO_ROPE
from kvjax.parts import Attribution, Fixed, GlobalShares, Pyramid, Reconstruction, UniformShares
from kvjax.policies import adakv, criticalkv, kvzip
from kvjax.policy import Attended
from kvjax.reading.replays import encoded_texts
from tests import tiny
from tests.dense import assert_close
from tests.methods import allocating
from tests.methods.hidden import hidden_states
from tests.methods.literal_budgets import adaptive, best, projected, two_stages
from tests.methods.reference import Reader, softmax

SIZE, CHUNK, SINKS = 32, 12, 3
WORDS = {"instruction": (7, 60, 2), "starting": (9, 4), "suffix": (33,)}
SCORE = Reconstruction(chunk=CHUNK, **WORDS)
PLUS = replace(SCORE, normalise=True)
ROWS = [np.random.default_rng(4).integers(0, tiny.VOCAB, n) for n in (30, 9, 13, 24)]  # of 3, 1, 2 and 2 chunks
PARAMS = tiny.decoder(4, 2, (None, None))


def repetition(row: np.ndarray, first: int, chunk: int = CHUNK) -> list[int]:
    """What follows the prompt to have a chunk of it repeated."""
    lead = (*WORDS["starting"], *row[first - 8 : first]) if first else WORDS["instruction"]
    return [*lead, *WORDS["suffix"], *row[first : first + chunk]]


@cache
def literal(b: int, plus: bool = False, chunk: int = CHUNK) -> np.ndarray:
    """Scores [L, H, N] of a row, KVzip's or those of KVzip+."""
    row, text = ROWS[b], Reader(PARAMS)
    n = len(row)
    text.read(row)
    norms = projected(PARAMS, text.values(), order=2)
    scores = np.zeros((len(text.heads), len(text.heads[0]), n))
    for first in range(0, n, chunk):
        last = min(first + chunk, n)
        tokens = repetition(row, first, chunk)
        text.read(np.array(tokens))
        hidden = hidden_states(PARAMS, [*row, *tokens]) if plus else []
        for layer, head in np.ndindex(scores.shape[:2]):
            for query in range(n, n + len(tokens)):
                seen = text.heads[layer][head].rows[query]
                keys = sorted({*range(min(SINKS, n)), *range(first, last), *range(n, query + 1)})
                weights = softmax(np.stack([seen[key][0] for key in keys], axis=-1))
                for key, weight in zip(keys, weights.T, strict=True):
                    if first <= key < last:
                        if plus:
                            weight = weight * norms[layer, head, :, key] / np.linalg.norm(hidden[layer][query])
                        scores[layer, head, key] = max(scores[layer, head, key], weight.max())
        text.forget(n)
    return scores


def keep(scores: np.ndarray, mean: int, level: str) -> list[list[list[int]]]:
    """Positions kept, by layer and head."""
    L, H, N = scores.shape
    scores = scores.copy()
    scores[..., :SINKS] = np.inf
    groups = {"global": 1, "layer": L, "head": L * H}[level]
    kept = np.zeros((groups, L * H * N // groups), bool)
    best = np.argsort(-scores.reshape(groups, -1), axis=-1, kind="stable")[:, : mean * L * H // groups]
    np.put_along_axis(kept, best, True, axis=-1)
    return [[np.flatnonzero(head).tolist() for head in layer] for layer in kept.reshape(L, H, N)]


@cache
def replays(plus: bool = False, chunk: int = CHUNK) -> kvjax.KVCache:
    """All tokens of the rows and their scores, whoever competes by them."""
    return allocating.read(PARAMS, kvzip(0.5, SINKS, score=replace(PLUS if plus else SCORE, chunk=chunk)), ROWS, SIZE)


@pytest.mark.parametrize("chunk", [CHUNK, SIZE])
def test_passes_repeat_a_prompt_chunk_by_chunk(chunk):
    """Of a row that has ended before a chunk nothing runs."""
    score = replace(SCORE, chunk=chunk)
    tokens, lengths = tiny.left_pad(ROWS, SIZE)
    parts = jax.jit(partial(score.passes, texts=score.needs.texts))(tokens, lengths)
    assert len(parts) == -(-SIZE // chunk)
    for i, part in enumerate(jax.tree.map(np.asarray, parts)):
        for b, row in enumerate(ROWS):
            expected = repetition(row, i * chunk, chunk) if i * chunk < len(row) else []
            assert part.tokens[b, len(part.tokens[b]) - part.lengths[b] :].tolist() == expected
            assert [part.first[b], part.last[b]] == [min(n * chunk, len(row)) for n in (i, i + 1)]


@pytest.mark.parametrize("kind", ["kvzip", "kvzip+", "kvgrad"])
def test_a_pass_scores_the_entries_of_its_chunk(kind):
    """Two rows whose chunks are of four tokens and of one; two query heads for each of two kv heads."""
    rng, (B, H, G, N, W, D) = np.random.default_rng(1), (2, 2, 2, 9, 6, 4)
    lengths, own, last = (9, 5), (6, 4), (8, 5)  # of the prompts, of what repeats a chunk from position 4 on
    q, hidden = rng.normal(size=(B, H * G, W, D)), rng.normal(size=(B, W, 5))
    k, v = rng.normal(size=(2, B, H, N + W, D))
    output, state = rng.normal(size=(H * G, D, 3)), rng.normal(size=(B, H, N + W))
    positions = np.full((B, N + W), -1)
    for b, n in enumerate(lengths):
        positions[b, N - n : N], positions[b, N + W - own[b] :] = range(n), range(n, n + own[b])
    score = Attribution(2, 4) if kind == "kvgrad" else Reconstruction(sinks=2, chunk=4, normalise=kind == "kvzip+")
    measured = rng.random((B, W)).astype(np.float32)
    factors = measured if kind == "kvgrad" else 1 / np.linalg.norm(hidden, axis=-1)
    layer = AttentionLayer(0, NO_ROPE, None, 0.5, jnp.asarray(output, jnp.float32))

    @jax.jit
    def observed(q, k, v, state, hidden):
        at = jnp.broadcast_to(positions[:, None], k.shape[:3])
        entries = Slots(k, v, at, jnp.zeros((B, H), jnp.int32), state)
        replay = jnp.array([4, 4]), jnp.array(last)
        given = positions[:, N:], jnp.zeros(q.shape[:3]), None, jnp.array(own), layer
        return score.observe(entries, Attended(q, *given, replay=replay, hidden=hidden, measured=measured))[0]

    found = np.asarray(observed(*(x.astype(np.float32) for x in (q, k, v, state, hidden))))
    for b, h in np.ndindex(B, H):
        expected = state[b, h].copy()
        chunk = [c for c in range(N) if 4 <= positions[b, c] < last[b]]
        expected[chunk] = 0
        for t, g in np.ndindex(W, G):
            if t < W - own[b]:
                continue
            seen = [c for c in range(N) if 0 <= positions[b, c] < 2] + chunk + [*range(N + W - own[b], N + t + 1)]
            weights = softmax(k[b, h, seen] @ q[b, h * G + g, t] * 0.5)
            if kind != "kvzip":
                weights = weights * np.linalg.norm(v[b, h, seen] @ output[h * G + g], axis=-1) * factors[b, t]
            for c, weight in zip(seen, weights, strict=True):
                if c in chunk:
                    expected[c] = max(expected[c], weight)
        np.testing.assert_allclose(found[b, h], expected, rtol=1e-5, atol=1e-6)


def test_texts_are_ids_where_no_tokenizer_encodes_them():
    """An empty text needs no tokenizer."""
    ids = replace(SCORE, instruction=(5, 6), starting="", suffix=(7,))
    assert encoded_texts(kvzip(0.5, score=ids), None) == ((5, 6), (), (7,))
    texts = kvzip(0.5, score=replace(ids, starting="the code"))
    with pytest.raises(ValueError, match="the policy replays the text 'the code' and there is no tokenizer: expected"):
        encoded_texts(texts, None)
    assert encoded_texts(texts, lambda text: [len(text)]) == ((5, 6), (8,), (7,))


def test_what_attention_has_reduced_is_the_score():
    """Where one chunk is the whole prompt. Empty slots keep their state."""
    received, state = jnp.arange(1.0, 4).reshape(1, 1, 3), jnp.full((1, 1, 3), 7.0)
    keys, positions = jnp.zeros((1, 1, 3, 2)), jnp.array([[[-1, 0, 1]]])
    entries = Slots(keys, keys, positions, jnp.zeros((1, 1), int), state)
    layer = AttentionLayer(0, NO_ROPE, None, 1.0, jnp.zeros((1, 2, 1)))
    given = keys[:, :, 1:], jnp.array([[2, 3]]), jnp.zeros((1, 1, 2)), received, jnp.array([2]), layer
    scores, _ = SCORE.observe(entries, Attended(*given))
    assert scores[0, 0].tolist() == [7, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize(("plus", "chunk"), [(False, CHUNK), (True, CHUNK), (False, SIZE), (True, SIZE)])
def test_scores_are_the_definition(plus, chunk):
    """Chunks that not all rows have, a last one that is short, a prompt within one chunk; sinks are only looked at.

    Where a chunk has room for all prompts, the scores come from the pass that attends.
    """
    filled = replays(plus, chunk)
    for layer, entries in enumerate(filled.entries):
        for b, row in enumerate(ROWS):
            ours, positions = np.asarray(entries.per_slot[b]), np.asarray(entries.positions[b])
            for head in range(2):
                held = positions[head] >= 0
                assert positions[head][held].tolist() == list(range(len(row)))
                assert_close(ours[head][held], literal(b, plus, chunk)[layer, head])


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    ("level", "plus", "recent"),
    [("global", False, 0), ("layer", False, 0), ("head", False, 0), ("global", True, 0)]
    + [(level, False, 2) for level in ("global", "layer", "head")],
)
def test_keeps_the_best_of_those_who_compete(level, plus, recent):
    policy = kvzip(0.5, SINKS, level, recent=recent, score=PLUS if plus else SCORE)
    if level == "global":
        _, filled = tiny.prefill(PARAMS, policy, ROWS, SIZE)
    else:
        filled = allocating.reallocated(PARAMS, replays(), policy, SIZE)
    for b, row in enumerate(ROWS):
        scores = literal(b, plus).copy()
        scores[..., len(row) - recent :] = np.inf
        mean = max(len(row) // 2, SINKS + recent + 1)  # protected entries and one more
        assert tiny.held(filled, b) == keep(scores, mean, level)
    sizes = {len(head) for layer in tiny.held(filled, 0) for head in layer}
    assert (len(sizes) == 1) == (level == "head")


def protected(b):
    """Scores [L, H, N] of a row, +inf for the sinks, and the mean L1 norms of its projected values."""
    text = Reader(PARAMS)
    text.read(ROWS[b])
    scores = literal(b).copy()
    scores[..., :SINKS] = np.inf
    return scores, projected(PARAMS, text.values(), order=1).mean(axis=2)


@pytest.mark.slow
@pytest.mark.parametrize("level", ["global", "layer", "head"])
def test_criticalkv_replays_too(level):
    """A wrapped score is replayed as it would be alone; what is competed for is decided by its own scores."""
    policy = criticalkv(kvzip(0.5, SINKS, level, score=SCORE))
    if level == "layer":
        _, filled = tiny.prefill(PARAMS, policy, ROWS, SIZE)
    else:
        filled = allocating.reallocated(PARAMS, replays(), policy, SIZE)
    for b, row in enumerate(ROWS):
        scores, norms = protected(b)
        counts = [[len(head) for head in layer] for layer in keep(literal(b), len(row) // 2, level)]
        assert tiny.held(filled, b) == two_stages(scores, norms, counts)


@pytest.mark.slow
def test_adakv_of_uniform_heads_replays_too():
    filled = allocating.reallocated(PARAMS, replays(), adakv(kvzip(0.5, SINKS, "head", score=SCORE)), SIZE)
    for b, row in enumerate(ROWS):
        scores, _ = protected(b)
        assert tiny.held(filled, b) == best(scores, [adaptive(own, len(row) // 2) for own in scores])


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (7, 1)])
def test_kvzip_plus_of_other_groups(heads, kv_heads):
    """Groups of 1 and 7, in bfloat16, against KVzip+'s scores in float32."""
    params = tiny.decoder(heads, kv_heads, (None,))
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    policy = kvzip(0.5, SINKS, score=PLUS)
    exact, rounded = (allocating.read(model, policy, ROWS, SIZE).entries[0].per_slot for model in (params, half))
    plain = allocating.read(params, kvzip(0.5, SINKS, score=SCORE), ROWS, SIZE).entries[0].per_slot
    exact, rounded, plain = (np.asarray(x, np.float64) for x in (exact, rounded, plain))
    scored = exact > 0
    assert (scored == (plain > 0)).all()
    assert np.quantile(np.abs(rounded[scored] / exact[scored] - 1), 0.9) < 0.1
    assert np.std(np.log(exact[scored] / plain[scored])) > 0.05  # the norms differ


def test_criticalkv_on_kvzip_plus_would_weigh_values_twice():
    with pytest.raises(ValueError, match="Reconstruction"):
        criticalkv(kvzip(8, score=PLUS))


def test_uniform_heads_of_a_layer_retain_what_the_layer_has():
    means = jnp.array([[9, 6], [3, 2]])
    counts = UniformShares(Pyramid(Fixed(8), window=0)).allocate(jnp.zeros((2, 2, 3, 9)), means, 0, ALL_HEADS)
    assert counts.tolist() == [[[9] * 3, [6] * 3], [[3] * 3, [2] * 3]]


def test_e4():
    """The threshold at index 3 of 10 has to be exceeded: three stay."""
    scores = jnp.arange(10.0)[None, None, None]
    for strict, count in ((True, 3), (False, 4)):
        assert GlobalShares(Fixed(4), strict=strict).allocate(scores, jnp.array([[4]]), 0, ALL_HEADS).item() == count


@pytest.mark.slow
def test_strict_keeps_the_protected_and_all_that_fits():
    strict = GlobalShares(Fixed(4), strict=True)
    scores = jnp.array([[[[jnp.inf, jnp.inf, 1, 1, 1, 1]]], [[[jnp.inf, jnp.inf, 3, 2, -jnp.inf, -jnp.inf]]]])
    both = jnp.swapaxes(scores, 0, 1)  # of one layer, two rows
    assert strict.allocate(both, jnp.array([[4, 4]]), 0, ALL_HEADS)[0, :, 0].tolist() == [2, 4]
    assert strict.allocate(both, jnp.array([[2, 1]]), 0, ALL_HEADS)[0, :, 0].tolist() == [2, 2]


@pytest.mark.slow
def test_instructions_as_text(tokenizer, tiny):
    policy = kvzip(8, score=Reconstruction(instruction="ba be", starting=(7, 8), suffix=""))
    encode = partial(tokenizer.encode, add_special_tokens=False)
    assert encoded_texts(policy, encode) == (tuple(encode("ba be")), (7, 8), ())
    with pytest.raises(ValueError, match="replays the text 'ba be' and there is no tokenizer"):
        kvjax.generate(tiny, [1, 2, 3], policy=policy)
    # What follows a compressed prompt is not replayed.
    cache = kvjax.prefill(tiny, [1, 2, 3], policy=policy, tokenizer=tokenizer)
    options = {"cache": cache, "max_new_tokens": 4, "eos": ()}
    without, with_one = (kvjax.generate(tiny, [4, 5], tokenizer=given, **options) for given in (None, tokenizer))
    assert without.tokens.tolist() == with_one.tokens.tolist()
    policy = kvzip(8, score=Reconstruction(instruction=(500,), starting="", suffix=""))
    with pytest.raises(ValueError, match=r"replays .*500.*expected ids in 0 .. 100"):
        kvjax.generate(tiny, [1, 2, 3], policy=policy)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: kvzip(8, strict=True, level="head"), "strict=True with level='head'"),
        (lambda: kvzip(8, level="head", groups=2), "groups=2 with level='head'"),
        (lambda: kvzip(8, sinks=3, score=Reconstruction(2)), "score.sinks=2 with sinks=3: expected sinks=2"),
        (lambda: kvzip(8, score=Reconstruction(suffix=[1])), r"suffix=\[1\]: expected a text or a tuple"),
        (
            lambda: replace(kvzip(8), budget=Fixed(8)),
            "^Reconstruction: it .* Fixed.*expected a budget that",
        ),
        (lambda: replace(kvzip(8), every=1), "^Reconstruction: it scores a prompt.*cannot be combined with every=1"),
    ],
)
def test_what_makes_no_sense_is_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()
