"""SimLayerKV (Zhang et al., arXiv 2410.13846): retains a window in lazy layers, and everything in all others.

Differences from the paper and kvpress's SimLayerKVPress:

- Memory is fixed before the prompt is read, so `budget` bounds the total. With budget=1.0 the threshold alone decides,
  and the cache has room for all layers. With less, the laziest layers are lazy until the total fits.
- Layers are judged once all have read the prompt.
- kvpress leaves out the attention of the last tokens on themselves, and retains one recent token fewer.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache import Slots
from kvjax.mesh.heads import Heads
from kvjax.pallas_kernels import Reduction, window_scores
from kvjax.policy import (
    AllocatedBudget,
    Attended,
    LayerShape,
    Layout,
    Moment,
    Needs,
    Policy,
    Protect,
    Score,
    check_integer,
)

from .common.allocation import check_mean, check_share
from .common.budgets import budget_of
from .common.window_attention import QueryRing
from .registry import preset


@dataclass(frozen=True)
class LazyAttention(Score):
    """The mean attention from the last queries, with a negative sign for all but the first and the newest tokens.

    The sum of what is positive says how lazy a head is. The state is the last queries.

    Attributes:
        sinks: the number of first tokens.
        recent: the number of newest tokens.
        last: the number of queries.
    """

    sinks: int
    recent: int
    last: int

    def __post_init__(self) -> None:
        check_integer("sinks", self.sinks, least=0)
        check_integer("recent", self.recent, least=1)
        check_integer("last", self.last, least=1)

    @property
    def needs(self) -> Needs:
        return Needs(queries="rotated", keeps_queries=True, marks=frozenset({"signed"}))

    def init(self, shape: LayerShape) -> tuple[None, QueryRing]:
        return None, QueryRing.empty(shape, self.last)

    def observe(self, entries: Slots, attended: Attended) -> tuple[None, QueryRing]:
        return None, entries.per_row.push(attended)

    def __call__(self, entries: Slots, moment: Moment) -> Float[Array, "B H M"]:
        ring: QueryRing = entries.per_row
        weights = window_scores(
            ring.queries,
            entries.keys,
            ring.positions[:, 0],
            entries.positions,
            lse=ring.lse,
            bias=entries.bias,
            **moment.layer.logits,
            reduction=Reduction(rows="sum", group="mean"),
        )
        weights /= jnp.maximum(jnp.sum(ring.positions >= 0, axis=-1, keepdims=True), 1)
        newest = entries.positions >= moment.next_position[:, None, None] - self.recent
        return jnp.where((entries.positions < self.sinks) | newest, weights, -weights)


@dataclass(frozen=True)
class LazyLayers(AllocatedBudget):
    """A layer retains `lazy` entries if the positive scores of its mean head exceed a threshold, and else everything.

    If that is more than the total of the mean heads, the layers with the largest sums are lazy too, until it fits. On a
    mesh the sums are averaged over heads, once per prompt.

    Attributes:
        budget: entries of the mean head, the same for all layers.
        lazy: the number of entries that a head of a lazy layer retains.
        threshold: of the sum of positive scores.
    """

    lazy: int
    threshold: float

    def __post_init__(self) -> None:
        check_integer("lazy", self.lazy, least=1)
        check_share("threshold", self.threshold)
        check_mean(self.budget)

    @property
    def layout(self) -> Layout:
        return Layout(compares_protected=True)

    def allocate(
        self, scores: Float[Array, "L B H M"], means: Int[Array, "L B"], least: int, heads: Heads
    ) -> Int[Array, "L B H"]:
        positive = jnp.sum(jnp.where(jnp.isfinite(scores), jnp.maximum(scores, 0), 0), axis=-1)
        laziness = heads.mean(jnp.moveaxis(positive, 0, -1))[:, 0].T
        held = jnp.max(jnp.sum(scores > -jnp.inf, axis=-1), axis=2)
        few = jnp.minimum(held, max(self.lazy, least))
        order = jnp.argsort(-laziness, axis=0, stable=True)
        saved = jnp.take_along_axis(held - few, order, axis=0)  # a layer with a sliding window saves less than others
        needed = jnp.cumsum(saved, axis=0) - saved < jnp.sum(held - means, axis=0)
        needed = jnp.take_along_axis(needed, jnp.argsort(order, axis=0), axis=0)
        lazy = (laziness > self.threshold) | needed
        return jnp.broadcast_to(jnp.where(lazy, few, held)[..., None], scores.shape[:3])


@preset
def simlayerkv(
    budget: int | float = 1.0, threshold: float = 0.9, sinks: int = 4, recent: int = 1024, last: int = 1
) -> Policy:
    """Compresses the prompt once: lazy layers retain the first and the newest tokens, all other layers everything.

        layer l is lazy if the mean over all its heads and the last queries r of
        (sum over c among the first `sinks` and the newest `recent` tokens of softmax(q_r . k)_c) > threshold

    Lazy layers are compressed also if the prompt is within the budget. The answer is added to the retained entries.

    Args:
        budget: the most entries that the mean layer retains; the laziest layers are lazy until it is met. An integer
            >= 1, or a float in (0, 1] for that share of each row's prompt; 1.0 leaves it to the threshold.
        threshold: the paper's delta, in [0, 1]: 0.9 for Llama 3, 0.8 for Mistral, 0.85 for Qwen, 0.65 for Llama 2.
        sinks: the number of first tokens, which are always retained.
        recent: the number of newest tokens, which are always retained.
        last: the number of last queries.

    Raises:
        ValueError: for a value that is not accepted, or an integer budget smaller than sinks + recent + 1.
    """
    check_integer("sinks", sinks, least=0)
    check_integer("recent", recent, least=1)
    return Policy(
        score=LazyAttention(sinks, recent, last),
        budget=LazyLayers(budget_of(budget), sinks + recent, threshold),
        protect=Protect(sinks=sinks, recent=recent),
    )
