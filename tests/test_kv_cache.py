"""Caches are values: a document answers many questions, answers continue, dialogues take constant memory."""

import jax
import numpy as np
import pytest

import kvjax
from kvjax.models import Decoder

RNG = np.random.default_rng(1)
DOCUMENTS = [RNG.integers(0, 99, n).tolist() for n in (41, 34, 9)]
QUESTIONS = [RNG.integers(0, 99, n).tolist() for n in (7, 1, 2)]
NEW = 12


def arrays(cache: kvjax.KVCache) -> list[np.ndarray]:
    return [np.array(leaf) for leaf in jax.tree.leaves(cache)]


def ask(params: Decoder, question, cache: kvjax.KVCache, **options) -> list[list[int]]:
    return kvjax.generate(params, question, cache=cache, max_new_tokens=NEW, log_probs=True, **options).tokens.tolist()


@pytest.mark.slow
def test_document_answers_any_question_at_any_time(tiny: Decoder, policy: kvjax.Policy) -> None:
    document = kvjax.prefill(tiny, DOCUMENTS[0], policy=policy)
    before = arrays(document)
    answers = [ask(tiny, question, document) for question in QUESTIONS]
    for question, answer in reversed(list(zip(QUESTIONS, answers, strict=True))):
        fresh = kvjax.prefill(tiny, DOCUMENTS[0], policy=policy)
        assert ask(tiny, question, fresh) == ask(tiny, question, document) == answer
    for old, new in zip(before, arrays(document), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.slow
def test_questions_in_company_are_as_alone(tiny: Decoder, policy: kvjax.Policy) -> None:
    """Questions of 7, 1 and 2 tokens, each about another document."""
    together = ask(tiny, QUESTIONS, kvjax.prefill(tiny, DOCUMENTS, policy=policy))
    for row in (0, 1):
        assert ask(tiny, QUESTIONS[row], kvjax.prefill(tiny, DOCUMENTS[row], policy=policy)) == [together[row]]


@pytest.mark.slow
def test_document_and_question_are_one_prompt_until_compressed(tiny: Decoder, policy: kvjax.Policy) -> None:
    document = kvjax.prefill(tiny, DOCUMENTS[0], policy=policy, compress="never")
    assert all(layer.occupancy.tolist() == [[41, 41]] for layer in document.entries)
    if policy.score.needs.whole_prompt:
        with pytest.raises(ValueError, match="expected a prompt that is read in one call"):
            ask(tiny, QUESTIONS[0], document)
        return
    whole = kvjax.generate(tiny, DOCUMENTS[0] + QUESTIONS[0], policy=policy, max_new_tokens=NEW, log_probs=True)
    assert ask(tiny, QUESTIONS[0], document) == whole.tokens.tolist()


@pytest.mark.slow
def test_going_on_equals_one_longer_answer(tiny: Decoder, policy: kvjax.Policy) -> None:
    def answer(prompt, new: int, **options) -> kvjax.Generation:
        return kvjax.generate(tiny, prompt, max_new_tokens=new, log_probs=True, **options)

    whole = answer(DOCUMENTS, 30, policy=policy)
    first = answer(DOCUMENTS, 13, policy=policy)
    second = answer(None, 1, cache=first.cache)
    third = answer(None, 16, cache=second.cache)
    np.testing.assert_array_equal(np.concatenate([first.tokens, second.tokens, third.tokens], 1), whole.tokens)
    parts = [part.log_probs for part in (first, second, third) if part.log_probs is not None]
    np.testing.assert_allclose(np.concatenate(parts, 1), whole.log_probs, atol=1e-5, rtol=0)
    assert third.cache.length.tolist() == whole.cache.length.tolist()


@pytest.mark.slow
def test_draws_go_on_too(tiny: Decoder) -> None:
    options = {"sampler": kvjax.Sampler(temperature=2.0), "seed": 3}
    whole = kvjax.generate(tiny, DOCUMENTS, max_new_tokens=20, **options)
    first = kvjax.generate(tiny, DOCUMENTS, max_new_tokens=8, **options)
    second = kvjax.generate(tiny, None, cache=first.cache, max_new_tokens=12, **options)
    np.testing.assert_array_equal(np.concatenate([first.tokens, second.tokens], axis=1), whole.tokens)


@pytest.mark.slow
def test_pending_token_goes_before_the_next_turn(tiny: Decoder) -> None:
    answer = kvjax.generate(tiny, DOCUMENTS[0], max_new_tokens=NEW, log_probs=True)
    assert answer.cache.pending.tolist() == [answer.tokens[0, -1]]
    text = [*DOCUMENTS[0], *answer.tokens[0].tolist(), *QUESTIONS[0]]
    expected = kvjax.generate(tiny, text, max_new_tokens=NEW, log_probs=True).tokens.tolist()
    assert ask(tiny, QUESTIONS[0], answer.cache) == expected
    assert ask(tiny, QUESTIONS[0], answer.cache, chunk=3) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", ["streaming_llm:budget=24,positions=in_cache", "h2o:budget=24", "morphkv:budget=24,window=4"]
)
def test_dialogue_in_constant_memory(tiny: Decoder, text: str, compiled: list[str]) -> None:
    answer = kvjax.generate(tiny, DOCUMENTS[0], policy=kvjax.policies.parse(text), max_new_tokens=NEW, log_probs=True)
    size = answer.cache.nbytes
    for turn in range(50):
        if turn == 2:
            compiled.clear()
        question = RNG.integers(0, 99, RNG.integers(1, 15)).tolist()
        seen = int(answer.cache.length[0]) + len(question) + NEW
        answer = kvjax.generate(tiny, question, cache=answer.cache, max_new_tokens=NEW, log_probs=True)
        assert answer.cache.nbytes == size
        assert answer.cache.length.tolist() == [seen]
        assert answer.cache.entries[0].occupancy.max() <= 24
    assert compiled == []


@pytest.mark.slow
def test_prompt_of_any_length_in_constant_memory(tiny: Decoder, policy: kvjax.Policy, compiled: list[str]) -> None:
    """A prompt that is compressed after each chunk runs the same programs when it is ten times as long."""
    if not policy.limited(0):
        pytest.skip("keeps everything")
    if policy.allocates:
        with pytest.raises(ValueError, match=r"would allocate .* more than once"):
            kvjax.prefill(tiny, DOCUMENTS[0], policy=policy, chunk=32, compress="chunk")
        return
    kvjax.prefill(tiny, RNG.integers(0, 99, 150), policy=policy, chunk=32, compress="chunk")
    assert compiled
    compiled.clear()
    cache = kvjax.prefill(tiny, RNG.integers(0, 99, 1500), policy=policy, chunk=32, compress="chunk")
    assert compiled == []
    assert cache.length.tolist() == [1500]
    assert sum(layer.slots for layer in cache.entries) == 24 * len(cache.entries)
    for layer in cache.entries:
        occupied = np.asarray(layer.occupancy)
        assert occupied.max() <= layer.slots
        assert policy.merge.effects.keys or occupied.min() == layer.slots  # a merge may leave slots empty
