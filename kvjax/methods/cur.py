"""CurDKV (Sengupta et al., arXiv 2509.15038): retains tokens with large keys and values, as kvpress's CURPress.

Differences from kvpress:

- Windows are counted in cached entries in order of position, so that a cache that is compressed again has windows of
  equal size.
- kvpress can also project keys and values at random before it computes norms. There is no such projection here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.cache import Slots
from kvjax.policy import Moment, Needs, Policy, Protect, Score, check_choice, check_integer

from .common.budgets import budget_of
from .registry import preset


@dataclass(frozen=True)
class SquaredNorms(Score):
    """The squared norm of a token's key or value as a share of its window, or both combined, as a share of the head.

    Attributes:
        kind: "product" or "mean" of the shares of key and value, or "key" or "value" alone.
        window: the number of neighbouring entries, in order of position, whose norms are made shares; None for all.
    """

    kind: Literal["product", "mean", "key", "value"] = "product"
    window: int | None = 16

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, "product", "mean", "key", "value")
        if self.window is not None:
            check_integer("window", self.window, least=1)

    @property
    def needs(self) -> Needs:
        return Needs(marks=frozenset({"weighs_values"}) if self.kind != "key" else frozenset())

    def __call__(self, entries: Slots, moment: Moment) -> Float[Array, "B H M"]:
        held = entries.positions >= 0
        shares = [
            self._shares(jnp.where(held, jnp.sum(x.astype(jnp.float32) ** 2, axis=-1), 0), entries)
            for x, kind in ((entries.keys, "value"), (entries.values, "key"))
            if self.kind != kind
        ]
        joint = shares[0] * shares[-1] if self.kind == "product" else sum(shares) / len(shares)
        return joint / jnp.maximum(jnp.sum(joint, axis=-1, keepdims=True), 1e-30)

    def _shares(self, norms: Float[Array, "B H M"], entries: Slots) -> Float[Array, "B H M"]:
        """Divides norms by the sum of their window."""
        if self.window is None:
            return norms
        last = jnp.iinfo(jnp.int32).max
        order = jnp.argsort(jnp.where(entries.positions < 0, last, entries.positions), axis=-1)
        *head, M = norms.shape
        window = min(self.window, M)
        windows = jnp.pad(jnp.take_along_axis(norms, order, axis=-1), ((0, 0), (0, 0), (0, -M % window)))
        windows = windows.reshape(*head, -1, window)
        shares = windows / jnp.maximum(jnp.sum(windows, axis=-1, keepdims=True), 1e-30)
        return jnp.take_along_axis(shares.reshape(*head, -1), jnp.argsort(order, axis=-1), axis=-1)


@preset
def cur(
    budget: int | float = 1024,
    kind: Literal["product", "mean", "key", "value"] = "product",
    window: int | None = 16,
    sinks: int = 4,
    every: int | None = None,
) -> Policy:
    """Retains the tokens whose keys and values are large beside those of their neighbours, without attention weights.

        score[h, c] = |k_c|^2 / (sum over the window of c of |k|^2) * |v_c|^2 / (sum over the window of c of |v|^2)

    Windows are runs of `window` tokens in order of position. The squared norms approximate leverage scores.

    Args:
        budget: the number of entries retained of the prompt, sinks included. An integer >= 1, or a float in (0, 1] for
            that share of each row's prompt.
        kind: "product" or "mean" of both factors, or the factor of the "key" or the "value" alone.
        window: the size of a window; None compares all tokens.
        sinks: the number of first tokens, which are always retained.
        every: the number of entries that a full head evicts at a time while decoding; the budget then bounds what a
            query sees. None compresses the prompt only.

    Raises:
        ValueError: for a value that is not accepted, or a budget smaller than sinks + `every`.
    """
    return Policy(
        score=SquaredNorms(kind, window),
        budget=budget_of(budget),
        protect=Protect(sinks=sinks),
        every=every,
    )
