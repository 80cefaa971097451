"""Caches are values: a document answers many questions, answers continue, dialogues take constant memory."""

import re

import jax
import numpy as np
import pytest

import kvjax
from kvjax.models import Decoder
from tests.conftest import DISTINCT

RNG = np.random.default_rng(1)
DOCUMENTS = [RNG.integers(0, 99, n).tolist() for n in (41, 34, 9)]
QUESTIONS = [RNG.integers(0, 99, n).tolist() for n in (7, 1, 2)]
NEW = 12


def arrays(cache: kvjax.KVCache) -> list[np.ndarray]:
    return [np.array(leaf) for leaf in jax.tree.leaves(cache)]


def ask(params: Decoder, question, cache: kvjax.KVCache, **options) -> list[list[int]]:
    return kvjax.generate(params, question, cache=cache, max_new_tokens=NEW, log_probs=True, **options).tokens.tolist()


@pytest.mark.slow(first=1)
def test_document_answers_any_question_at_any_time(subject: Decoder, policy: kvjax.Policy) -> None:
    documents = kvjax.prefill(subject, DOCUMENTS, policy=policy)
    before = arrays(documents)
    rotated = [QUESTIONS[i:] + QUESTIONS[:i] for i in range(3)]
    answers = [ask(subject, questions, documents) for questions in rotated]
    for questions, answer in reversed(list(zip(rotated, answers, strict=True))):
        fresh = kvjax.prefill(subject, DOCUMENTS, policy=policy)
        assert ask(subject, questions, fresh) == ask(subject, questions, documents) == answer
    for old, new in zip(before, arrays(documents), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.slow
def test_questions_in_company_are_as_alone(subject: Decoder, policy: kvjax.Policy) -> None:
    """Questions of 7, 1 and 2 tokens, each about another document, are answered as in a batch of equal rows."""
    together = ask(subject, QUESTIONS, kvjax.prefill(subject, DOCUMENTS, policy=policy))
    for row in (0, 1):
        document = kvjax.prefill(subject, [DOCUMENTS[row]] * 3, policy=policy)
        assert ask(subject, [QUESTIONS[row]] * 3, document) == [together[row]] * 3


@pytest.mark.slow
def test_document_and_question_are_one_prompt_until_compressed(subject: Decoder, policy: kvjax.Policy) -> None:
    documents = kvjax.prefill(subject, DOCUMENTS, policy=policy, compress="never")
    assert all(layer.occupancy.tolist() == [[41, 41], [34, 34], [9, 9]] for layer in documents.entries)
    if policy.score.needs.whole_prompt:
        with pytest.raises(ValueError, match="expected a prompt that is read in one call"):
            ask(subject, QUESTIONS, documents)
        return
    prompts = [document + question for document, question in zip(DOCUMENTS, QUESTIONS, strict=True)]
    whole = kvjax.generate(subject, prompts, policy=policy, max_new_tokens=NEW, log_probs=True)
    assert ask(subject, QUESTIONS, documents) == whole.tokens.tolist()


@pytest.mark.long
@pytest.mark.parametrize("text", ["snapkv:budget=0.5,window=4", "adakv:base=h2o,base.budget=0.25", "rising:base=h2o"])
def test_a_share_of_a_prompt_in_parts_is_that_of_the_whole(tiny: Decoder, text: str) -> None:
    prompts = [document + question for document, question in zip(DOCUMENTS, DOCUMENTS[::-1], strict=True)]
    whole = kvjax.prefill(tiny, prompts, policy=text)
    begun = kvjax.prefill(tiny, DOCUMENTS, policy=text, compress="never")
    assert (kvjax.prefill(tiny, DOCUMENTS[::-1], cache=begun).retained_mask() == whole.retained_mask()).all()
    alone = kvjax.prefill(tiny, [DOCUMENTS[2]], policy=text, compress="never")
    repeated = kvjax.prefill(tiny, [DOCUMENTS[0]] * 2, cache=alone).retained_mask()
    assert (repeated == whole.retained_mask()[2, ..., : repeated.shape[-1]]).all()


@pytest.mark.slow(first=1)
def test_going_on_equals_one_longer_answer(subject: Decoder, policy: kvjax.Policy) -> None:
    def answer(prompt, new: int, **options) -> kvjax.Generation:
        return kvjax.generate(subject, prompt, max_new_tokens=new, log_probs=True, **options)

    whole = answer(DOCUMENTS, 30, policy=policy)
    first = answer(DOCUMENTS, 13, policy=policy)
    second = answer(None, 1, cache=first.cache)
    third = answer(None, 16, cache=second.cache)
    np.testing.assert_array_equal(np.concatenate([first.tokens, second.tokens, third.tokens], 1), whole.tokens)
    parts = [part.log_probs for part in (first, second, third) if part.log_probs is not None]
    np.testing.assert_allclose(np.concatenate(parts, 1), whole.log_probs, atol=1e-5, rtol=0)
    assert third.cache.length.tolist() == whole.cache.length.tolist()


@pytest.mark.slow
def test_draws_go_on_too(shallow: Decoder) -> None:
    options = {"sampler": kvjax.Sampler(temperature=2.0), "seed": 3}
    whole = kvjax.generate(shallow, DOCUMENTS, max_new_tokens=20, **options)
    first = kvjax.generate(shallow, DOCUMENTS, max_new_tokens=8, **options)
    second = kvjax.generate(shallow, None, cache=first.cache, max_new_tokens=12, **options)
    np.testing.assert_array_equal(np.concatenate([first.tokens, second.tokens], axis=1), whole.tokens)


@pytest.mark.long
def test_pending_token_goes_before_the_next_turn(shallow: Decoder) -> None:
    """The next turn is read in one piece, and in two."""
    document, question = DOCUMENTS[1:]
    answer = kvjax.generate(shallow, document, max_new_tokens=5, log_probs=True)
    assert answer.cache.pending.tolist() == [answer.tokens[0, -1]]
    text = [*document, *answer.tokens[0].tolist(), *question]  # in the bucket of the document
    expected = kvjax.generate(shallow, text, max_new_tokens=NEW, log_probs=True).tokens.tolist()
    assert ask(shallow, question, answer.cache) == expected
    assert ask(shallow, question, answer.cache, chunk=8) == expected
    assert ask(shallow, question, jax.device_get(answer.cache)) == expected  # a cache may wait on the host


@pytest.mark.long
def test_a_pending_token_is_read_once(shallow: Decoder) -> None:
    """By whichever function reads it; `extend` leaves that of a row without tokens."""
    answer = kvjax.generate(shallow, DOCUMENTS[1:], max_new_tokens=5, eos=(), log_probs=True)
    pending = answer.cache.pending.tolist()
    assert kvjax.prefill(shallow, [[3], [5]], cache=answer.cache).pending.tolist() == [-1, -1]
    for tokens, lengths in ((pending[0], None), (pending[0], [1, 0]), ((pending[0], 3), [2, 0])):
        _, cache = kvjax.extend(shallow, answer.cache, np.array([np.atleast_1d(tokens)] * 2), lengths)
        assert cache.pending.tolist() == [-1, -1 if lengths is None else pending[1]]
    again = kvjax.generate(shallow, [[7], [9]], cache=cache, max_new_tokens=1, eos=())
    assert (again.cache.length - answer.cache.length).tolist() == [3, 2]


@pytest.mark.slow
@pytest.mark.parametrize("text", [DISTINCT[0], DISTINCT[2], DISTINCT[4]])
def test_dialogue_in_constant_memory(shallow: Decoder, text: str, compiled: list[str]) -> None:
    answer = kvjax.generate(shallow, DOCUMENTS, policy=text, max_new_tokens=NEW, log_probs=True)
    size = answer.cache.nbytes
    for turn in range(50):
        if turn == 2:
            compiled.clear()
        questions = [RNG.integers(0, 99, n).tolist() for n in RNG.integers(1, 15, 3)]
        seen = [n + len(q) + NEW for n, q in zip(answer.cache.length.tolist(), questions, strict=True)]
        answer = kvjax.generate(shallow, questions, cache=answer.cache, max_new_tokens=NEW, log_probs=True)
        assert answer.cache.nbytes == size
        assert answer.cache.length.tolist() == seen
        assert answer.cache.entries[0].occupancy.max() <= 24
    assert compiled == []


@pytest.mark.slow
def test_prompt_of_any_length_in_constant_memory(subject: Decoder, policy: kvjax.Policy, compiled: list[str]) -> None:
    """A prompt that is compressed after each chunk runs the same programs when it is ten times as long."""
    if not policy.limited(0):
        pytest.skip("keeps everything")
    if policy.allocates:
        with pytest.raises(ValueError, match=r"would allocate .* more than once"):
            kvjax.prefill(subject, DOCUMENTS[0], policy=policy, chunk=32, compress="chunk")
        return
    kvjax.prefill(subject, RNG.integers(0, 99, 150), policy=policy, chunk=32, compress="chunk")
    assert compiled
    compiled.clear()
    cache = kvjax.prefill(subject, RNG.integers(0, 99, 1500), policy=policy, chunk=32, compress="chunk")
    assert compiled == []
    assert cache.length.tolist() == [1500]
    assert sum(layer.slots for layer in cache.entries) == 24 * len(cache.entries)
    for layer in cache.entries:
        occupied = np.asarray(layer.occupancy)
        assert occupied.max() <= layer.slots
        assert policy.merge.effects.keys or occupied.min() == layer.slots  # a merge may leave slots empty


@pytest.mark.long(first=1)
@pytest.mark.parametrize(
    "text",
    [
        "snapkv:budget=12,window=4",  # slots
        "adakv:base=snapkv,base.budget=12,base.window=4",  # a pool
        "kvmerger:budget=12,recent=4,merge.heavy=4,merge.theta=None",
    ],
)
def test_retained_tokens_are_those_with_an_entry(tiny: Decoder, text: str) -> None:
    """Of rows of 30 and 9 tokens."""
    rows = [np.arange(30) % 7 + 1, np.arange(9) % 5 + 1]
    cache = kvjax.prefill(tiny, rows, policy=text)
    mask = cache.retained_mask()
    assert mask.shape == (2, tiny.config.num_layers, tiny.config.num_kv_heads, 30)
    assert mask[0, ..., 26:].all()  # the window
    assert mask[1, ..., :9].all()
    assert not mask[1, ..., 9:].any()
    assert mask[0].sum(axis=-1).mean() == 12 or "kvmerger" in text
    for layer, entries in enumerate(cache.entries):
        for row, head in np.ndindex(2, tiny.config.num_kv_heads):
            positions = np.asarray(entries.positions)[row, head]
            found = cache.retained(layer, head, row)
            assert (found.dtype, found.tolist()) == (np.int32, sorted(positions[positions >= 0].tolist()))
            assert found.tolist() == np.flatnonzero(mask[row, layer, head]).tolist()


@pytest.mark.parametrize("sizes", [(1, 1), (2, 2)])
def test_retained_tokens_are_those_that_the_score_prefers(tiny: Decoder, sizes: tuple[int, int]) -> None:
    """Knorm retains the 12 smallest keys of each head: those of a full cache, sorted by NumPy."""
    rows = [RNG.permutation(99)[:n].tolist() for n in (30, 21)]  # equal tokens would have equal keys
    params = tiny if sizes == (1, 1) else kvjax.shard(tiny, kvjax.make_mesh(data=sizes[0], model=sizes[1]))
    full = kvjax.prefill(tiny, rows)
    cache = kvjax.prefill(params, rows, policy="knorm:budget=12")
    for layer, entries in enumerate(full.entries):
        norms = np.where(entries.positions >= 0, np.linalg.norm(entries.keys, axis=-1), np.inf)
        for row, head in np.ndindex(norms.shape[:2]):
            smallest = np.asarray(entries.positions)[row, head, np.argsort(norms[row, head])[:12]]
            assert cache.retained(layer, head, row).tolist() == sorted(smallest.tolist())
    assert cache.retained(-1, -1, -1).tolist() == cache.retained(1, 1, 1).tolist()
    assert cache.retained(1, 0).tolist() == cache.retained(1, 0, 0).tolist()


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ((2, 0, 0), "layer=2: expected an integer in 0 .. 1, or in -2 .. -1"),
        ((0, -3, 0), "head=-3: expected an integer in 0 .. 1, or in -2 .. -1"),
        ((0, 0, 1), "row=1: expected an integer in 0 .. 0, or in -1 .. -1"),
        ((0.5, 0, 0), "layer=0.5: expected an integer in 0 .. 1, or in -2 .. -1"),
        ((0, True, 0), "head=True: expected an integer in 0 .. 1, or in -2 .. -1"),
    ],
)
def test_retained_of_what_is_not_there(tiny: Decoder, index: tuple, message: str) -> None:
    cache = kvjax.prefill(tiny, [1, 2, 3])
    with pytest.raises(ValueError, match=re.escape(message)):
        cache.retained(*index)
