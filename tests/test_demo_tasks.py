"""The demo tasks: exact lengths, one right answer that the text states, the same draw from the same seed."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest

from kvjax.evaluation.tasks.demo import SHORTEST_FILLER, TASKS, Deck, document, example, filler, weave
from kvjax.evaluation.tasks.vocabulary import (
    CLASSES,
    IDS,
    LABELS,
    NAMES,
    THINGS,
    UNKNOWN,
    WORDS,
    decode,
    encode,
    tokenizer,
)

LENGTHS = (64, 128, 301, 1024, 2048)


def facts(pattern: str, text: str) -> dict[str, str]:
    """What each subject is said to be; fails if two statements are about the same subject."""
    found = re.findall(pattern, text)
    assert len(dict(found)) == len(found), "two statements about one subject"
    return dict(found)


def solve(text: str, question: str) -> str:
    """Answers by reading, without the generator's help. Fails where a text leaves room for a second answer."""
    if match := re.fullmatch(r"recall what the code of (\w+) is :", question):
        return f"{match[1]} is " + facts(r"the code of (\w+) is (\w+) \.", text)[match[1]]
    if match := re.fullmatch(r"recall what the codes of (\w+) and (\w+) are :", question):
        codes = facts(r"the code of (\w+) is (\w+) \.", text)
        return f"{match[1]} is {codes[match[1]]} and {match[2]} is {codes[match[2]]}"
    if match := re.fullmatch(r"recall what (\w+) equals :", question):
        values = facts(r"(\w+) equals (\w+) \.", text)
        chain = [match[1], values[match[1]]]
        while chain[-1] in values:
            chain.append(values[chain[-1]])
        return " equals ".join(chain)
    if match := re.fullmatch(r"recall what (\w+) says :", question):
        return f"{match[1]} says " + facts(r"(\w+) says ((?:\w+ )+)\.", text)[match[1]].strip()
    if match := re.fullmatch(r"recall what (\w+) means :", question):
        kind = {word: kind for kind, words in CLASSES.items() for word in words}
        said = {(kind[word], label) for word, label in re.findall(r"(\w+) means (\w+) \.", text)}
        (label,) = [label for shown, label in said if shown == kind[match[1]]]
        return f"{match[1]} means {label}"
    assert question == "recall what most votes are for :"
    (first, most), (_, next_most), *_ = Counter(re.findall(r"one vote for (\w+) \.", text)).most_common()
    assert most >= 2 * next_most
    return f"for {first}"


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("task", TASKS)
def test_every_question_has_the_stated_answer_and_prompts_are_exactly_as_long_as_asked(task, length):
    for seed in range(3):
        text = document(task, length, np.random.default_rng(seed))
        assert text.questions
        for question, answer in text.questions:
            assert len(text.context) + len(question) == length
            assert solve(decode(text.context), decode(question)) == decode(answer)
            for ids in (text.context, question, answer):
                assert ids.dtype == np.int32
                assert 0 <= ids.min() <= ids.max() < len(WORDS)


@pytest.mark.parametrize("task", TASKS)
def test_an_example_is_one_of_its_texts_questions_and_a_function_of_the_seed(task):
    one, same, other = (example(task, 256, np.random.default_rng(seed)) for seed in (7, 7, 8))
    np.testing.assert_array_equal(one.prompt, same.prompt)
    np.testing.assert_array_equal(one.answer, same.answer)
    assert one.prompt.shape == other.prompt.shape == (256,)
    assert (one.prompt != other.prompt).any()
    text = document(task, 256, np.random.default_rng(7))
    np.testing.assert_array_equal(text.context, one.context)
    assert any(np.array_equal(q, one.question) and np.array_equal(a, one.answer) for q, a in text.questions)


def test_facts_lie_anywhere_in_the_text():
    depths = []
    for seed in range(100):
        text = decode(document("needle", 512, np.random.default_rng(seed)).context).split()
        depths.append(text.index("code") / len(text))
    assert min(depths) < 0.1
    assert max(depths) > 0.9
    assert 0.4 < np.mean(depths) < 0.6


def test_labelled_words_need_not_have_been_shown():
    """What is asked is the class's label, not a line of the text: some of the words asked are new."""
    text = document("labels", 128, np.random.default_rng(0))
    shown = set(decode(text.context).split())
    asked = {decode(question).split()[2] for question, _ in text.questions}
    assert asked - shown
    assert asked & shown


def test_no_task_can_be_answered_by_its_likeliest_answer():
    for task in TASKS:
        draws = [decode(example(task, 128, np.random.default_rng([1, seed])).answer) for seed in range(60)]
        assert Counter(draws).most_common(1)[0][1] <= 60 // len(LABELS) * 3, task


def test_filler_has_any_length_and_states_nothing():
    rng = np.random.default_rng(0)
    for length in [0, *range(SHORTEST_FILLER, 60)]:
        sentences = filler(length, rng)
        words = " ".join(sentences).split()
        assert len(words) == length
        assert all(sentence.endswith(" .") for sentence in sentences)
        assert not set(words) & {*NAMES, *THINGS, *LABELS, "code", "equals", "says", "means", "vote"}


def test_errors_name_what_is_wrong_and_what_is_accepted():
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match=r"unknown task 'riddle': expected one of needle, "):
        document("riddle", 128, rng)
    with pytest.raises(ValueError, match=r"a text of 8 tokens: expected at least 11"):
        example("needle", 16, rng)
    with pytest.raises(ValueError, match=r"dragon, unicorn: expected words of the demo vocabulary"):
        encode("the unicorn meets the dragon .")
    with pytest.raises(ValueError, match=r"113 names requested, but 112 are left"):
        Deck(rng).names(113)
    assert len(weave(["one vote for lamp ."], 9, rng)) == 9


def test_the_vocabulary_is_512_distinct_words_and_the_tokenizer_agrees_with_it():
    assert len(WORDS) == len(IDS) == 512
    made = tokenizer()
    assert made.get_vocab() == IDS
    text = decode(document("copying", 256, np.random.default_rng(0)).context)
    assert made(text)["input_ids"] == encode(text).tolist()
    assert made.decode(encode(text)) == text
    assert made.tokenize("Ann? the lamp.") == [UNKNOWN, UNKNOWN, "the", "lamp", "."]
