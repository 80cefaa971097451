"""RULER's needles: what is hidden in which text, what is asked, and the benchmark's own template."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvjax.evaluation.tasks import registry
from tests.evaluation.tasks.test_ruler import NOISE, asked, prompt

NEEDLE = re.compile(r"One of the special magic (numbers|uuids) for (\S+) is: (\S+)\.")
NIAH = (
    "Some special magic {type_needle_v} are hidden within the following text. Make sure to memorize it. I will quiz "
    "you about the {type_needle_v} afterwards.\n{context}\nWhat are all the special magic {type_needle_v} for {query} "
    "mentioned in the provided text? The special magic {type_needle_v} for {query} mentioned in the provided text are"
)


@pytest.mark.parametrize(
    ("name", "needles", "hay", "values"),
    [
        ("niah_single_1", 1, "noise", "numbers"),
        ("niah_single_2", 1, "essay", "numbers"),
        ("niah_single_3", 1, "essay", "uuids"),
        ("niah_multikey_1", 4, "essay", "numbers"),
        ("niah_multikey_2", None, "needle", "numbers"),
        ("niah_multikey_3", None, "needle", "uuids"),
        ("niah_multivalue", 4, "essay", "numbers"),
        ("niah_multiquery", 4, "essay", "numbers"),
    ],
)
def test_needles(data: Path, name: str, needles: int | None, hay: str, values: str) -> None:
    pytest.importorskip("wonderwords", reason="RULER's words need wonderwords (the extra `eval`)")
    for example in asked(f"ruler/{name}", data):
        (question,) = example.questions
        hidden = NEEDLE.findall(example.context)
        assert {kind for kind, _, _ in hidden} == {values}
        assert len(hidden) == needles if needles else len(hidden) > 10
        form = (
            r"[1-9]\d{6}" if values == "numbers" else r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}"
        )
        assert all(re.fullmatch(form, value) for _, _, value in hidden)
        assert len({value for _, _, value in hidden}) == len(hidden)
        (query,) = re.findall(r" for (.*) mentioned in the provided text\?", question.text)
        keys = [key.removeprefix("and ") for key in query.split(", ")]
        assert len(keys) == (4 if name == "niah_multiquery" else 1)
        assert set(question.answers) == {value for _, key, value in hidden if key in keys}
        assert len(question.answers) == (4 if name in ("niah_multivalue", "niah_multiquery") else 1)
        context = example.context.split("\n", 1)[1].removesuffix("\n")
        rest = NEEDLE.sub("", context)
        if hay == "noise":
            assert set(rest.split("\n")) == {NOISE, ""}
        elif hay == "needle":
            assert not rest.strip()
        else:
            assert rest.split()[:40] == (data / "essays.txt").read_text().split()[:40]
        # the benchmark derives the singular of its template by replacing words
        template, kind = NIAH, values
        if len(question.answers) == 1:
            template = template.replace("Some", "A").replace("are all", "is").replace("are", "is")
            kind = values[:-1]
        depth = context.find(question.answers[0]) / len(context)
        assert example.meta.get("depth") == (None if len(question.answers) > 1 else pytest.approx(depth, abs=1e-3))
        assert prompt(example) == template.format(type_needle_v=kind, context=context, query=query)


def test_varied_texts_begin_anywhere_in_the_essays(data: Path) -> None:
    """The task has the needles and the form of RULER's. The text after the last word is that of the beginning."""
    pytest.importorskip("wonderwords", reason="RULER's words need wonderwords (the extra `eval`)")
    names = [task.name for task in registry.find("ruler_varied/*")]
    own = ("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery")
    assert names == [f"ruler_varied/{name}" for name in own]
    essay, beginnings = (data / "essays.txt").read_text().split(), set[str]()
    for example in asked("ruler_varied/niah_multikey_1", data, count=6):
        context = example.context.split("\n", 1)[1]
        assert len(NEEDLE.findall(context)) == 4
        hay = NEEDLE.sub("", context).split()
        starts = [at for at in range(len(essay)) if (essay[at:] + essay)[:20] == hay[:20]]
        assert any(essay[at - 1][-1] in ".!?" and (essay[at:] + essay)[: len(hay)] == hay for at in starts)
        beginnings.add(" ".join(hay[:20]))
    assert len(beginnings) > 2
