"""One example of a cell for the leaderboard: the prompt, the answer, and which tokens the policy retained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from kvjax.evaluation.header import prompt_key
from kvjax.evaluation.lines import Line
from kvjax.evaluation.report.results import CellResults, Results, asked_by

LONGEST, MOST = 400, 5  # characters of a text, and expected answers


def example_of(cell: CellResults, full: CellResults | None, results: Results, asked: dict[Any, Any]) -> Line | None:
    """Returns an answer of a cell as values of JSON; None if no answer has a score.

    It is the first one that scores below the full cache's to the same question, or else the first one, among those
    whose retained tokens were recorded if there are any.

    Args:
        cell: the cell.
        full: the full cache in the same setting; None if it was not measured.
        results: of the model.
        asked: receives the questions, which cells share, by what identifies them.
    """
    theirs = {asked_by(line): line for line in (full.lines if full is not None else ())}

    def lost(line: Mapping[str, Any]) -> bool:
        other = theirs.get(asked_by(line))
        return other is not None and bool(other["scores"]) and _score(line) < _score(other)

    def prompt(line: Mapping[str, Any]) -> Sequence[str] | None:
        pieces = results.prompts.get(prompt_key(line["task"], line["length"], line["id"]))
        if pieces is None or not isinstance(line.get("retained"), str) or line["asked"] + 1 >= len(pieces):
            return None
        return [*pieces[0], *pieces[line["asked"] + 1]]

    lines = [line for line in cell.lines if line["scores"]]
    line = min(lines, key=lambda line: (prompt(line) is None, not lost(line)), default=None)
    if line is None:
        return None
    key, answers, pieces = (results.model, *asked_by(line)), line.get("answers"), prompt(line)
    expected = [_head(text) for text in answers if isinstance(text, str)] if isinstance(answers, list) else []
    question = {"task": line["task"], "id": line["id"], "end": _tail(line.get("question_text"))}
    asked.setdefault(key, question | {"expected": expected[:MOST], "more": max(0, len(expected) - MOST)})
    if pieces is not None:
        asked[key]["pieces"] = pieces
    other = None if cell is full else theirs.get(asked_by(line))
    return {
        "asked": list(asked).index(key),
        "score": round(100 * _score(line), 2),
        "answer": _head(line.get("prediction")),
        "full": None if other is None else _head(other.get("prediction")),
        "lost": lost(line),
        "tokens": line["prompt_tokens"],
        "kept": round(fmean(line["kept"]), 1),
        "retained": None if pieces is None else line["retained"],
    }


def _score(line: Mapping[str, Any]) -> float:
    return next(iter(line["scores"].values()))


def _head(text: Any) -> str | None:
    if not isinstance(text, str):
        return None
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} …"


def _tail(text: Any) -> str | None:
    if not isinstance(text, str):
        return None
    return text if len(text) <= LONGEST else f"… {text[-LONGEST:]}"
