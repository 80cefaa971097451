"""The grid of a run: model, tasks, policies x budgets and options. A grid is read from YAML and checked at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any

import yaml

from kvjax.checks import did_you_mean, is_number, shown
from kvjax.decoding.sampling import parse as parse_sampler
from kvjax.evaluation.entries import LINES, SETTINGS, Budget, Cell, PolicyLine, Setting, TaskLine
from kvjax.evaluation.judge import Endpoint
from kvjax.evaluation.scorers import scorer
from kvjax.evaluation.yaml_text import brief, read_yaml
from kvjax.files.reading import read_text
from kvjax.policy import Policy

LONGEST = 10_000_000  # bytes of a file
TOKENS = 2**24  # positions beyond it are no exact float32 numbers
MOST = {  # the largest sizes that a grid may ask for; larger ones are mistakes that would run for days
    "limit": 1_000_000,
    "new_tokens": TOKENS,
    "max_new_tokens": TOKENS,
    "max_length": TOKENS,
    "tokens": TOKENS,
    "batch": 65_536,
    "decode_rows": 65_536,
    "chunk": TOKENS,
}


@dataclass(frozen=True)
class Grid:
    """All options of a run.

    Attributes:
        tasks: the tasks that every policy answers.
        policies: the policies. One whose text has a placeholder runs at every budget.
        title: a description of what the run reproduces.
        model: a folder, a GGUF file, a repository on the hub, or "demo" for the model that ships with kvjax.
        dtype: the dtype of the weights and of the cache; the stored dtype by default.
        gates: folders or repositories of gates and statistics, as `kvjax.with_gates` and `kvjax.with_statistics` take
            them.
        data: the folder of the benchmarks' data files; None downloads them from the hub.
        budgets: floats are shares of the prompt, integers are entries per kv head.
        question: the settings to run.
        limit: the largest number of examples per task and length; no limit by default.
        new_tokens: the largest number of tokens of an answer; the task's own number by default.
        max_length: the largest number of tokens of a prompt; the model's limit by default.
        sampler: "greedy", or settings such as "temperature=0.7".
        seed: the seed of generated tasks and of sampling.
        mesh: the shape of a host's device mesh, data x model.
        batch: the largest number of prompts per batch.
        decode_rows: the largest number of rows that take decode steps together, of policies that evict nothing while
            decoding. Each batch and policy takes its own by default, and then has a decoding speed of its own.
        memory_gb: the memory in GB (1e9 bytes) that the caches of a batch may take; it can make batches smaller.
        chunk: the number of tokens that prefill reads at a time; None reads a prompt at once.
        chat: whether prompts get the checkpoint's chat template, for the tasks whose benchmark uses one.
        ends: whether answers stop at an end token; otherwise every answer has the largest number of tokens.
        refill: whether a row takes the next prompt as soon as its answer has ended; otherwise a batch ends with its
            longest answer. The task decides by default. Without `ends` nothing is refilled.
        judge: the options of `judge.Endpoint`, at least url and model, for metrics that ask a judge.
    """

    tasks: tuple[TaskLine, ...]
    policies: tuple[PolicyLine, ...]
    title: str = ""
    model: str = "demo"
    dtype: str | None = None
    gates: tuple[str, ...] = ()
    data: str | None = None
    budgets: tuple[Budget, ...] = ()
    question: tuple[Setting, ...] = ("after",)
    limit: int | None = None
    new_tokens: int | None = None
    max_length: int | None = None
    sampler: str = "greedy"
    seed: int = 0
    mesh: tuple[int, int] = (1, 1)
    batch: int = 8
    decode_rows: int | None = None
    memory_gb: float | None = None
    chunk: int | None = None
    chat: bool = False
    ends: bool = True
    refill: bool | None = None
    judge: Mapping[str, Any] | None = None

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Grid:
        """Reads a grid from a YAML file. Raises ValueError, which names the file and the problem."""
        try:
            given = read_yaml(read_text(path, LONGEST, "a YAML file"))
        except yaml.YAMLError as error:
            raise ValueError(f"{path} is not YAML: {error}") from None
        try:
            return cls.of(given)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    @classmethod
    def of(cls, given: Any) -> Grid:
        """Builds a grid from a mapping of YAML values.

        Raises:
            ValueError: if a field is missing or not accepted. The text of each policy is parsed at each budget.
        """
        if not isinstance(given, dict):
            raise ValueError(f"{brief(given)}: expected a mapping with the fields {', '.join(_names(cls))}")
        _known("of a run", given, _names(cls))
        for name in ("tasks", "policies"):
            if not given.get(name):
                raise ValueError(f"{name} is missing: expected a list of at least one entry")
        values = {name: _read(name, value) for name, value in given.items() if value is not None}
        grid = cls(**values)
        if grid.refill and not grid.ends:
            raise ValueError("refill: true with ends: false: expected one of them, because answers then end together")
        if grid.budgets and not any(line.has_budget and line.budgets is None for line in grid.policies):
            accepted = "expected one such as snapkv:budget={budget}"
            raise ValueError(f"budgets: {brief(given['budgets'])}: no policy takes them; {accepted}")
        parse_sampler(grid.sampler)
        for cell in grid.cells():
            try:
                cell.build()
            except ValueError as error:
                raise ValueError(f"policies: {cell.label}: {error}") from None
        return grid

    def cells(self) -> tuple[Cell, ...]:
        """Every policy at every budget in every setting, in this order.

        Raises ValueError if a policy lacks a budget or if a cell occurs twice.
        """
        cells = []
        for line in self.policies:
            budgets: Sequence[Budget | None] = [None]
            if line.has_budget:
                budgets = self.budgets if line.budgets is None else line.budgets
            if not budgets:
                raise ValueError(
                    f"{shown(line.text)} without budgets: expected budgets, a list of shares or numbers of entries"
                )
            given = line.policy if isinstance(line.policy, Policy) else None
            for budget in budgets:
                text = line.filled(budget)
                cells += [Cell(line.label, budget, setting, text, given) for setting in self.question]
        keys = [(cell.label, cell.budget, cell.question) for cell in cells]
        if twice := sorted({str(key) for key in keys if keys.count(key) > 1}):
            raise ValueError(f"{', '.join(twice)}: the policy and budget occur twice; expected different names")
        return tuple(cells)

    def limited(self, limit: int) -> Grid:
        """The same grid with at most `limit` examples per task and length."""
        tasks = (replace(line, limit=None if line.limit is None else min(line.limit, limit)) for line in self.tasks)
        return replace(self.but(limit=limit), tasks=tuple(tasks))

    def document(self) -> dict[str, Any]:
        """The grid as a JSON object."""
        lines = {name: [line.document() for line in getattr(self, name)] for name in ("tasks", "policies")}
        return asdict(replace(self, tasks=(), policies=())) | lines

    def with_files(self, files: Sequence[str], scorer: str | None = None) -> Grid:
        """The same grid with files of questions. Those that it has already keep their options, but for the scorer."""
        known = [line.file for line in self.tasks]
        new = [{"file": file, "scorer": scorer} for file in dict.fromkeys(files) if file not in known]
        scorer = None if scorer is None else _read("scorer", scorer)
        lines = [replace(line, scorer=scorer or line.scorer) if line.file in files else line for line in self.tasks]
        return replace(self, tasks=(*lines, *_read("tasks", new)))

    def but(self, **changes: Any) -> Grid:
        """The same grid with the `changes` that are not None, given as YAML values."""
        return replace(self, **{name: _read(name, value) for name, value in changes.items() if value is not None})


def _names(kind: type) -> list[str]:
    return [f.name for f in fields(kind)]


def _known(what: str, given: Mapping[str, Any], names: Sequence[str]) -> None:
    if unknown := [str(name) for name in given if name not in names]:
        near = did_you_mean(unknown[0], names)
        raise ValueError(f"{', '.join(unknown)}: unknown field {what}; expected {', '.join(names)}{near}")


def _line(kind: type, first: str, names: Sequence[str], given: Any) -> Any:
    """An entry of a list, from a mapping of its fields, one of which is the `first` one."""
    if not isinstance(given, dict) or first not in given:
        raise ValueError(f"{brief(given)}: expected a string, or a mapping with the fields {', '.join(names)}")
    _known(f"of the entry with {first}: {brief(given[first])}", given, names)
    return kind(**{name: _read(name, value) for name, value in given.items() if value is not None})


def _task(given: Any) -> TaskLine:
    """An entry of `tasks`: a name, pattern or file, a mapping of its fields, or the entry itself."""
    if isinstance(given, TaskLine):
        return given
    if isinstance(given, str):
        given = {"file" if given.endswith(LINES) else "name": given}
    if isinstance(given, dict) and "file" in given:
        return _line(TaskLine, "file", ("file", "scorer", "max_new_tokens", "limit"), given)
    return _line(TaskLine, "name", ("name", "lengths", "limit"), given)


def _policy(given: Any) -> PolicyLine:
    """An entry of `policies`: a text or a policy, or a mapping of its fields."""
    given = {"policy": given} if isinstance(given, str | Policy) else given
    line = _line(PolicyLine, "policy", _names(PolicyLine), given)
    for name, used, needed in (
        ("budgets", line.has_budget, "{budget}, {removed} or {entries}"),
        ("tokens", "{entries}" in line.text, "{entries}"),
    ):
        if getattr(line, name) is not None and not used:
            raise ValueError(f"{name}: {brief(given[name])} of {shown(line.text)}: expected {needed} in the policy")
    return line


def _several(given: Any) -> list[Any]:
    return list(given) if isinstance(given, list | tuple) else [given]


def _whole(given: Any, least: int = 1, most: int = 2**31 - 1) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or given < least:
        raise ValueError(f"{brief(given)}: expected an integer >= {least}")
    if given > most:
        raise ValueError(f"{brief(given)}: expected an integer <= {most:,}")
    return given


def _budget(given: Any) -> Budget:
    if isinstance(given, float) and 0 < given <= 1:
        return given
    if isinstance(given, int) and not isinstance(given, bool) and 1 <= given <= TOKENS:
        return given
    accepted = f"a share of the prompt in (0, 1], such as 0.5, or a number of entries from 1 to {TOKENS:,}"
    raise ValueError(f"{brief(given)}: expected {accepted}")


def _setting(given: Any) -> tuple[Setting, ...]:
    asked: tuple[Setting, ...] = SETTINGS if given == "both" else tuple(_several(given))
    if not asked or not all(one in SETTINGS for one in asked):
        raise ValueError(f"{brief(given)}: expected after, before or both")
    return asked


def _of(kind: type | tuple[type, ...], accepted: str, given: Any) -> Any:
    if not isinstance(given, kind):
        raise ValueError(f"{brief(given)}: expected {accepted}")
    return given


def _mesh(given: Any) -> tuple[int, int]:
    if not isinstance(given, list | tuple) or len(given) != 2:
        raise ValueError(f"{brief(given)}: expected two integers >= 1, data and model, such as [2, 4]")
    return _whole(given[0]), _whole(given[1])


def _judge(given: Any) -> Mapping[str, Any]:
    if not isinstance(given, dict) or not {"url", "model"} <= set(given) <= set(_names(Endpoint)):
        raise ValueError(
            f"{brief(given)}: expected a mapping with url and model; all fields are {', '.join(_names(Endpoint))}"
        )
    for name, value in given.items():
        if name in ("url", "model"):
            _read(name, value)
        elif name in ("max_tokens", "tries"):
            _read(name, value, _whole)
        elif not is_number(value) or value < 0:
            raise ValueError(f"{name}: {brief(value)}: expected a number >= 0")
    return given


def _size(given: Any) -> float:
    if not is_number(given) or given <= 0:
        raise ValueError(f"{brief(given)}: expected a number > 0")
    return float(given)


_text = partial(_of, str, "a string")
_READERS: dict[str, Callable[[Any], Any]] = {
    "tasks": lambda given: tuple(map(_task, _several(given))),
    "policies": lambda given: tuple(map(_policy, _several(given))),
    "policy": partial(_of, (str, Policy), "a string"),
    "scorer": lambda given: scorer(_text(given)).name,
    "gates": lambda given: tuple(map(_text, _several(given))),
    "budgets": lambda given: tuple(map(_budget, _several(given))),
    "lengths": lambda given: tuple(_whole(length, most=TOKENS) for length in _several(given)),
    "question": _setting,
    "seed": lambda given: _whole(given, least=0),
    **dict.fromkeys(("chat", "ends", "refill"), partial(_of, bool, "true or false")),
    "judge": _judge,
    "mesh": _mesh,
    "memory_gb": _size,
    **{name: partial(_whole, most=most) for name, most in MOST.items()},
}


def _read(name: str, given: Any, reader: Callable[[Any], Any] | None = None) -> Any:
    """Checks and converts the value of a field. Raises ValueError, which names the field."""
    try:
        return (reader or _READERS.get(name, _text))(given)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
