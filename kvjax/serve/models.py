"""The models of a server: one checkpoint under one policy or several, by the names that requests have."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvjax.checks import shown
from kvjax.engine import Engine

from .errors import ApiError

NAME = r"[A-Za-z0-9_.-]{1,64}"


@dataclass(frozen=True)
class Model:
    """A model of a server: the checkpoint under one policy.

    Attributes:
        id: its name in answers, lists and metrics.
        policy: the policy as the page, `/v1/models` and `/stats` show it.
        engine: that answers.
        alias: another name in requests; None for none.
    """

    id: str
    policy: str
    engine: Engine = field(repr=False)
    alias: str | None = None

    def __post_init__(self) -> None:
        if self.engine.tokenizer is None:
            raise ValueError(
                "the engine has no tokenizer: expected Engine(..., tokenizer=...), because requests are text"
            )

    @property
    def names(self) -> list[str]:
        """The names that requests may have."""
        return [self.id] if self.alias is None else [self.id, self.alias]

    def document(self, created: int) -> dict[str, Any]:
        """The model in OpenAI's form, and its policy.

        Args:
            created: the time of the server's start in seconds since 1970.
        """
        return {"id": self.id, "object": "model", "created": created, "owned_by": "kvjax", "policy": self.policy}


class Models:
    """The models of a server, of which the first is the default."""

    def __init__(self, models: Sequence[Model]) -> None:
        """The models in the order of lists.

        Raises:
            ValueError: there is none, or two have the same name.
        """
        if not models:
            raise ValueError("there is no model: expected at least one")
        self._all = tuple(models)
        self._by_name: dict[str, Model] = {}
        for model in models:
            for name in model.names:
                if name in self._by_name:
                    raise ValueError(f"two models have the name {shown(name)}: expected other names")
                self._by_name[name] = model

    def __iter__(self) -> Iterator[Model]:
        return iter(self._all)

    @property
    def default(self) -> Model:
        """The model of requests that name none."""
        return self._all[0]

    def find(self, name: str) -> Model:
        """The model that a request names. Raises ApiError for a name that none has."""
        if name not in self._by_name:
            of = "the model" if len(self._all) == 1 else "the models"
            expected = " or ".join(map(repr, self._by_name))
            message = f"there is no model {shown(name)}: expected {expected}, {of} of this server"
            raise ApiError(404, message, "model", "model_not_found")
        return self._by_name[name]


def named_policies(texts: Sequence[str]) -> dict[str, str]:
    """Policies by name: each text is `NAME=POLICY`, or `POLICY`, whose name is that of its preset.

    Raises:
        ValueError: for a name that has other characters, or that two policies have.
    """
    found: dict[str, str] = {}
    for text in texts:
        stated, equals, policy = text.partition("=")
        if not equals or not re.fullmatch(r"[^:=()]*", stated):
            stated, policy = re.split(r"[:(]", text, maxsplit=1)[0].strip(), text
        if not re.fullmatch(NAME, stated):
            raise ValueError(
                f"the policy {shown(text)} has the name {shown(stated)}: expected at most 64 letters, digits, dots, "
                "dashes and underscores, or NAME= before it"
            )
        if stated in found:
            raise ValueError(
                f"the policies {shown(found[stated])} and {shown(policy)} have the name {stated}: expected another "
                f"for one of them, as in --policy {stated}2={policy}"
            )
        found[stated] = policy
    return found


def models_of(name: str, policies: Mapping[str, str], engines: Mapping[str, Engine]) -> Models:
    """The models of a checkpoint under one policy or several.

    Args:
        name: of the checkpoint. It alone names the first policy, and `name@POLICY` each of them. The id of the only one
            is `name`.
        policies: their texts by name.
        engines: those of the policies, by the same names.
    """
    full = [f"{name}@{policy}" for policy in policies]
    ids = full if len(full) > 1 else [name]
    aliases = [name if len(full) > 1 else full[0], *[None] * (len(full) - 1)]
    facts = zip(ids, policies.items(), aliases, strict=True)
    return Models([Model(id_, text, engines[policy], alias) for id_, (policy, text), alias in facts])
