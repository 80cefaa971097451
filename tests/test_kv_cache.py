"""Caches are values: a document answers many questions, answers continue, dialogues take constant memory."""

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


def test_pending_token_goes_before_the_next_turn(shallow: Decoder) -> None:
    """The next turn is read in one piece, and in two."""
    document, question = DOCUMENTS[1:]
    answer = kvjax.generate(shallow, document, max_new_tokens=5, log_probs=True)
    assert answer.cache.pending.tolist() == [answer.tokens[0, -1]]
    text = [*document, *answer.tokens[0].tolist(), *question]  # in the bucket of the document
    expected = kvjax.generate(shallow, text, max_new_tokens=NEW, log_probs=True).tokens.tolist()
    assert ask(shallow, question, answer.cache) == expected
    assert ask(shallow, question, answer.cache, chunk=8) == expected


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


@pytest.mark.parametrize("text", ["snapkv:budget=12,window=4", "adakv:base=snapkv,base.budget=12,base.window=4"])
def test_retained_tokens_are_those_with_an_entry(shallow: Decoder, text: str) -> None:
    """Of rows of 30 and 9 tokens, in slots and in a pool, whose heads share 12 entries each."""
    rows = [np.arange(30) % 7 + 1, np.arange(9) % 5 + 1]
    cache = kvjax.prefill(shallow, rows, policy=text)
    retained = cache.retained()
    assert retained.shape == (2, shallow.config.num_layers, shallow.config.num_kv_heads, 30)
    assert retained[0, ..., 26:].all()  # the window
    assert retained[1, ..., :9].all()
    assert not retained[1, ..., 9:].any()
    np.testing.assert_array_equal(retained[0].mean(axis=1).sum(axis=-1), 12)
    for layer, entries in enumerate(cache.entries):
        for head, positions in enumerate(np.asarray(entries.positions)[0]):
            np.testing.assert_array_equal(
                np.flatnonzero(retained[0, layer, head]), np.unique(positions[positions >= 0])
            )
