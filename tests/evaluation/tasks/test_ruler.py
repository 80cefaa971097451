"""RULER: texts contain the references and have the requested length, and prompts equal the benchmark's."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from kvjax.evaluation.tasks import registry
from kvjax.evaluation.tasks.ruler.text import most
from kvjax.evaluation.tasks.task import DataError, Example, Fault, Question, Source
from kvjax.evaluation.tasks.vocabulary import tokenizer

TOKENIZER = tokenizer()  # splits at spaces and punctuation, so that tokens can be counted by hand
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."

# The benchmark's own templates, for comparison.
VT = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\nQuestion: Find "
    "all variables that are assigned the value {query} in the text above. Answer: According to the chain(s) of "
    "variable assignment in the text above, {num_v} variables are assigned the value {query}, they are: "
)
CWE = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list? Answer: The top 10 "
    "words that appear most often in the list are:"
)
FWE = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the "
    "three most frequently appeared words in the above coded text? Answer: According to the coded text above, the "
    "three most frequently appeared words are:"
)
QA = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
    "The following are given documents.\n\n{context}\n\nAnswer the question based on the given documents. Only give me "
    "the answer and do not output any other words.\n\nQuestion: {query} Answer:"
)


def asked(name: str, data: Path | None, length: int = 1024, count: int = 2, seed: int = 0) -> list[Example]:
    (task,) = registry.find(name)
    found = []
    for one in task.examples(Source(TOKENIZER, length, seed, count, data)):
        assert isinstance(one, Example)
        found.append(one)
    return found


def prompt(example: Example) -> str:
    (question,) = example.questions
    assert question.text.endswith(question.opening)
    assert question.opening
    return example.context + question.text


def test_there_are_the_thirteen_with_their_generation_lengths() -> None:
    lengths = {task.name: task.new_tokens for task in registry.find("ruler/*")}
    niah = {name: 128 for name in lengths if "niah" in name}
    assert lengths == {**niah, "ruler/vt": 30, "ruler/cwe": 120, "ruler/fwe": 50, "ruler/qa_1": 32, "ruler/qa_2": 32}
    assert len(niah) == 8


@pytest.mark.long(first=13)
@pytest.mark.parametrize("length", [1024, 4096])
@pytest.mark.parametrize("task", registry.find("ruler/*"), ids=lambda task: task.name)
def test_prompts_fill_their_length_and_depend_on_nothing_else(task, data: Path, length: int) -> None:
    pytest.importorskip("wonderwords", reason="RULER's words need wonderwords (the extra `eval`)")
    three = asked(task.name, data, length, 3)
    assert [example.id for example in three] == [f"{length}-{i}" for i in range(3)]
    for example in three:
        tokens = len(TOKENIZER(prompt(example)).input_ids) + task.new_tokens
        assert example.meta["tokens"] == tokens
        assert length - 90 <= tokens <= length  # the largest unit of haystack is a document of about 80 tokens
    assert asked(task.name, data, length, 2) == three[:2]
    other = asked(task.name, data, length, 1, seed=1)[0]
    assert prompt(other) != prompt(three[0])
    assert len({prompt(example) for example in three}) == 3


@pytest.mark.parametrize("task", registry.find("ruler/*"), ids=lambda task: task.name)
def test_white_space_ends_the_part_before_it(task, data: Path) -> None:
    """As in kvpress' data set: a policy that compresses the text alone sees the line end before the question."""
    pytest.importorskip("wonderwords", reason="RULER's words need wonderwords (the extra `eval`)")
    for example in asked(task.name, data):
        (question,) = example.questions
        assert example.context.endswith("\n")
        assert (question.text[0] + question.opening[0]).isalpha()
        assert question.text.endswith(f" {question.opening}")


def test_draws_stay_what_they_are() -> None:
    digest = hashlib.sha256("".join(prompt(asked(name, None)[1]) for name in ("ruler/vt", "ruler/fwe")).encode())
    assert digest.hexdigest()[:16] == "9b011075550b8da3"


def test_variables_are_followed_to_their_value() -> None:
    for example in asked("ruler/vt", None):
        (question,) = example.questions
        worked, text = example.context.split("\n\nMemorize")
        text = f"Memorize{text}"
        value = re.findall(r"assigned the value (\d{5})", question.text)[0]
        context = text.split("\n\n", 1)[1].removesuffix("\n")
        assert prompt(example) == f"{worked}\n\n" + VT.format(context=context, query=value, num_v=5)
        told = dict(re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?(\w+)", text))
        assert len(told) == 5

        def value_of(name: str, told: dict[str, str] = told) -> str:
            return value_of(told[name]) if name in told else name

        assert {value_of(name) for name in told} == {value}
        assert question.answers == tuple(told)  # in the order in which they appear
        assert {line for line in context.split("\n") if not line.startswith("VAR")} <= {NOISE}
        # the worked example is a solved chain with names of three letters
        told = dict(re.findall(r"VAR ([A-Z]{3}) = (?:VAR )?(\w+)", worked))
        assert worked.endswith(f"they are:  {' '.join(told)}")
        assert len(TOKENIZER(worked).input_ids) <= 500 + 5
    first, second = asked("ruler/vt", None)
    assert first.context[:2000] != second.context[:2000]


@pytest.mark.parametrize(("length", "often", "rarely"), [(1024, 6, 1), (4096, 30, 3)])
def test_common_words_are_the_most_common(length: int, often: int, rarely: int) -> None:
    pytest.importorskip("wonderwords", reason="RULER's words need wonderwords (the extra `eval`)")
    for example in asked("ruler/cwe", None, length):
        (question,) = example.questions
        worked, context = re.findall(r"most often\.\n(.*?)(?:\n|$)", example.context)
        counts = Counter(re.findall(r"\d+\. (\S+)", context))
        assert sorted(counts[word] for word in question.answers) == [often] * 10
        assert {count for word, count in counts.items() if word not in question.answers} == {rarely}
        numbers = [int(number) for number in re.findall(r"(\d+)\. ", context)]
        assert numbers == list(range(1, len(numbers) + 1))
        shown = Counter(re.findall(r"\d+\. (\S+)", worked))
        common = [word for word, count in shown.most_common(10)]
        solution = re.findall(r"in the list are:((?: \d+\. \S+)+)", example.context)[0]
        assert set(re.findall(r"\d+\. (\S+)", solution)) == set(common)
        assert prompt(example) == f"{CWE.format(context=worked)}{solution}\n{CWE.format(context=context)}"


@pytest.mark.long
def test_common_words_beyond_the_word_lists(data: Path, tmp_path: Path) -> None:
    pytest.importorskip("wonderwords", reason="RULER's words need wonderwords (the extra `eval`)")
    (task,) = registry.find("ruler/cwe")
    with pytest.raises(DataError, match=r"expected RULER's english_words\.json in the data folder .*; no folder is"):
        next(task.examples(Source(TOKENIZER, 200_000)))
    (tmp_path / "english_words.json").write_text(json.dumps({str(i): f"word{i}" for i in range(30_000)}))
    found = next(task.examples(Source(TOKENIZER, 200_000, count=1, folder=tmp_path)))
    assert found.questions[0].answers[0].startswith("word")
    (tmp_path / "short").mkdir()
    (tmp_path / "short" / "english_words.json").write_text(json.dumps({"1": "one"}))
    with pytest.raises(DataError, match=r"english_words\.json has 1 different words; expected at least \d+"):
        next(task.examples(Source(TOKENIZER, 200_000, folder=tmp_path / "short")))


def test_frequent_words_are_the_most_frequent() -> None:
    for example in asked("ruler/fwe", None):
        (question,) = example.questions
        context = example.context.split("coded words. ", 1)[1].removesuffix("\n")
        counts = Counter(context.split())
        (dots, _), *ranked = counts.most_common(5)
        assert dots == "..."
        assert tuple(word for word, _ in ranked[:3]) == question.answers
        assert ranked[2][1] > ranked[3][1]
        assert ranked[0][1] / counts["..."] == pytest.approx(1 / 4, rel=0.1)  # zeta's law with alpha = 2
        assert ranked[1][1] / counts["..."] == pytest.approx(1 / 9, rel=0.1)
        assert prompt(example) == FWE.format(context=context)


@pytest.mark.parametrize(("name", "needed"), [("qa_1", 1), ("qa_2", 10)])
def test_documents(data: Path, name: str, needed: int) -> None:
    for i, example in enumerate(asked(f"ruler/{name}", data)):
        (question,) = example.questions
        context = example.context.split("given documents.\n\n", 2)[-1].removesuffix("\n\n")
        documents = dict(re.findall(r"Document (\d+):\n(.*?)(?=\n\nDocument|$)", context, re.S))
        assert list(documents) == [str(n) for n in range(1, len(documents) + 1)]
        assert len(documents) == len(set(documents.values())) > needed
        if name == "qa_1":
            assert any(document.startswith(f"Paragraph 0 {i}.") for document in documents.values())
            assert question.answers == (f"name0{i}", "nobody")
        else:
            assert {f"Title {i} {j}" for j in range(10)} <= {d.split("\n")[0] for d in documents.values()}
            assert question.answers == (f"answer{i}",)
        query = question.text.split("Question: ")[1].removesuffix(" Answer:")
        assert prompt(example) == QA.format(context=context, query=query)
    assert len(asked(f"ruler/{name}", data, count=500)) == (45 if name == "qa_1" else 6)  # all available questions


def test_more_room_than_documents(data: Path) -> None:
    (example,) = asked("ruler/qa_2", data, 4096, 1)
    counts = Counter(re.findall(r"Title \d \d", example.context))
    assert len(counts) == 60
    assert max(counts.values()) > 1  # all documents repeat


def test_metrics() -> None:
    (match_all,), (match_part,) = ({task.metric for task in registry.find(p)} for p in ("ruler/niah*", "ruler/qa_*"))
    question = Question("?", ("Alpha", "beta", "12"))
    assert match_all("It is alpha, BETA.", question) == {"string_match": 2 / 3}
    assert match_all("\x00 124 alpha\x01beta", question) == {"string_match": 1}
    assert match_part("perhaps Beta", question) == {"string_match": 1}
    assert match_part("", question) == match_all("", question) == {"string_match": 0}


@pytest.mark.parametrize(
    ("name", "length", "error"),
    [
        ("ruler/vt", 300, r"length=300 of ruler/vt: expected at least about \d+ tokens"),
        ("ruler/fwe", 100, r"length=100 of ruler/fwe: expected at least about \d+ tokens"),
        ("ruler/vt", None, "length=None of the generated task ruler/vt: expected a length in tokens"),
    ],
)
def test_lengths_that_do_not_do(name: str, length: int | None, error: str) -> None:
    (task,) = registry.find(name)
    with pytest.raises(ValueError, match=error):
        next(task.examples(Source(TOKENIZER, length)))


def test_a_tokenizer_is_needed() -> None:
    (task,) = registry.find("ruler/vt")
    with pytest.raises(ValueError, match="expected the model's tokenizer"):
        next(task.examples(Source(None, 1024)))


def test_files_that_are_missing_or_wrong(tmp_path: Path) -> None:
    def fails(name: str, error: str, folder: Path | None = tmp_path) -> None:
        (task,) = registry.find(name)
        with pytest.raises(DataError, match=error):
            next(task.examples(Source(TOKENIZER, 1024, folder=folder)))

    fails(
        "ruler/niah_single_2",
        r"one of essays\.txt, PaulGrahamEssays\.json and PaulGrahamEssays/\*\.txt.* has none",
    )
    fails("ruler/niah_single_2", "no folder is given", None)
    (tmp_path / "essays.txt").write_text(" \n")
    fails("ruler/niah_single_2", r"essays\.txt is empty: expected a text")
    fails("ruler/qa_1", r"cannot read .*squad\.json: No such file")
    fails("ruler/qa_1", r"expected a folder that holds it", None)
    (tmp_path / "essays.txt").write_bytes(b"caf\xe9 ")
    fails("ruler/niah_single_2", r"essays\.txt is not UTF-8 text")
    (tmp_path / "squad.json").write_text('{"data": [{"paragraphs": [{"qas": []}]}]}')
    fails("ruler/qa_1", r"squad\.json, data\[0\], paragraphs\[0\]: field 'context' is missing; expected a string")
    (tmp_path / "hotpotqa.json").write_text('[{"question": "q", "answer": "a", "context": [["title", "no list"]]}]')
    fails(
        "ruler/qa_2",
        r"hotpotqa\.json, \[0\]: field 'context' has another form; expected a list of \[title, ",
    )


def test_other_forms_of_the_essays(data: Path, tmp_path: Path) -> None:
    text = (data / "essays.txt").read_text()
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "PaulGrahamEssays.json").write_text(json.dumps({"text": text}))
    (tmp_path / "b" / "PaulGrahamEssays").mkdir(parents=True)
    (tmp_path / "b" / "PaulGrahamEssays" / "1.txt").write_text(text[:1000])
    (tmp_path / "b" / "PaulGrahamEssays" / "2.txt").write_text(text[1000:])
    name = "ruler/niah_single_3"
    assert asked(name, tmp_path / "a") == asked(name, tmp_path / "b") == asked(name, data)


def test_an_example_that_does_not_fit_is_a_fault(tmp_path: Path) -> None:
    documents = [("short. " * 20, "first"), ("long " * 2000, "second")]
    paragraphs = [
        {"context": text, "qas": [{"question": f"{name}?", "is_impossible": False, "answers": [{"text": name}]}]}
        for text, name in documents
    ]
    (tmp_path / "squad.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    (task,) = registry.find("ruler/qa_1")
    first, second = task.examples(Source(TOKENIZER, 1024, folder=tmp_path))
    assert isinstance(first, Example)
    assert isinstance(second, Fault)
    assert re.fullmatch(r"ruler/qa_1: the shortest text has \d+ tokens; expected at most 992", second.reason)


@pytest.mark.parametrize("room", [7, 10, 11, 1000, 5003])
def test_the_most_that_fits(room: int) -> None:
    assert most(lambda units: 5 + 3 * units, room, 1) == ((room - 5) // 3 or None)
    seen = []

    def tokens(units: int) -> int:
        seen.append(units)
        return 5 + 3 * units

    most(tokens, room, 1)
    assert max(seen) <= max(1.1 * (room - 5) / 3, 5)  # no generated text is much longer than needed


def test_tasks_are_values() -> None:
    (task,) = registry.find("ruler/niah_single_1")
    assert replace(task) == task
    assert hash(replace(task, keys_hidden=2)) != hash(task)
