"""The score that a network reads from the hidden state of a token when the token enters, and its policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.cache import Slots
from kvjax.gates.forms import FORMS
from kvjax.policy import Attended, LayerShape, Moment, Needs, Policy, Protect, Score, check_choice

from .levels import budget_of_level


@dataclass(frozen=True)
class LearnedScore(Score):
    """The output of networks beside the parameters (`kvjax.with_gates`) for an entry's hidden state.

    A score is computed once, when the token enters, and kept with the entry. On a mesh nothing is communicated: each
    device has the networks of all kv heads, and keeps the scores of its own.

    Attributes:
        gates: the name of the networks.
    """

    gates: str

    def __post_init__(self) -> None:
        check_choice("gates", self.gates, *(name for name, form in FORMS.items() if form.score is not None))

    @property
    def needs(self) -> Needs:
        marks = frozenset({"signed"}) if FORMS[self.gates].signed else frozenset[str]()
        return Needs(hidden="normed", gates=self.gates, slotwise=True, marks=marks)

    def init(self, shape: LayerShape) -> tuple[Float[Array, "B H S"], None]:
        return shape.per_slot(), None

    def observe(self, entries: Slots, attended: Attended) -> tuple[Any, None]:
        assert attended.layer.gates is not None
        assert attended.hidden is not None
        scores = attended.layer.gates[self.gates](attended.hidden)
        own = scores[:, attended.heads.kv_indices(entries.positions.shape[1])]
        if not attended.decoding:  # the tokens have entered in the last slots
            return jnp.concatenate([entries.per_slot[..., : -own.shape[2]], own], axis=-1), None
        entered = (entries.positions >= 0) & (entries.positions == attended.positions[:, None])
        return jnp.where(entered, own, entries.per_slot), None

    def __call__(self, entries: Slots, moment: Moment) -> Float[Array, "B H M"]:
        return entries.per_slot


def learned(
    gates: str,
    budget: int | float,
    protect: Protect,
    every: int | None,
    level: Literal["global", "layer", "head"],
    groups: int,
) -> Policy:
    """Returns the policy of a method whose networks have that name. The options are those of `kvzap`."""
    return Policy(
        score=LearnedScore(gates), budget=budget_of_level(budget, level, groups), protect=protect, every=every
    )
