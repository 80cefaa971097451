"""LU-KV (Tang et al., arXiv 2602.08585; kvpress's LUKVPress): divides a budget among heads by a measured curve.

Differences from kvpress:

- The curve decides in which proportions heads share the budget, and each row's total is exactly that of its mean head.
  kvpress rounds the total of each layer, and its budget is that of the nearest whole per cent.
- Protected tokens stay in all heads, also if a head has fewer entries than they are.
- Heads store what they retain. kvpress masks the rest.
- Measuring a curve is no part of kvjax; the authors' files are read. Without a file, the demo model's DuoAttention
  gates serve as shares.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.checks import path_of, shown
from kvjax.mesh.heads import Heads
from kvjax.policy import AllocatedBudget, Layout, Policy, check_integer, check_kind

from .common.allocation import check_mean, scaled
from .common.budgets import budget_of
from .common.head_numbers import HeadNumbers, apportioned, check_proportions, check_shape, head_numbers, proportions
from .common.refusals import check_plain_budget
from .expected_attention import expected_attention
from .registry import preset

EXPECTED = expected_attention(epsilon=0.02)
STEPS = 99  # a curve has the ratios 1 % to 99 %


@dataclass(frozen=True)
class HeadShares(AllocatedBudget):
    """Each head has entries in proportion to its share, protected ones included.

    A head whose share is less than its protected entries has these, and the others of its group have less, in
    proportion to what they have beyond theirs. A share beyond the prompt is not used. A prompt within the budget is
    retained in full. On a mesh nothing is communicated.

    Attributes:
        budget: entries of the mean head, the same for all layers.
        shares: of each kv head, by layer, at least 0. Their scale does not matter.
        groups: the number of lanes of consecutive kv heads, each of which shares its own total. The number of devices
            that kv heads are divided over must divide it.

    Raises:
        ValueError: for a value that is not accepted, or a budget that is not the same for all layers.
    """

    shares: HeadNumbers
    groups: int = 1

    def __post_init__(self) -> None:
        check_mean(self.budget)
        check_integer("groups", self.groups, least=1)
        check_proportions("shares", self.shares, self.groups)

    @property
    def layout(self) -> Layout:
        return Layout(groups=self.groups)

    def check_model(self, layers: int, kv_heads: int) -> None:
        check_shape("curve", self.shares, layers, kv_heads, "a curve that was measured on this model")

    def allocate(
        self, scores: Float[Array, "L B H M"], means: Int[Array, "L B"], least: int, heads: Heads
    ) -> Int[Array, "L B H"]:
        _, _, H, M = scores.shape
        groups = self.groups // heads.kv_devices()
        held = jnp.sum(scores > -jnp.inf, axis=-1)
        floor = jnp.minimum(held, jnp.maximum(jnp.sum(jnp.isposinf(scores), axis=-1), least))
        shares = jnp.asarray(proportions(self.shares, self.groups), jnp.float32)[:, heads.kv_indices(H)]
        totals = jnp.sum(means, axis=0) * (H // groups)
        counts = jnp.clip(apportioned(shares, totals, groups), floor, held)
        within = jnp.all(held <= means[..., None], axis=(0, 2))
        return jnp.where(within[:, None], M, _fitting(counts, floor, totals, groups))


def _fitting(
    counts: Int[Array, "L B H"], floor: Int[Array, "L B H"], totals: Int[Array, "B"], groups: int
) -> Int[Array, "L B H"]:
    """Returns the counts, less what exceeds a group's total, in proportion to what each head has beyond its floor."""
    L, B, H = counts.shape

    def by_group(x: Int[Array, "L B H"]) -> Int[Array, "B groups X"]:
        return jnp.moveaxis(x.reshape(L, B, groups, H // groups), 0, 2).reshape(B, groups, -1)

    given, beyond = by_group(counts), by_group(counts - floor)
    over = jnp.maximum(jnp.sum(given, axis=-1, keepdims=True) - totals[:, None, None], 0)
    running = jnp.cumsum(beyond, axis=-1)
    taken = jnp.diff(scaled(over, running, running[..., -1:]), axis=-1, prepend=0)
    return jnp.moveaxis((given - taken).reshape(B, groups, L, -1), 2, 0).reshape(L, B, H)


def read_curve(path: str, budget: int | float) -> HeadNumbers:
    """Returns the share of the prompt that each kv head retains at a budget, from a file of compression ratios.

    Args:
        path: a .npy file [99, L, H]. Its r-th array has the ratios of layers and kv heads that leave r % of all
            entries out.
        budget: the share of all entries that is retained. The nearest per cent is read.

    Raises:
        ValueError: for a file that has no such numbers, or a budget that is no share.
    """
    if isinstance(budget, int):
        raise ValueError(
            f"budget={budget} with curve={shown(path)}: expected a float in (0, 1], since a curve is of shares"
        )
    try:
        with path_of("curve", path).open("rb") as file:
            ratios = np.asarray(np.lib.format.read_array(file, allow_pickle=False), float)
        if ratios.ndim != 3 or len(ratios) != STEPS or not ratios.size or not np.isfinite(ratios).all():
            raise ValueError(f"it has shape {ratios.shape}, or numbers that are not finite")
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(
            f"curve={shown(path)} cannot be read ({error}): expected a .npy file of finite numbers [{STEPS}, layers, "
            "kv heads]"
        ) from error
    step = min(max(round((1 - budget) * 100), 1), STEPS)
    retained = np.clip(1 - ratios[step - 1], 0, 1)
    return tuple(map(tuple, retained.tolist()))


@preset
def lukv(
    base: Policy = EXPECTED,
    curve: str | HeadNumbers = "demo",
    budget: int | float = 0.2,
    sinks: int = 4,
    recent: int = 1,
    groups: int = 1,
) -> Policy:
    """Gives each kv head the part of the budget that was found best for it on other texts, by the base's scores.

    With s[l, h] the share of the prompt that the curve leaves to head h of layer l at this budget, the head retains

        budget * s[l, h] / mean(s)

    entries with the highest scores, rounded by largest remainders. Decoding is the base's own: the answer is added, or
    each head evicts within its number. `lukv:base=snapkv,budget=0.3,curve=((0.6,0.2),(0.1,0.3))` retains 0.6, 0.2, 0.1
    and 0.3 of the prompt in the heads of two layers.

    Args:
        base: the policy that scores, selects and protects. Its budget, which is a number of entries or a share of the
            prompt, is not used. A curve is measured for one score; the default is that of the published curve.
        curve: a file (.npy) [99, layers, kv heads] of compression ratios, as the authors and kvpress have it; a tuple
            of shares >= 0 per layer, which is used at every budget; or "demo" for the model that comes with kvjax,
            whose DuoAttention gates serve as shares. A curve for another number of layers or kv heads than the model
            has is refused when a cache is made; another model of the same sizes is not noticed.
        budget: entries of the mean kv head, protected ones included. A float is a share of each row's prompt, as which
            a file needs it.
        sinks: the number of first tokens, which are always retained (kvpress: 4); more if the base protects more.
        recent: the number of most recent tokens, which are always retained (kvpress: 1); more if the base protects
            more. Of a base that protects a share of what each head retains, as `h2o` does, that share stays instead.
        groups: the number of groups of consecutive kv heads, each of which shares its own total. On a mesh that divides
            kv heads over D devices it must be a multiple of D.

    Raises:
        ValueError: for a value or a file that is not accepted, an integer budget smaller than the protected entries +
            1, and for a base whose heads must retain the same tokens or whose method is its budget.
    """
    check_kind("base", base, Policy)
    check_plain_budget(base)
    check_integer("sinks", sinks, least=0)
    check_integer("recent", recent, least=0)
    entries, own = budget_of(budget), base.protect
    from_file = isinstance(curve, str) and curve != "demo"
    shares = read_curve(str(curve), budget) if from_file else head_numbers("curve", curve)
    newest = own.recent if isinstance(own.recent, float) else max(recent, own.recent)
    protect = replace(own, sinks=max(sinks, own.sinks), recent=newest)
    return replace(base, budget=HeadShares(entries, shares, groups), protect=protect)
