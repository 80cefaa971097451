"""A matrix whose outputs a tensor holds group by group: the rows of each part for one group, then for the next."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .weights import Weight


@dataclass(frozen=True)
class GroupedLinear(Weight):
    """A parameter [in, out] with one part after another, each of all groups, in a tensor of groups of all parts.

    Attributes:
        parts: the outputs of each part in one group.
    """

    parts: tuple[int, ...] = ()

    @property
    def _reorders(self) -> bool:
        return True

    def _ordered(self, x: np.ndarray) -> np.ndarray:
        groups = x.reshape(*x.shape[:-1], -1, sum(self.parts))
        parts = np.split(groups, np.cumsum(self.parts)[:-1], axis=-1)
        return np.concatenate([part.reshape(*x.shape[:-1], -1) for part in parts], axis=-1)
