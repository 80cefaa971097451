"""DefensiveKV (Feng et al., arXiv 2510.13334): scores entries by the worst case of a window's attention.

It is CriticalKV over AdaKV with another aggregation, and Layer-DefensiveKV lets all layers compete. The equations are
those of the released code (FFY0/DefensiveKV); they were not compared with the paper's text.

Differences from the released code:

- The maximum over the window's rows is pooled. The released code pools the weights of each query head and window row,
  and rescales each row to its sum before the maximum.
- A head's first stage fills the share `first` of its entries by the worst case without its floor, as `criticalkv` does.
  The released code fills it until its entries have 0.9 of the mean attention, less what the `window` tokens before the
  window receive, and these entries win every competition between heads. Here all entries older than the window compete.
- The norm of an entry is divided by the mean norm of its head. The released code divides it by the sum of the norms
  that the same token has in all kv heads of the layer, so that with one kv head norms change nothing.
- Entries are stored per kv head, as in the released code. A layer, or all layers together, retain their exact total.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.cache import Slots, mark
from kvjax.pallas_kernels import Reduction, top_tokens
from kvjax.policy import Moment, Policy, Protect, check_choice

from .common.levels import budget_of_level
from .common.pooling import Pooling
from .common.window_attention import WindowAttention
from .criticalkv import ProjectedValues
from .registry import preset


@dataclass(frozen=True)
class DefendedValues(ProjectedValues):
    """The base's score, at least its mean, times the L1 norm of the projected value over the mean norm of the head.

    Means are over the entries that are not protected. Once a head's number of entries is known, the base's score alone
    fills a first share of them. While heads compete for it, all their entries do so by the product.

    Attributes:
        base, first: see `ProjectedValues`.
        epsilon: added to the floored score, >= 0.
    """

    epsilon: float = 0.0

    def __call__(self, entries: Slots, moment: Moment) -> Float[Array, "B H M"]:
        risk, held = self.base(entries, moment), entries.positions >= 0
        judged = held if moment.protected is None else held & ~moment.protected

        def mean(x: Float[Array, "B H M"]) -> Float[Array, "B H 1"]:
            count = jnp.maximum(jnp.sum(judged, axis=-1, keepdims=True), 1)
            return jnp.sum(jnp.where(judged, x, 0), axis=-1, keepdims=True) / count

        norms = self._norms(entries.values, moment)
        weighed = (jnp.maximum(risk, mean(risk)) + self.epsilon) * norms / jnp.maximum(mean(norms), 1e-30)
        if moment.counts is None:
            return weighed
        number = self._first(moment.counts - moment.leaving)
        ranked = jnp.where(held, jnp.where(judged, risk, jnp.inf), -jnp.inf)
        chosen = top_tokens(ranked, entries.positions, number, size=entries.slots)
        above = jnp.max(jnp.where(held, weighed, 0), axis=-1, keepdims=True) + 1
        return jnp.where(mark(chosen, entries.slots), weighed + above, weighed)


@preset
def defensivekv(
    budget: int | float = 1024,
    window: int = 32,
    kernel: int = 5,
    pool: Literal["max", "avg", "none"] = "avg",
    level: Literal["layer", "global"] = "layer",
    first: float = 0.5,
    groups: int = 1,
) -> Policy:
    """Compresses the prompt by the largest weight of any of the last `window` queries on an entry.

    With r[h, c] = pool over c (max over the query group of h and window queries q of softmax(q . k)_c), the worst case,

        R[h, c] = max(r[h, c], mean over c of r[h, c])
        score[h, c] = R[h, c] * |W_O v_c|_1 / mean over c of |W_O v_c|_1

    Means are over the entries older than the window, and norms are means over the query group. The kv heads of a layer,
    or of all layers, compete by these scores. Each head fills the share `first` of what it wins by r, and the rest by
    the score.

    Args:
        budget: entries of the mean kv head, window included. An integer >= 1, or a float in (0, 1] for that share of
            each row's prompt.
        window: the size of the observation window in tokens (the paper's m). It is always retained.
        kernel: the size of the pooling along the prompt, odd.
        pool: "avg" (as released), "max" or "none".
        level: "layer" is DefensiveKV, where each layer retains its own total. "global" is Layer-DefensiveKV, where all
            layers share one total, and the prompt's complete cache exists until it is divided.
        first: the share of a head's entries, in [0, 1), that the worst case fills alone, window included.
        groups: the number of groups of consecutive kv heads that compete among themselves. On a mesh that divides kv
            heads over D devices it must be a multiple of D; one device with that number of groups retains the same.

    Raises:
        ValueError: for a value that is not accepted, or an integer budget smaller than `window` + 1.
    """
    check_choice("pool", pool, "max", "avg", "none")
    check_choice("level", level, "layer", "global")
    pooling = None if pool == "none" else Pooling(pool, kernel)
    return Policy(
        score=DefendedValues(WindowAttention(window, Reduction(rows="max", group="max"), pooling), first),
        budget=budget_of_level(budget, level, groups),
        protect=Protect(recent=window),
    )
