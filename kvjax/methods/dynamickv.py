"""DynamicKV (Zhou et al., EMNLP 2025, arXiv 2412.14838): divides SnapKV's budget among layers by the prompt.

Differences from the paper and its code:

- Entries are stored per kv head, with scores reduced over the query group, and counts are those of kv heads. The
  released code stores entries per query head.
- Shares are exact proportions, and the largest remainders are rounded up, so that they add up. `code_rounding=True` is
  as released: it rounds down twice, and the last layer gets what is left over.
- A layer retains the least of its shares in all updates, down to its window. All updates are made after the last layer,
  which has the same result as the paper's progressive updates.
- The paper's normalisations of the counts cancel in Z, and are left out.
- The paper does not name a pooling. The released code pools by "avg" for Llama and InternLM and by "max" for Mistral
  and Qwen2.
- The paper states r_max = 10 for all models. The released script for Qwen2 comes to 5.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.mesh.heads import Heads
from kvjax.pallas_kernels import top_counts
from kvjax.policy import AllocatedBudget, Policy, check_integer, check_number, share_of

from .common.allocation import check_mean, scaled
from .common.budgets import budget_of
from .registry import preset
from .snapkv import snapkv


@dataclass(frozen=True)
class DynamicShares(AllocatedBudget):
    """Divides L * b entries among the layers read so far in proportion to their best scores, every few layers.

    Of the scores of n layers' H heads the b * H * n largest are counted, cnt_i of them layer i's, and layer i is given
    Z_i = b * L * cnt_i / sum(cnt), b being the layers' mean budget without the protected entries. A layer retains the
    least that it was ever given, and at most r_max * b, in each head (Algorithm 1). L * b is therefore an upper bound
    of what all layers retain together, and a layer may retain nothing but its protected entries. A prompt within the
    budget is retained in full.

    The scores of all layers are known at once here, so all updates are made at once, with the same result. On a mesh
    the scores of all heads are gathered once per prompt.

    Attributes:
        budget: entries of the mean layer, protected ones included, the same for all layers.
        interval: the number of layers between updates; the last update is at the last layer.
        r_max: no layer retains more than r_max * b unprotected entries; at least 1.
        code_rounding: whether Z is rounded down twice, and the last layer given the remainder, as in the released code;
            if not, it is rounded by largest remainders, so that the parts add up.

    Raises:
        ValueError: for a value that is not accepted, or a budget that is not the same for all layers.
    """

    interval: int = 4
    r_max: float = 10.0
    code_rounding: bool = False

    def __post_init__(self) -> None:
        check_integer("interval", self.interval, least=1)
        check_number("r_max", self.r_max, "a number >= 1", lambda x: x >= 1)
        check_mean(self.budget)

    def allocate(
        self, scores: Float[Array, "L B H M"], means: Int[Array, "L B"], least: int, heads: Heads
    ) -> Int[Array, "L B H"]:
        L, B, _, M = scores.shape
        protected = jnp.sum(jnp.isposinf(scores), axis=-1)
        most_protected = jnp.max(protected, axis=(0, 2))
        distant = jnp.where(jnp.isposinf(scores), -jnp.inf, scores)
        held = jnp.sum(distant > -jnp.inf, axis=-1)
        fits = jnp.all(held <= (means - most_protected)[..., None], axis=(0, 2))
        longest = jnp.max(held, axis=(0, 2))
        room = jnp.clip(jnp.sum(means, axis=0) // L - most_protected, 0, M)
        floor = jnp.clip(least - most_protected, 0, room)  # each layer's first entries, for which none competes
        base = room - floor
        r_max = min(self.r_max, M)  # beyond that it limits nothing, and products would exceed 32 bits
        cap = jnp.minimum(share_of(r_max, jnp.minimum(base, longest // int(r_max) + 1)), longest)
        of_all_heads = heads.whole_layer(jnp.moveaxis(distant, 0, 2))
        H = of_all_heads.shape[1]
        by_layer = jnp.moveaxis(of_all_heads, 2, 1).reshape(B, L, -1)
        retained = jnp.broadcast_to(cap[:, None], (B, L))
        for done in sorted({*range(self.interval, L, self.interval), L}):
            counts = top_counts(by_layer[:, :done], base * (H * done))
            given = _as_released(counts, base, cap, L, H) if self.code_rounding else _exactly(counts, L, H)
            retained = retained.at[:, :done].min(given)
        retained = jnp.where(fits[:, None], M, floor[:, None] + retained)
        return protected + jnp.minimum(held, retained.T[..., None])


def _exactly(counts: Int[Array, "B n"], layers: int, heads: int) -> Int[Array, "B n"]:
    """Divides b * layers entries in proportion to the counts, whose sum is b * heads * n, by largest remainders.

    Where the layers have fewer entries than that to count, all were counted, and each layer is given all that it has or
    more.
    """
    quotient, rest = jnp.divmod(counts * layers, heads * counts.shape[1])
    order = jnp.argsort(-rest, axis=-1, stable=True)
    left = jnp.sum(rest, axis=-1, keepdims=True) // (heads * counts.shape[1])
    return quotient + (jnp.argsort(order, axis=-1) < left)


def _as_released(
    counts: Int[Array, "B n"], base: Int[Array, "B"], cap: Int[Array, "B"], layers: int, heads: int
) -> Int[Array, "B n"]:
    """Returns the same for b = `base` as released: counts by layer, and then shares of the cap, are rounded down."""
    n = counts.shape[1]
    counts = counts // n
    if n == layers:
        counts = counts.at[:, -1].add(base * heads - jnp.sum(counts, axis=-1))
    shares = scaled(cap[:, None], counts, jnp.sum(counts, axis=-1, keepdims=True))
    given = scaled(shares, (base * layers)[:, None], jnp.sum(shares, axis=-1, keepdims=True))
    return given.at[:, -1].add(base * layers - jnp.sum(given, axis=-1))


@preset
def dynamickv(
    budget: int | float = 1024,
    window: int = 8,
    kernel: int = 7,
    pool: Literal["max", "avg", "none"] = "avg",
    group: Literal["mean", "max"] = "mean",
    interval: int = 4,
    r_max: float = 10.0,
    code_rounding: bool = False,
) -> Policy:
    """Compresses the prompt once by SnapKV's scores; layers with more of the best scores retain more entries.

    With b = budget - window: after every m layers the b * H * n best scores of the n layers so far are counted. With
    cnt_i of them in layer i,

        Z_i = b * L * cnt_i / sum(cnt)
        entries of layer i = min(r_max * b, Z_i of every update) + window, in every head

    This is Algorithm 1. The answer is added to the retained entries.

    Args:
        budget: entries of the mean layer per kv head, window included (the paper's wt). A float is a share of each
            row's prompt. Layers may retain fewer together, never more.
        window: ws, the number of most recent tokens whose queries score, and which are always retained.
        kernel: the odd size of the pooling along the prompt, in tokens.
        pool: "avg" (released for Llama and InternLM), "max" (for Mistral and Qwen2) or "none".
        group: how scores are reduced over the query heads of a kv head, before pooling; the released code stores each
            query head's own.
        interval: m, the number of layers between updates.
        r_max: no layer retains more than r_max * b and the window. The released script for Qwen2 comes to 5.
        code_rounding: whether to round as released, which adds up to less; if not, by largest remainders.

    Raises:
        ValueError: for a value that is not accepted, or a budget of no more than the window.
    """
    policy = snapkv(budget, window=window, kernel=kernel, pool=pool, group=group)
    return replace(policy, budget=DynamicShares(budget_of(budget), interval, r_max, code_rounding))
