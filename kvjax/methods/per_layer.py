"""Budgets per layer (kvpress's PerLayerCompressionPress; no paper): gives each layer a share of another budget.

Differences from kvpress:

- A share multiplies the base's budget. With a budget of 1.0 it is 1 minus kvpress's compression ratio of the layer.
- A layer is never given less than its protected entries. kvpress may drop these.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kvjax.checks import is_number, shown
from kvjax.policy import Budget, Policy, check_integer, check_kind, share_of

from .common.allocation import check_mean
from .registry import preset
from .snapkv import snapkv

SNAPKV = snapkv()
MOST = 1000  # times the base's budget; more is a mistake, and such a number of entries may not fit 32 bits


@dataclass(frozen=True)
class PerLayer(Budget):
    """Layer l has shares[l] times the entries of another budget, rounded down.

    Attributes:
        budget: the entries of a share of 1, the same for all layers.
        shares: of each layer, above 0 and at most 1000. A layer never gets more than the prompt if `budget` is a share
            of the prompt.

    Raises:
        ValueError: for a value that is not accepted, or a budget that is not the same for all layers.
    """

    budget: Budget
    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        check_mean(self.budget)
        if not isinstance(self.shares, tuple) or not self.shares or not all(map(_is_share, self.shares)):
            accepted = f"a tuple of numbers above 0 and at most {MOST}, one for each layer"
            raise ValueError(f"shares={shown(self.shares)}: expected {accepted}")
        if self.budget.smallest is not None:
            check_integer("the largest layer's budget", share_of(max(self.shares), self.budget.smallest), least=0)

    @property
    def smallest(self) -> int | None:
        return None if self.budget.smallest is None else share_of(min(self.shares), self.budget.smallest)

    def check_model(self, layers: int, kv_heads: int) -> None:
        if len(self.shares) != layers:
            raise ValueError(
                f"shares of {len(self.shares)} layers for a model of {layers}: expected a share for each layer"
            )

    def capacity(self, layer: int, prompt_lengths: Int[Array, "B"], layers: int) -> Int[Array, "B"]:
        xp: Any = np if isinstance(prompt_lengths, np.ndarray) else jnp
        whole: Any = self.budget.capacity(layer, prompt_lengths, layers)
        entries = share_of(self.shares[layer], whole)
        of_prompt = self.budget.smallest is None
        return xp.minimum(entries, prompt_lengths) if of_prompt else entries


def _is_share(value: Any) -> bool:
    return is_number(value) and 0 < value <= MOST


@preset
def per_layer(base: Policy = SNAPKV, shares: tuple[float, ...] = (1.5, 1.25, 0.75, 0.5)) -> Policy:
    """Gives each layer its own budget, under any policy whose budget is the same for all layers.

        entries of layer l = floor(shares[l] * b),    b = the base's budget

    If the base's budget is 1.0, the complete prompt, each share is the part of the prompt that its layer retains:

    - `per_layer:base=snapkv,base.budget=1024,shares=(1.5,1.25,0.75,0.5)` retains 1,536, 1,280, 768 and 512 entries per
      kv head in four layers.
    - `per_layer:base=snapkv,base.budget=1.0,shares=(0.5,0.4,0.3,0.2)` retains these shares of each row's prompt, as in
      kvpress.

    Args:
        base: the policy that scores, selects and protects. Its budget is the same for all layers: an integer, or a
            float for that share of each row's prompt.
        shares: a number above 0 and at most 1000 for each layer of the model. Another number of layers is refused when
            a cache is made. The default is for models of four layers. As text `shares=(1.5,1.25,0.75,0.5)`.

    Raises:
        ValueError: for a value that is not accepted, a base whose layers have different budgets already, and a layer
            with fewer entries than the base protects.
    """
    check_kind("base", base, Policy)
    return replace(base, budget=PerLayer(base.budget, shares))
