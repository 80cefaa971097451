"""DuoAttention (Xiao et al., arXiv 2410.10819): retains everything in retrieval heads, a window in streaming heads.

Differences from the paper:

- Streaming heads evict while decoding, and a query counts among its recent tokens. With `every=None`, as in kvpress,
  generated tokens are added in all heads.
- Streaming heads store exactly their sinks and recent tokens, and full heads are not put first: a pool of segments
  stores heads of different lengths as they are.
- Gates are ranked instead of compared with a quantile, so that ties need no noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.cache import UNLIMITED
from kvjax.checks import shown
from kvjax.mesh.heads import Heads
from kvjax.policy import AllocatedBudget, Layout, Policy, Protect, check_integer, ratio_of

from .common.allocation import check_mean, check_share
from .common.budgets import Fixed
from .common.by_position import Recency
from .common.head_numbers import HeadNumbers, check_groups, check_shape, head_numbers
from .registry import preset


@dataclass(frozen=True)
class GatedShares(AllocatedBudget):
    """Full heads retain everything and grow, also under a policy that evicts while decoding; the others have a budget.

    Shapes follow from the gates and the prompt's padded size. Each lane of the pool is as large as the largest, so that
    the groups with fewer full heads hold empty rows. On a mesh nothing is communicated.

    Attributes:
        budget: entries of a head that is not full, the same for all layers.
        full: whether each kv head is full, by layer.
        groups: the number of lanes of consecutive kv heads. The number of devices that kv heads are divided over must
            divide it.

    Raises:
        ValueError: for a value that is not accepted.
    """

    full: tuple[tuple[bool, ...], ...]
    groups: int = 1

    def __post_init__(self) -> None:
        check_integer("groups", self.groups, least=1)
        check_mean(self.budget)
        layers = self.full if isinstance(self.full, tuple) else ()
        sizes = {len(layer) if isinstance(layer, tuple) else 0 for layer in layers}
        if len(sizes) != 1 or 0 in sizes:
            raise ValueError(f"full={shown(self.full)}: expected a tuple per layer of equally many truth values")
        check_groups(self.groups, len(self.full[0]))

    @property
    def layout(self) -> Layout:
        return Layout(groups=self.groups, growing=int(max(np.sum(self._by_group, axis=(0, 2)))))

    def check_model(self, layers: int, kv_heads: int) -> None:
        expected = "gates that were trained on this model, see kvjax train-gates"
        check_shape("gates", self.full, layers, kv_heads, expected)

    def entries(self, means: Sequence[int], sizes: Sequence[int], heads: int) -> int:
        full = np.sum(self._by_group, axis=2)
        lanes = np.array(sizes)[:, None] * full + np.array(means)[:, None] * (heads - full)
        return int(max(np.sum(lanes, axis=0)))

    def allocate(
        self, scores: Float[Array, "L B H M"], means: Int[Array, "L B"], least: int, heads: Heads
    ) -> Int[Array, "L B H"]:
        own = jnp.array(self.full)[:, None, heads.kv_indices(scores.shape[2])]
        return jnp.where(own, UNLIMITED, means[..., None])

    @property
    def _by_group(self) -> np.ndarray:
        """Tells whether heads are full, [L, groups, heads of a group]."""
        return np.array(self.full).reshape(len(self.full), self.groups, -1)


def full_heads(gates: HeadNumbers, sparsity: float, groups: int) -> tuple[tuple[bool, ...], ...]:
    """Returns whether each kv head is full, by layer: in each group of consecutive heads, the share `sparsity` is not.

    The heads with the smallest gates of all layers stream. Of equal gates the earlier layer's and head's is the
    smaller.
    """
    values = np.asarray(gates, float)
    layers, heads = values.shape
    check_groups(groups, heads)
    by_group = np.moveaxis(values.reshape(layers, groups, -1), 1, 0).reshape(groups, -1)
    rank = np.argsort(np.argsort(by_group, axis=1, kind="stable"), axis=1)
    full = rank >= round(by_group.shape[1] * ratio_of(sparsity))
    full = np.moveaxis(full.reshape(groups, layers, -1), 0, 1).reshape(layers, heads)
    return tuple(map(tuple, full.tolist()))


@preset
def duo_attention(
    gates: str | HeadNumbers = "demo",
    sparsity: float = 0.5,
    sinks: int = 128,
    recent: int = 256,
    every: int | None = 1,
    groups: int = 1,
) -> Policy:
    """Retains everything in retrieval heads, and the first tokens and the most recent ones in streaming heads.

        streaming heads: the round(sparsity * n) smallest gates of the n heads of all layers
        a streaming head retains its first `sinks` and its newest `recent` tokens

    The model decides which kv head is which, not the prompt: a gate for each kv head was trained to measure how much
    the model's answers need its complete attention (section 2.2).

    Args:
        gates: a folder that `kvjax train-gates --method duo_attention` wrote, a file (.json or .npz with rows under
            "gates", .tsv as the authors released), a tuple of numbers per layer, or "demo" for the model that comes
            with kvjax. Gates for another number of layers or kv heads than the model has are refused when a cache is
            made; another model of the same sizes is not noticed.
        sparsity: the share of all kv heads that stream, from 0 to 1 (the paper: 0.5 for models with query groups, 0.75
            without).
        sinks: the number of first tokens, which are always retained.
        recent: the number of most recent tokens that a streaming head retains, among which a query counts itself.
        every: the number of tokens that a streaming head evicts at a time while decoding; None compresses the prompt
            only.
        groups: the number of groups of consecutive kv heads. The share `sparsity` streams in each, so that groups hold
            equally much. On a mesh that divides kv heads over D devices it must be a multiple of D.

    Raises:
        ValueError: for a value or a file that is not accepted.
    """
    check_integer("sinks", sinks, least=0)
    check_integer("recent", recent, least=1)
    check_integer("groups", groups, least=1)
    check_share("sparsity", sparsity)
    full = full_heads(head_numbers("gates", gates), sparsity, groups)
    return Policy(
        score=Recency(),
        budget=GatedShares(Fixed(sinks + recent), full, groups),
        protect=Protect(sinks=sinks),
        every=every,
    )
