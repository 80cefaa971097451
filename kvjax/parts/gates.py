"""DuoAttention's budgets: heads that keep everything and heads that keep a window, the same for every prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.heads import Heads
from kvjax.protocols import UNLIMITED, SharedBudget, check_integer

from .budget import Fixed

Gates = tuple[tuple[float, ...], ...]  # by layer and kv head


@dataclass(frozen=True)
class GatedShares(SharedBudget):
    """Full heads keep everything and grow, also under a policy that evicts while decoding; the others have a budget.

    Shapes follow from the gates and the prompt's padded size. Each lane of the pool is as large as the largest, so with
    groups of which one has more full heads the others hold empty rows. On a mesh nothing is communicated.

    Attributes:
        budget: entries of a head that is not full.
        full: whether each kv head is, by layer.
        groups: lanes of consecutive kv heads, of which the number of devices that they are spread over is a divisor.
    """

    budget: Fixed
    full: tuple[tuple[bool, ...], ...]
    groups: int = 1

    def __post_init__(self) -> None:
        check_integer("groups", self.groups, least=1)
        if not isinstance(self.budget, Fixed):
            raise ValueError(f"{self.budget} under GatedShares: accepted is Fixed")
        if not self.full or not self.full[0] or len({len(layer) for layer in self.full}) > 1:
            raise ValueError(f"full={self.full!r}: accepted is a tuple for each layer of as many truth values")
        _check_groups(self.groups, len(self.full[0]))

    def check(self, layers: int, kv_heads: int) -> None:
        ours = len(self.full), len(self.full[0])
        if ours != (layers, kv_heads):
            raise ValueError(
                f"gates of {ours[0]} layers with {ours[1]} kv heads for a model of {layers} with {kv_heads}; accepted "
                "are gates trained on this model, see scripts/train_duo_gates.py"
            )

    def growing(self, layers: int, heads: int) -> int:
        return int(max(np.sum(self._by_group, axis=(0, 2))))

    def entries(self, slots: Sequence[int], heads: int) -> int:
        full = np.sum(self._by_group, axis=2)
        lanes = np.array(slots)[:, None] * full + self.budget.entries * (heads - full)
        return int(max(np.sum(lanes, axis=0)))

    def slots(self, layer: int, prompt_size: int, layers: int) -> int:
        """Of a full head."""
        return prompt_size

    def share(
        self, scores: Float[Array, "L B H M"], mean: Int[Array, "B"], least: int, heads: Heads
    ) -> Int[Array, "L B H"]:
        own = jnp.array(self.full)[:, None, heads.kv_indices(scores.shape[2])]
        return jnp.where(own, UNLIMITED, mean[:, None])

    @property
    def _by_group(self) -> np.ndarray:
        """Whether heads are full, [L, groups, heads of a group]."""
        return np.array(self.full).reshape(len(self.full), self.groups, -1)


def full_heads(gates: Gates, sparsity: float, groups: int) -> tuple[tuple[bool, ...], ...]:
    """All kv heads but, in each group of consecutive ones, the part `sparsity` with the smallest gates in all layers.

    Of equal gates the earlier layer's and head's is the smaller.
    """
    values = np.asarray(gates, float)
    layers, heads = values.shape
    _check_groups(groups, heads)
    by_group = np.moveaxis(values.reshape(layers, groups, -1), 1, 0).reshape(groups, -1)
    rank = np.argsort(np.argsort(by_group, axis=1, kind="stable"), axis=1)
    full = rank >= round(by_group.shape[1] * sparsity)
    full = np.moveaxis(full.reshape(groups, layers, -1), 0, 1).reshape(layers, heads)
    return tuple(map(tuple, full.tolist()))


def _check_groups(groups: int, heads: int) -> None:
    if heads % groups:
        raise ValueError(f"groups={groups} of {heads} kv heads; accepted is a divisor of {heads}")
