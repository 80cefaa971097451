"""Compactor (Chari and Van Durme, arXiv 2507.08143): blends the leverage of keys with non-causal attention.

Differences from the authors' code and kvpress's CompactorPress:

- `blend=0.5` is that of the authors' code. In kvpress the blend is the share of the prompt that is removed, which
  `blend` takes as a number.
- Chunks of 256 tokens, 8 protected first and 4 protected last tokens are those of kvpress. The authors' code has chunks
  of 128, 16 and 64 tokens.
- As in kvpress, the first and last tokens take no part in the scores. As in both, scores are standardised over all
  heads and tokens of a row's layer.
- The sketch depends on seed, layer and kv head, and the last chunk has the tokens that are left: see `leverage_score`
  and `non_causal_attention`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.cache import Slots
from kvjax.mesh.heads import Heads
from kvjax.policy import Attended, LayerShape, Moment, Needs, Policy, Protect, Score, check_kind, check_number

from .common.budgets import budget_of
from .common.leverage import LeverageScore
from .common.non_causal import NonCausalAttention
from .registry import preset


@dataclass(frozen=True)
class LeveragedAttention(Score):
    """Adds `blend` times the leverage of a token's key and its non-causal attention, standardised over the layer.

    On a mesh that distributes kv heads, devices add up the means and variances of the layer's heads.

    Attributes:
        attention: whose tokens count.
        leverage: of the keys of these tokens.
        blend: the weight of leverage.
    """

    attention: NonCausalAttention
    leverage: LeverageScore = field(default_factory=LeverageScore)
    blend: float = 0.5

    def __post_init__(self) -> None:
        check_kind("attention", self.attention, NonCausalAttention)
        check_kind("leverage", self.leverage, LeverageScore)
        check_number("blend", self.blend, "a number >= 0", lambda x: x >= 0)

    @property
    def needs(self) -> Needs:
        return replace(self.attention.needs, marks=self.attention.needs.marks | {"signed"})

    def check(self, policy: Policy) -> None:
        self.leverage.check(policy)
        recent, first, last = policy.protect.recent, self.attention.sinks, self.attention.recent
        if policy.protect.sinks < first or isinstance(recent, float) or recent < last:
            raise ValueError(
                f"it does not score the first {first} and the last {last} tokens, and {policy.protect} does not "
                f"protect them; expected sinks={first} and recent={last} or more"
            )

    def init(self, shape: LayerShape) -> tuple[Any, Any]:
        return self.attention.init(shape)

    def observe(self, entries: Slots, attended: Attended) -> tuple[Any, Any]:
        return self.attention.observe(entries, attended)

    def __call__(self, entries: Slots, moment: Moment) -> Float[Array, "B H M"]:
        scored = self.attention.scored(entries, moment)
        others = replace(entries, positions=jnp.where(scored, entries.positions, -1))
        both = jnp.stack([self.leverage(others, moment), self.attention(entries, moment)], axis=2)
        leverage, attention = jnp.moveaxis(standardised(both, scored[:, :, None], moment.heads), 2, 0)
        return self.blend * leverage + attention


def standardised(x: Float[Array, "B H K M"], counted: Bool[Array, "B H 1 M"], heads: Heads) -> Float[Array, "B H K M"]:
    """Returns (x - mean) / standard deviation of each of K, over the counted entries of a row's layer; 0 elsewhere."""
    total = x.shape[1] * heads.kv_devices()
    held = jnp.where(counted, x, 0)
    sums = jnp.concatenate([held, jnp.broadcast_to(counted, (*x.shape[:2], 1, x.shape[3]))], axis=2).sum(-1)
    sums = total * heads.mean(sums)[..., None]
    mean, number = sums[:, :, :-1] / jnp.maximum(sums[:, :, -1:], 1), sums[:, :, -1:]
    apart = jnp.where(counted, x - mean, 0)
    variance = total * heads.mean(jnp.sum(apart**2, axis=-1, keepdims=True)) / jnp.maximum(number - 1, 1)
    return apart / jnp.maximum(jnp.sqrt(variance), 1e-6)


@preset
def compactor(
    budget: int | float = 1024,
    chunk: int = 256,
    sketch: int = 48,
    blend: float = 0.5,
    seed: int = 0,
    sinks: int = 8,
    recent: int = 4,
) -> Policy:
    """Compresses the prompt once, by how unlike other keys a key is and by the attention within chunks of the text.

        score[h, c] = blend * Z(leverage[h, c]) + Z(attention[h, c])

    Z standardises over all heads and tokens of the layer. Leverage and attention are the scores of `leverage_score` and
    `non_causal_attention` among the tokens between the first `sinks` and the last `recent`. No question is needed. The
    answer is added to the retained entries.

    Args:
        budget: the number of entries retained of the prompt. An integer >= 1, or a float in (0, 1] for that share of
            each row's prompt.
        chunk: the number of tokens in a chunk.
        sketch: the number of columns of the Gaussian matrix in which leverage is measured.
        blend: the weight of leverage, the paper's lambda, >= 0.
        seed: of the Gaussian matrix.
        sinks: the number of first tokens, which are always retained.
        recent: the number of most recent tokens, which are always retained.

    Raises:
        ValueError: for a value that is not accepted, or an integer budget smaller than sinks + recent + 1.
    """
    return Policy(
        score=LeveragedAttention(NonCausalAttention(chunk, sinks, recent), LeverageScore(sketch, seed), blend),
        budget=budget_of(budget),
        protect=Protect(sinks=sinks, recent=recent),
    )
