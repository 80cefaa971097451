"""HeadKV (Fu et al., ICLR 2025, arXiv 2410.19258): divides SnapKV's budget among heads by how much each retrieves.

Differences from the paper and its code:

- Entries are stored per kv head, and the importance of a kv head is the mean over its query heads (`group=`). The
  released code stores entries per query head.
- Shares are rounded by largest remainders, so that they add up. The released code rounds each.
- A share beyond the prompt's length is not used.
- Importance is measured on the model beforehand, by the paper's retrieval or retrieval-reasoning test. The tests are no
  part of kvjax; the authors' files are read. Without a file, the demo model's DuoAttention gates serve as its
  importance.
- The released `temp`, a power of the importance, is not an option. Its default of 1.0 is what is computed here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.mesh.heads import Heads
from kvjax.policy import AllocatedBudget, Layout, Policy, check_integer, check_number, ratio_of, share_of

from .common.allocation import check_mean
from .common.budgets import budget_of
from .common.head_numbers import HeadNumbers, apportioned, check_proportions, check_shape, head_numbers, proportions
from .registry import preset
from .snapkv import snapkv


@dataclass(frozen=True)
class ImportanceShares(AllocatedBudget):
    """Each head has a part of the mean budget for itself, and a share of a pool in proportion to its importance.

    Of the b unprotected entries of the mean head, floor(b / beta) go into the pool. A prompt within the budget is
    retained in full. Each lane of the pool of segments holds the same total. On a mesh nothing is communicated.

    Attributes:
        budget: entries of the mean head, protected ones included, the same for all layers.
        importance: of each kv head, by layer, at least 0.
        beta: the pool has 1 / beta of the unprotected entries, at least 1.
        groups: the number of lanes of consecutive kv heads, each of which shares its own pool. The number of devices
            that kv heads are divided over must divide it.

    Raises:
        ValueError: for a value that is not accepted, or a budget that is not the same for all layers.
    """

    importance: HeadNumbers
    beta: float = 1.5
    groups: int = 1

    def __post_init__(self) -> None:
        check_mean(self.budget)
        check_number("beta", self.beta, "a number >= 1", lambda x: x >= 1)
        check_integer("groups", self.groups, least=1)
        check_proportions("importance", self.importance, self.groups)

    @property
    def layout(self) -> Layout:
        return Layout(groups=self.groups)

    def check_model(self, layers: int, kv_heads: int) -> None:
        expected = "importance that was measured on this model, with the query heads per kv head in group="
        check_shape("importance", self.importance, layers, kv_heads, expected)

    def allocate(
        self, scores: Float[Array, "L B H M"], means: Int[Array, "L B"], least: int, heads: Heads
    ) -> Int[Array, "L B H"]:
        _, _, H, M = scores.shape
        groups = self.groups // heads.kv_devices()
        protected = jnp.sum(jnp.isposinf(scores), axis=-1)
        most_protected = jnp.max(protected, axis=(0, 2))
        free = jnp.maximum(means - most_protected, 0)
        pool = share_of(1 / ratio_of(self.beta), free)
        pool = jnp.minimum(pool, means - jnp.maximum(least, most_protected))
        pool = jnp.maximum(pool, 0)
        shares = jnp.asarray(proportions(self.importance, self.groups), jnp.float32)[:, heads.kv_indices(H)]
        given = apportioned(shares, jnp.sum(pool, axis=0) * (H // groups), groups)
        held = jnp.sum(scores > -jnp.inf, axis=-1)
        within = jnp.all(held <= means[..., None], axis=(0, 2))
        counts = protected + (free - pool)[..., None] + given
        return jnp.where(within[:, None], M, jnp.minimum(held, counts))


@preset
def headkv(
    budget: int | float = 1024,
    importance: str | HeadNumbers = "demo",
    group: int = 1,
    beta: float = 1.5,
    window: int = 8,
    kernel: int = 7,
    pool: Literal["max", "avg", "none"] = "max",
    groups: int = 1,
) -> Policy:
    """Compresses the prompt once by SnapKV's scores; heads that retrieve more retain more entries.

    With b = budget - window, and the importance S of a head as a share of the sum over all heads of all layers, each of
    the L * H heads retains the window and

        b - floor(b / beta) + S * floor(b / beta) * L * H

    entries with the highest scores of `snapkv`. The answer is added to the retained entries.

    Args:
        budget: entries of the mean kv head, window included. An integer >= 1, or a float in (0, 1] for that share of
            each row's prompt.
        importance: a file (.json or .npz with 'importance', .tsv, or the authors' .json with "layer-head": scores), a
            folder of DuoAttention's gates, a tuple of numbers >= 0 per layer, or "demo" for the model that comes with
            kvjax, whose DuoAttention gates serve. Importance for another number of layers or kv heads than the model
            has is refused when a cache is made; another model of the same sizes is not noticed.
        group: the number of consecutive numbers of a layer that are averaged for a kv head: 1 for numbers per kv head,
            the query heads per kv head for numbers per query head (the authors' files for Llama 3 8B: 4).
        beta: the pool is 1 / beta of the budget, at least 1 (the paper's results are the best of 1.005 to 10; released:
            1.5).
        window: the size of the observation window in tokens. It is always retained.
        kernel: the size of the pooling along the prompt, odd.
        pool: "max", "avg" or "none".
        groups: the number of groups of consecutive kv heads that share a pool. On a mesh that divides kv heads over D
            devices it must be a multiple of D.

    Raises:
        ValueError: for a value or a file that is not accepted, or an integer budget smaller than `window` + 1.
    """
    check_integer("group", group, least=1)
    numbers = head_numbers("importance", importance)
    if len(numbers[0]) % group:
        raise ValueError(f"group={group} of {len(numbers[0])} heads: expected a divisor of {len(numbers[0])}")
    of_kv_heads = np.mean(np.array(numbers, float).reshape(len(numbers), -1, group), axis=2)
    shares = ImportanceShares(budget_of(budget), tuple(map(tuple, of_kv_heads.tolist())), beta, groups)
    return replace(snapkv(budget, window=window, kernel=kernel, pool=pool), budget=shares)
