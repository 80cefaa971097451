"""TriAttention (Mao et al., arXiv 2604.04921): scores keys by the mean query of their head, at distances to come.

The formula, the offsets and the standardisation are those of the released code (github.com/WeianMao/triattention), in
its mode in which the heads of each layer choose for themselves. Scores were compared with those of its functions on
random heads, not with the paper's text.

Differences from the released code:

- A prompt beyond the budget is compressed too, and the newest 128 tokens stay, as in its vLLM plugin. By default the
  released code retains the prompt.
- Scores are standardised over all entries that a head holds. Where the prompt stays, the released code standardises
  generated tokens only.
- Each kv head chooses by its own scores. By default the released code averages the scores of a kv head over all layers.
- Channels that RoPE does not rotate enter the product with the mean query, and no norm.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from kvjax.cache import Slots
from kvjax.policy import Moment, Needs, Policy, Protect, Score, check_integer

from .common.budgets import budget_of
from .common.mean_rotation import mean_rotation
from .common.refusals import check_own_positions
from .registry import preset

LEAST_DEVIATION = 1e-6


@dataclass(frozen=True)
class DistancePreference(Score):
    """The expected logit of a key at distances to come and a norm term, standardised, the largest of a query group.

    There is no state: mean and norms of queries are statistics (`kvjax.with_statistics`).

    Attributes:
        farthest: the mean is over the distances 1, 2, 4, .. up to this one from the next position.
    """

    farthest: int = 65536

    def __post_init__(self) -> None:
        check_integer("farthest", self.farthest, least=1)

    @property
    def needs(self) -> Needs:
        return Needs(marks=frozenset({"signed"}), statistics=("query_mean", "query_norms"))

    def check(self, policy: Policy) -> None:
        check_own_positions(policy, "scores keys by the distance from their own positions")

    def __call__(self, entries: Slots, moment: Moment) -> Float[Array, "B H M"]:
        B, H, _, D = entries.keys.shape
        assert moment.layer.statistics is not None
        mean, norms = (moment.layer.statistics[name] for name in ("query_mean", "query_norms"))
        ahead = 2 ** np.arange(self.farthest.bit_length())
        G = mean.shape[0] // H
        query = mean_rotation(moment, D, ahead)(jnp.broadcast_to(mean[:, None], (B, mean.shape[0], 1, D)))
        rope, half = moment.layer.rope, moment.layer.rope.channels(D) // 2
        unmet = norms[:, :half] - jnp.hypot(mean[:, :half], mean[:, half : 2 * half])  # what the mean's norm leaves
        keys = entries.keys.astype(jnp.float32)
        pairs = rope.attention_factor * jnp.hypot(keys[..., :half], keys[..., half : 2 * half])
        logits = jnp.einsum("BHMD,BHGD->BHGM", keys, query.reshape(B, H, G, D), precision="highest")
        logits += jnp.einsum("BHMF,HGF->BHGM", pairs, unmet.reshape(H, G, half), precision="highest")
        return jnp.max(_standardised(logits, (entries.positions >= 0)[:, :, None]), axis=2)


def _standardised(x: Float[Array, "B H G M"], held: Bool[Array, "B H 1 M"]) -> Float[Array, "B H G M"]:
    """Subtracts the mean, and divides by the standard deviation, of the entries that are not empty."""
    number = jnp.maximum(jnp.sum(held, axis=-1, keepdims=True), 1)
    apart = x - jnp.sum(jnp.where(held, x, 0), axis=-1, keepdims=True) / number
    variance = jnp.sum(jnp.where(held, apart**2, 0), axis=-1, keepdims=True) / number
    return apart / jnp.maximum(jnp.sqrt(variance), LEAST_DEVIATION)


@preset
def triattention(
    budget: int | float = 2048,
    sinks: int = 0,
    recent: int = 128,
    every: int | None = 128,
    farthest: int = 65536,
) -> Policy:
    """Retains the entries that the mean query of their head prefers, by their distance and their norm.

    With q_f and k_f the channel pair f of a query and a key before RoPE as complex numbers, w_f its frequency, and d
    the distance from key c to the next position,

        z[c, t] = sum_f |E q_f| |k_f| cos(w_f (d + t) + arg(E q_f) - arg(k_f)) + sum_f (E|q_f| - |E q_f|) |k_f|
        score[h, c] = max over the query group of the standardised mean of z[c, t] over t = 1, 2, 4, .. farthest

    where the expectations are those of a set of texts. The first sum is the logit of the mean query, the second is
    large where queries are spread. The score needs neither attention weights nor state.

    The expectations are statistics beside the parameters: `kvjax.with_statistics(params, PATH)` reads those that `kvjax
    measure-statistics` writes, and the authors' files.

    Args:
        budget: the number of entries that a kv head retains and that a query sees, itself included. An integer >= 1, or
            a float in (0, 1] for that share of each row's prompt. The released code's budget is `budget` - `every`.
        sinks: the number of first tokens that are always retained.
        recent: the number of most recent tokens that are always retained (the released runtime: 128).
        every: the number of entries that a full head evicts at a time while decoding. None compresses the prompt only.
        farthest: the largest distance that is added.

    Raises:
        ValueError: for a value that is not accepted, or a budget smaller than sinks + recent + `every`. Parameters
            without these statistics are refused when a prompt is read.
    """
    return Policy(
        score=DistancePreference(farthest),
        budget=budget_of(budget),
        protect=Protect(sinks=sinks, recent=recent),
        every=every,
    )
