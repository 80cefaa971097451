"""The score that a network reads from the hidden state of a token when the token enters, and its policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.cache import Slots
from kvjax.gates.forms import FORMS
from kvjax.methods.adakv import AdaptiveShares
from kvjax.policy import Attended, Budget, LayerShape, Moment, Needs, Policy, Protect, Score, check_choice

from .budgets import budget_of
from .shares import GlobalShares


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
        return jnp.zeros((shape.batch, shape.kv_heads, shape.slots), jnp.float32), None

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
    check_choice("level", level, "global", "layer", "head")
    if groups != 1 and level == "head":
        raise ValueError(f"groups={groups} with level='head', where no heads compete: expected groups=1")
    entries: Budget = budget_of(budget)
    if level == "global":
        entries = GlobalShares(entries, groups)
    elif level == "layer":
        entries = AdaptiveShares(entries, alpha=0.0, normalise=False, groups=groups)
    return Policy(score=LearnedScore(gates), budget=entries, protect=protect, every=every)
