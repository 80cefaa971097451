"""The choice of experts by independent scores, of DeepSeek-V3 (arXiv 2412.19437, section 2.1.2) and GLM-4.5."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

JUDGES = 2  # the number of best experts that a group is judged by


@dataclass(frozen=True)
class SigmoidRouting:
    """Scores experts by the sigmoid of their logits, and chooses among those of a token's best groups.

    A bias, which training moves to balance the load, is added to the scores where experts and groups are chosen, and
    not where shares are computed. A group is as good as the sum of its two best scores.

    Attributes:
        groups: the number of groups of consecutive experts.
        groups_per_token: the number of groups that a token may choose from.
        scale: the factor of the shares.
    """

    groups: int = 1
    groups_per_token: int = 1
    scale: float = 1.0

    def __call__(
        self, logits: Float[Array, "... X"], per_token: int, normalized: bool, bias: Float[Array, "X"]
    ) -> tuple[Int[Array, "... K"], Float[Array, "... K"]]:
        """Returns the experts that each token takes, best first, and their shares, as `routed` does."""
        scores = jax.nn.sigmoid(logits)
        judged = scores + bias
        if self.groups_per_token < self.groups:
            judged = jnp.where(self._open(judged), judged, -jnp.inf)
        _, chosen = jax.lax.top_k(judged, per_token)
        shares = jnp.take_along_axis(scores, chosen, axis=-1)
        if normalized:
            shares /= jnp.sum(shares, axis=-1, keepdims=True) + 1e-20
        return chosen, shares * self.scale

    def _open(self, judged: Float[Array, "... X"]) -> Bool[Array, "... X"]:
        """Tells which experts are of groups that a token may choose from."""
        by_group = judged.reshape(*judged.shape[:-1], self.groups, -1)
        best, _ = jax.lax.top_k(by_group, JUDGES)
        _, taken = jax.lax.top_k(jnp.sum(best, axis=-1), self.groups_per_token)
        groups = jnp.any(jax.nn.one_hot(taken, self.groups, dtype=bool), axis=-2)
        return jnp.repeat(groups, by_group.shape[-1], axis=-1)
