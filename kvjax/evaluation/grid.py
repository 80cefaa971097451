"""A run as data: the model, the tasks, policies x budgets and how they are asked. Read from YAML, checked at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import yaml

from kvjax.evaluation.judge import Endpoint
from kvjax.sampling import parse as parse_sampler

Budget: TypeAlias = int | float
Setting = Literal["after", "before"]
"""Where the question comes: after the context is compressed, or before, so that a policy sees it while it does that."""

SETTINGS = get_args(Setting)
PLACEHOLDERS = ("{budget}", "{removed}", "{entries}")


@dataclass(frozen=True)
class TaskLine:
    """Tasks by name or pattern.

    Attributes:
        lengths: of generated prompts, in tokens; empty for the tasks' own, and for tasks that are read from files.
        limit: examples of each task and length at most; the grid's by default.
    """

    name: str
    lengths: tuple[int, ...] = ()
    limit: int | None = None


@dataclass(frozen=True)
class PolicyLine:
    """A policy as text, with {budget} where its budget stands.

    {removed} is the share that is not kept, and {entries} a share in entries, for policies that take nothing else.

    Attributes:
        name: what tables call it; the text without its budget by default.
        budgets: its own in place of the grid's.
        tokens: of a prompt, that {entries} are a share of.
    """

    policy: str
    name: str | None = None
    budgets: tuple[Budget, ...] | None = None
    tokens: int | None = None

    @property
    def label(self) -> str:
        """The name, or the text without its budget."""
        if self.name:
            return self.name
        preset, _, options = self.policy.partition(":")
        rest = [option for option in options.split(",") if not any(mark in option for mark in PLACEHOLDERS)]
        return ":".join([preset, ",".join(rest)]).rstrip(":")

    def filled(self, budget: Budget | None) -> str:
        """The text at a budget. Raises ValueError where a share is needed, or the tokens that it is of."""
        text = self.policy
        if budget is None:
            return text
        shares = [placeholder for placeholder in PLACEHOLDERS[1:] if placeholder in text]
        if shares and isinstance(budget, int):
            raise ValueError(f"{text!r} takes a share of the prompt; budget {budget} is a number of entries")
        if "{entries}" in shares and self.tokens is None:
            raise ValueError(f"{text!r} needs tokens, the length of a prompt that {{entries}} are a share of")
        text = text.replace("{budget}", repr(budget)).replace("{removed}", repr(round(1 - budget, 6)))
        return text.replace("{entries}", str(int(budget * (self.tokens or 0))))


@dataclass(frozen=True)
class Cell:
    """One policy at one budget in one setting: what a batch of questions is answered under.

    Attributes:
        budget: a share of the prompt or a number of entries, None where the policy has no placeholder.
        policy: the text that is parsed.
    """

    label: str
    budget: Budget | None
    question: Setting
    policy: str


@dataclass(frozen=True)
class Grid:
    """A run.

    Attributes:
        title: what it reproduces.
        model: a folder, the name of a repository on the hub, or "demo" for the one that ships.
        dtype: of the weights, and of the cache; by default what they are stored in.
        data: the folder of real data; None for the hub.
        tasks: asked under every policy.
        policies: each at every budget, if its text has a placeholder.
        budgets: floats are shares of the prompt, integers entries a kv head.
        question: the settings that it runs.
        limit: examples of each task and length at most; all by default.
        new_tokens: tokens of an answer at most, in place of the tasks' own.
        max_length: tokens of a prompt at most, where the model allows more.
        sampler: greedy, or settings such as temperature=0.7.
        seed: of generated tasks and of sampling.
        mesh: a host's devices, data x model.
        batch: prompts at a time.
        memory_gb: what the caches of a batch may take; batches are smaller where `batch` prompts would take more.
        chunk: read prompts so many tokens at a time.
        ends: whether answers stop at an end token; otherwise all are as long as they may be.
        judge: the model that marks what only a model can: the options of `judge.Endpoint`, its url and model at least.
        chat: whether prompts get the checkpoint's chat template, where the benchmark has one.
    """

    tasks: tuple[TaskLine, ...]
    policies: tuple[PolicyLine, ...]
    title: str = ""
    model: str = "demo"
    dtype: str | None = None
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
    memory_gb: float | None = None
    chunk: int | None = None
    chat: bool = False
    ends: bool = True
    judge: Mapping[str, Any] | None = None

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Grid:
        """The grid in a YAML file. Raises ValueError, naming the file and what is wrong with it."""
        try:
            given = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not YAML: {error}") from None
        try:
            return cls.of(given)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    @classmethod
    def of(cls, given: Any) -> Grid:
        """The grid that a mapping describes, as YAML has it. Raises ValueError for what is missing or not accepted."""
        if not isinstance(given, dict):
            raise ValueError(f"a run is a mapping of {', '.join(_names(cls))}; this is {given!r}")
        _known("a run", given, cls)
        for name in ("tasks", "policies"):
            if not given.get(name):
                raise ValueError(f"{name} is missing; accepted is a list of one or more")
        values = {name: _read(name, value) for name, value in given.items() if value is not None}
        grid = cls(**values)
        parse_sampler(grid.sampler)
        grid.cells()
        return grid

    def cells(self) -> tuple[Cell, ...]:
        """Every policy at every budget in every setting, in this order.

        Raises ValueError for a policy without a budget, or for the same cell twice.
        """
        cells = []
        for line in self.policies:
            free = any(placeholder in line.policy for placeholder in PLACEHOLDERS)
            budgets: Sequence[Budget | None] = [None]
            if free:
                budgets = self.budgets if line.budgets is None else line.budgets
            if not budgets:
                raise ValueError(f"{line.policy!r} needs budgets, a list of shares or entries; none are given")
            for budget in budgets:
                text = line.filled(budget)
                cells += [Cell(line.label, budget, setting, text) for setting in self.question]
        keys = [(cell.label, cell.budget, cell.question) for cell in cells]
        if twice := sorted({str(key) for key in keys if keys.count(key) > 1}):
            raise ValueError(f"the same policy and budget twice: {', '.join(twice)}; give one of them another name")
        return tuple(cells)

    def limited(self, limit: int) -> Grid:
        """The same grid, of whose tasks none has more examples."""
        tasks = (replace(line, limit=None if line.limit is None else min(line.limit, limit)) for line in self.tasks)
        return replace(self, limit=limit, tasks=tuple(tasks))

    def document(self) -> dict[str, Any]:
        """The grid as JSON has it."""
        return asdict(self)

    def but(self, **changes: Any) -> Grid:
        """The same grid with the changes that are not None, in the form that YAML has them."""
        return replace(self, **{name: _read(name, value) for name, value in changes.items() if value is not None})


def _names(kind: type) -> list[str]:
    return [f.name for f in fields(kind)]


def _known(what: str, given: Mapping[str, Any], kind: type) -> None:
    if unknown := [str(name) for name in given if name not in _names(kind)]:
        raise ValueError(f"{what} has no {', '.join(unknown)}; accepted are {', '.join(_names(kind))}")


def _line(kind: type, first: str, given: Any) -> Any:
    """An entry of a list: a text for its first field alone, or a mapping."""
    if isinstance(given, str):
        return kind(given)
    if not isinstance(given, dict) or first not in given:
        raise ValueError(f"{given!r}: accepted is a text, or a mapping with {', '.join(_names(kind))}")
    _known(f"an entry with {first}: {given[first]!r}", given, kind)
    return kind(**{name: _read(name, value) for name, value in given.items() if value is not None})


def _several(given: Any) -> list[Any]:
    return list(given) if isinstance(given, list | tuple) else [given]


def _whole(given: Any, least: int = 1) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or given < least:
        raise ValueError(f"{given!r}: accepted is an integer >= {least}")
    return given


def _budget(given: Any) -> Budget:
    if isinstance(given, float) and 0 < given <= 1:
        return given
    if isinstance(given, int) and not isinstance(given, bool) and given >= 1:
        return given
    raise ValueError(f"{given!r}: accepted is a share of the prompt in (0, 1], as 0.5, or a number of entries >= 1")


def _setting(given: Any) -> tuple[Setting, ...]:
    asked: tuple[Setting, ...] = SETTINGS if given == "both" else tuple(_several(given))
    if not asked or not set(asked) <= set(SETTINGS):
        raise ValueError(f"{given!r}: accepted are after, before and both")
    return asked


def _text(given: Any) -> str:
    if not isinstance(given, str):
        raise ValueError(f"{given!r}: accepted is a text")
    return given


def _flag(given: Any) -> bool:
    if not isinstance(given, bool):
        raise ValueError(f"{given!r}: accepted are true and false")
    return given


def _mesh(given: Any) -> tuple[int, int]:
    if not isinstance(given, list | tuple) or len(given) != 2:
        raise ValueError(f"{given!r}: accepted are two integers >= 1, data and model, as [2, 4]")
    return _whole(given[0]), _whole(given[1])


def _judge(given: Any) -> Mapping[str, Any]:
    if not isinstance(given, dict) or not {"url", "model"} <= set(given) <= set(_names(Endpoint)):
        raise ValueError(
            f"{given!r}: accepted is a mapping with url and model, and any of {', '.join(_names(Endpoint))}"
        )
    return given


def _size(given: Any) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float) or given <= 0:
        raise ValueError(f"{given!r}: accepted is a number above 0")
    return float(given)


_READERS: dict[str, Callable[[Any], Any]] = {
    "tasks": lambda given: tuple(_line(TaskLine, "name", line) for line in _several(given)),
    "policies": lambda given: tuple(_line(PolicyLine, "policy", line) for line in _several(given)),
    "budgets": lambda given: tuple(map(_budget, _several(given))),
    "lengths": lambda given: tuple(map(_whole, _several(given))),
    "question": _setting,
    "limit": _whole,
    "new_tokens": _whole,
    "max_length": _whole,
    "tokens": _whole,
    "batch": _whole,
    "chunk": _whole,
    "seed": lambda given: _whole(given, least=0),
    "chat": _flag,
    "ends": _flag,
    "judge": _judge,
    "mesh": _mesh,
    "memory_gb": _size,
}


def _read(name: str, given: Any) -> Any:
    """A field's value. Raises ValueError, naming the field."""
    try:
        return _READERS.get(name, _text)(given)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
