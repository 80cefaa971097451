"""The entries of a grid: its tasks, its policies, and the cells that policies, budgets and settings make."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

from kvjax.checks import shown
from kvjax.evaluation.tasks.task import Task
from kvjax.policies import brief, parse
from kvjax.policy import Policy, share_of

Budget: TypeAlias = int | float
Setting = Literal["after", "before"]
"""When the question is read: after the context is compressed, or before, so that the policy sees it."""

SETTINGS = get_args(Setting)
PLACEHOLDERS = ("{budget}", "{removed}", "{entries}")
LINES = ".jsonl"  # the ending of a task's name that is a file of questions


@dataclass(frozen=True)
class TaskLine:
    """The tasks of a grid that match a name or pattern, those of a file of questions, or one task.

    Attributes:
        name: a task's name, or a pattern such as "ruler/*".
        lengths: lengths of generated prompts in tokens. Tasks that are read from files ignore them.
        limit: the largest number of examples per task and length; the grid's limit by default.
        file: a file of questions, as docs/guide/your_data.md describes it.
        scorer: how the answers to the questions of the file are marked, as `scorers.scorer` takes it.
        max_new_tokens: the largest number of tokens of an answer, for lines of the file that do not state it.
        task: the task itself.
    """

    name: str = ""
    lengths: tuple[int, ...] = ()
    limit: int | None = None
    file: str | None = None
    scorer: str = "f1"
    max_new_tokens: int = 64
    task: Task | None = None

    def document(self) -> dict[str, Any]:
        """The line as a JSON object."""
        if self.file is not None:
            return {name: getattr(self, name) for name in ("file", "scorer", "max_new_tokens", "limit")}
        name = self.name if self.task is None else self.task.name
        return {"name": name, "lengths": list(self.lengths), "limit": self.limit}


@dataclass(frozen=True)
class PolicyLine:
    """A policy, or its text with a placeholder for its budget.

    {budget} stands for the budget itself. {removed} stands for the share of entries that is dropped, and {entries} for
    a share converted to a number of entries; they serve policies whose options have only these forms.

    Attributes:
        policy: the policy or its text.
        name: the name of the policy in tables; the text without its budget by default.
        budgets: budgets that replace the grid's.
        tokens: the length of the prompt that {entries} is a share of.
    """

    policy: str | Policy
    name: str | None = None
    budgets: tuple[Budget, ...] | None = None
    tokens: int | None = None

    @property
    def text(self) -> str:
        """The policy as text."""
        if isinstance(self.policy, str):
            return self.policy
        return "full" if self.policy == parse("full") else repr(self.policy)

    @property
    def label(self) -> str:
        """The name, or the text without its budget."""
        if self.name:
            return self.name
        if isinstance(self.policy, Policy):
            return brief(self.policy)
        preset, _, options = self.policy.partition(":")
        rest = [option for option in options.split(",") if not any(mark in option for mark in PLACEHOLDERS)]
        return ":".join([preset, ",".join(rest)]).rstrip(":")

    @property
    def has_budget(self) -> bool:
        """Returns whether the text has a placeholder."""
        return isinstance(self.policy, str) and any(mark in self.policy for mark in PLACEHOLDERS)

    def filled(self, budget: Budget | None) -> str:
        """The text at a budget. Raises ValueError if a placeholder needs a share, or `tokens`, that is not given."""
        text = self.text
        if budget is None:
            return text
        shares = [placeholder for placeholder in PLACEHOLDERS[1:] if placeholder in text]
        if shares and isinstance(budget, int):
            raise ValueError(
                f"budget {budget} of {shown(text)}: expected a share of the prompt in (0, 1], because of {shares[0]}"
            )
        if "{entries}" in shares and self.tokens is None:
            raise ValueError(
                f"{shown(text)} without tokens: expected tokens, the length of the prompt that {{entries}} is a share "
                "of"
            )
        text = text.replace("{budget}", repr(budget)).replace("{removed}", repr(round(1 - budget, 6)))
        return text if self.tokens is None else text.replace("{entries}", str(share_of(budget, self.tokens)))

    def document(self) -> dict[str, Any]:
        """The line as a JSON object."""
        return asdict(replace(self, policy=self.text, name=self.name if isinstance(self.policy, str) else self.label))


@dataclass(frozen=True)
class Cell:
    """One policy at one budget in one setting.

    Attributes:
        label: the name of the policy in tables.
        budget: a share of the prompt or a number of entries; None if the policy has no placeholder.
        question: the setting.
        policy: the text of the policy with its budget filled in.
        given: the policy, if it was given as such; its text may then name parts that only the caller knows.
    """

    label: str
    budget: Budget | None
    question: Setting
    policy: str
    given: Policy | None = None

    def build(self) -> Policy:
        """The policy. Raises ValueError if its text describes none."""
        return parse(self.policy) if self.given is None else self.given
