"""One row per answer with everything that is known of it, as mappings, CSV or Parquet."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from kvjax.checks import check_type, installs
from kvjax.evaluation.report import escape
from kvjax.evaluation.report.results import CellResults, Results, asked_by
from kvjax.files.writing import new_file

COLUMNS = {  # in this order
    "model": "text",
    "policy": "text",
    "budget": "number",
    "policy_text": "text",
    "question_position": "text",
    "task": "text",
    "length": "integer",
    "id": "text",
    "asked": "integer",
    "line": "integer",
    "prompt_tokens": "integer",
    "compressed_tokens": "integer",
    "kept_tokens": "number",
    "question": "text",
    "answer": "text",
    "expected": "texts",
    "scorer": "text",
    "score": "number",
    "cache_bytes": "integer",
    "seconds": "number",
    "generated_tokens": "integer",
}


def rows(*several: Results) -> Iterator[dict[str, Any]]:
    """A mapping per answer of the results, with the names of COLUMNS; None where a value is not known.

    docs/guide/your_data.md describes the columns. Answers that are missing because of an error have no row.

    Raises:
        ValueError: for what is no results.
    """
    for results in several:
        check_type("results", results, Results)
        for cell in results.cells.values():
            seconds = _seconds(cell)
            yield from (_row(results.model, line, seconds.get(asked_by(line))) for line in cell.lines)


def _row(model: str, line: Mapping[str, Any], seconds: float | None) -> dict[str, Any]:
    scorer, score = next(iter(line["scores"].items()), (None, None))
    return {
        "model": model,
        "policy": line["policy"],
        "budget": None if line["budget"] is None else float(line["budget"]),
        "policy_text": line["text"],
        "question_position": line["question"],
        "task": line["task"],
        "length": line["length"],
        "id": line["id"],
        "asked": line["asked"],
        "line": line["meta"].get("line"),
        "prompt_tokens": line["prompt_tokens"],
        "compressed_tokens": line["compressed_tokens"],
        "kept_tokens": fmean(line["kept"]),
        "question": line.get("question_text", "").strip() or None,
        "answer": line.get("prediction"),
        "expected": line.get("answers"),
        "scorer": scorer,
        "score": None if score is None else float(score),
        "cache_bytes": line["kv_bytes_end"],
        "seconds": seconds,
        "generated_tokens": len(line["tokens"]),
    }


def _seconds(cell: CellResults) -> dict[tuple[Any, ...], float]:
    """The seconds per answer of the batch of each question: of reading the question and decoding the answer."""
    return {
        tuple(asked): (took["ask_seconds"] + took["decode_seconds"]) / took["answers"]
        for took in cell.timings
        for asked in took.get("questions", ())
    }


def write_csv(path: str | os.PathLike[str], several: Sequence[Results]) -> int:
    """Writes the rows as CSV in UTF-8, and returns their number. Raises OSError.

    An empty cell is a value that is not known, and `expected` is a JSON list. A text that a spreadsheet would run as a
    formula begins with an apostrophe.
    """
    count = 0
    with new_file(path) as new, new.open("w", encoding="utf-8", newline="") as file:
        file.write(_csv(COLUMNS))
        for row in rows(*several):
            file.write(_csv(map(_cell, row.values())))
            count += 1
    return count


def _csv(cells: Iterable[Any]) -> str:
    """A row as CSV. Its line end is "\\n", and a text with a carriage return is in quotes as well."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\r\n").writerow(cells)  # Python 3.12 quotes the characters of the line end alone
    return text.getvalue().removesuffix("\r\n") + "\n"


def _cell(value: Any) -> Any:
    if isinstance(value, str):
        return escape.formula(value)
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list) else value


def write_parquet(path: str | os.PathLike[str], several: Sequence[Results]) -> int:
    """Writes the rows as Parquet, and returns their number.

    Raises:
        ValueError: a number of the results is none, or pyarrow is not installed; the message says how to install it.
        OSError: the file cannot be written.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise ValueError(f"Parquet needs pyarrow, which is not installed: expected {installs('table')}") from None
    kinds = {"text": pa.string(), "texts": pa.list_(pa.string()), "integer": pa.int64(), "number": pa.float64()}
    schema = pa.schema([(name, kinds[kind]) for name, kind in COLUMNS.items()])
    try:
        table = pa.Table.from_pylist(list(rows(*several)), schema=schema)
    except (pa.ArrowException, OverflowError) as error:
        raise ValueError(f"the results are damaged: {error}; expected those that kvjax eval wrote") from None
    with new_file(path) as new:
        pq.write_table(table, new)
    return table.num_rows
