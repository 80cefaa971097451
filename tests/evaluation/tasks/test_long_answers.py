"""LongGenBench and LongWriter: computed scores and the marks of a judge."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvjax.evaluation.judge import JudgeError
from kvjax.evaluation.tasks import registry
from kvjax.evaluation.tasks.longgenbench import units
from kvjax.evaluation.tasks.longwriter import DIMENSIONS
from kvjax.evaluation.tasks.task import Example, Fault, Source


def city(kind: str = "Floor", number: int = 4, **changes: object) -> dict[str, object]:
    prefix = f"#*# {kind} 1:"
    return {
        "prompt": f"Plan it. Write {number} of {kind}. *** started ***\n{prefix}",
        "checks_once": {"2": "a gym"},
        "checks_range": {"2": "a bar", "3": "a bar"},
        "checks_periodic": {"4": "a pool"},
        "type": kind,
        "prefix": prefix,
        "number": number,
    } | changes


def plan(folder: Path, *rows: object) -> list[Example | Fault]:
    (folder / "longgenbench").mkdir(exist_ok=True)
    (folder / "longgenbench" / "Dataset_short.json").write_text(json.dumps(rows))
    (task,) = registry.find("longgenbench/16k")
    return list(task.examples(Source(folder=folder)))


def test_scenarios_take_turns(tmp_path: Path) -> None:
    kinds = ["Week", "Week", "Week", "Menu Week", "Menu Week", "Floor"]
    found = plan(tmp_path, *(city(kind) for kind in kinds))
    assert [(one.meta["type"], one.id) for one in found] == [
        ("Week", "0"), ("Menu Week", "3"), ("Floor", "5"), ("Week", "1"), ("Menu Week", "4"), ("Week", "2"),
    ]  # fmt: skip
    (question,) = found[2].questions
    assert found[2].context == "Plan it. Write 4 of Floor."
    assert question.text == " *** started ***\n#*# Floor 1:"
    assert question.opening == "#*# Floor 1:"


def test_parts_by_their_number() -> None:
    text = "#*# Floor 1: a hall #*# Floor 2 (high): Floor 7 is far #*# nothing #*#Floor 2 again #*# Floor 11: a"
    assert units(text, "Floor") == {1: " Floor 1: a hall ", 2: " Floor 2 (high): Floor 7 is far ", 11: " Floor 11: a"}
    assert units("#*# Menu Week 3: soup", "Menu Week") == {3: " Menu Week 3: soup"}
    assert units(f"#*# Floor {'1' * 5_000}: a #*# Floor 2: b", "Floor") == {2: " Floor 2: b"}


def test_completion_and_accuracy(tmp_path: Path) -> None:
    one, other = plan(tmp_path, city(), city(number=2))
    (task,) = registry.find("longgenbench/16k")
    (question,) = one.questions
    answer = " a hall #*# Floor 2: a gym #*# Floor 3: a bar #*# Floor 9: a pool *** finished #*# Floor 4: late"
    assert task.metric(answer, question) == {"completion_rate": 3 / 4}  # floors 1 to 3 of 4
    assert task.metric("", question) == {"completion_rate": 1 / 4}  # the prompt has the heading of the first unit
    asked = []

    def judge(prompt: str) -> str:
        asked.append(prompt)
        context, event = prompt.split("### Instruction: Does this context include the ")
        return "Yes." if event.split("?")[0] in context else "No"

    judged = task.judged_by(judge)
    scores = judged.metric(answer, question)
    assert scores == {
        "completion_rate": 3 / 4, "accuracy_once": 1, "checks_once": 1, "accuracy_range": 1 / 2, "checks_range": 2,
    }  # fmt: skip
    assert asked[0] == (
        "Context:  Floor 2: a gym ### Instruction: Does this context include the a gym? Please answer with 'yes' or "
        "'no' only."
    )
    more = judged.metric(" #*# Floor 2: a bar, no pool", other.questions[0])
    assert more == {
        "completion_rate": 1, "accuracy_once": 0, "checks_once": 1, "accuracy_range": 1, "checks_range": 1,
    }  # fmt: skip
    assert judged.overall([scores, more]) == pytest.approx(
        {"completion_rate": 7 / 8, "accuracy_once": 1 / 2, "accuracy_range": 2 / 3, "accuracy": 7 / 12}
    )
    assert task.overall([task.metric(answer, question)]) == {"completion_rate": 3 / 4}
    assert task.overall([]) == {}


def test_plans_that_cannot_be_asked(tmp_path: Path) -> None:
    found = plan(
        tmp_path, city(prefix="#*# Week 1:"), 7, city(checks_once=None), city(checks_range={"a": "b"}), city(number=0)
    )
    assert [one.reason.removeprefix("longgenbench/Dataset_short.json, ") for one in found] == [
        "[0]: field 'prompt' does not end with '#*# Week 1:', which is field 'prefix'",
        "[1] is a number; expected a JSON object",
        "[2], checks_once is null; expected a JSON object",
        "[3]: field 'checks_range' has 'a': 'b'; expected a number and a string",
        "[4]: field 'number' is 0; expected an integer >= 1",
    ]


def letters(folder: Path, *rows: object) -> list[Example | Fault]:
    (folder / "longwriter").mkdir(exist_ok=True)
    (folder / "longwriter" / "longbench_write.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in rows))
    (task,) = registry.find("longwriter/write")
    return list(task.examples(Source(folder=folder)))


@pytest.mark.parametrize(
    ("prompt", "question"),
    [("Write a short letter.", " letter."), ("a\nb \n", "\nb \n"), ("写一篇文章", "章"), ("ab ", " ")],
)
def test_the_question_is_the_last_word(tmp_path: Path, prompt: str, question: str) -> None:
    (one,) = letters(tmp_path, {"prompt": prompt, "type": "Letter", "length": 100})
    assert one.context + one.questions[0].text == prompt
    assert one.questions[0].text == question
    assert one.id == "1"
    assert one.meta == {"type": "Letter", "length": 100}


def test_lengths_and_quality(tmp_path: Path) -> None:
    (one,) = letters(tmp_path, {"prompt": "Write it.", "type": "Letter", "length": 12})
    (task,) = registry.find("longwriter/write")
    (question,) = one.questions
    answer = "one two three four five six seven eight nine ten eleven twelve"
    assert task.metric(answer, question) == {"length": 1, "repetition": 0}
    assert task.metric("one two three four five six", question) == {"length": 0.5}
    marks = dict(zip(DIMENSIONS, (5, 4, 3, 2, 1, 3), strict=True)) | {"Analysis": "fine"}
    replies = ["I cannot.", json.dumps(marks | {"Clarity": 7}), f"Here:\n```json\n{json.dumps(marks, indent=1)}\n```"]
    asked = []

    def judge(prompt: str) -> str:
        asked.append(prompt)
        return replies[min(len(asked), 3) - 1]

    scores = task.judged_by(judge).metric(answer, question)
    assert scores == {
        "length": 1, "quality": 0.5, "Relevance": 1, "Accuracy": 0.75, "Coherence": 0.5, "Clarity": 0.25,
        "Breadth and Depth": 0, "Reading Experience": 0.5, "repetition": 0,
    }  # fmt: skip
    assert len(asked) == 3
    assert f"<User Request>\n\nWrite it.\n\n</User Request>\n\n<Response>\n\n{answer}\n\n</Response>" in asked[0]
    with pytest.raises(JudgeError, match=r"5 replies of the judge, the last one 'no': expected marks from 1 to 5"):
        task.judged_by(lambda prompt: "no").metric(answer, question)


def test_requests_that_cannot_be_asked(tmp_path: Path) -> None:
    found = letters(tmp_path, {"prompt": "Write.", "type": "Letter", "length": 0}, {"prompt": "Write.", "length": 10})
    assert [one.reason.split(", line ")[1] for one in found] == [
        "1: fields 'prompt' and 'length' are 'Write.' and 0; expected a text and a length >= 1",
        "2: field 'type' is missing; expected a string",
    ]


def test_tasks_without_a_judge_stay_as_they_are() -> None:
    (task,) = registry.find("ruler/vt")
    assert task.judged_by(lambda prompt: "yes") is task
