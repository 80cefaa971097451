"""VaSE, value-aware stochastic eviction (Chang et al., arXiv 2606.03928): retains large values, and draws the others.

Differences from the released code:

- The prompt is compressed by the same rule once it has been read. The released code first evicts while decoding.
- The noise is a function of seed, layer, kv head, the token and the position at which it is judged.
- The size of a value is the range of its channels, as in the released code's main mode.
- `large` is a share of the budget. The released code has 1,024 of 4,096 entries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.cache import Slots, mark
from kvjax.pallas_kernels import Reduction, top_tokens
from kvjax.policy import Moment, Needs, Policy, Protect, check_integer, check_kind, check_number, share_of

from .common.budgets import budget_of
from .common.pooling import Pooling
from .common.refusals import check_by_entry
from .common.window_attention import QueryWindow, WindowAttention
from .registry import preset

ABOVE = 1e9  # beyond the logarithm of any share and its noise


@dataclass(frozen=True)
class StochasticAttention(QueryWindow):
    """The logarithm of the attention from the window plus Gumbel noise; entries with large values score above all.

    The highest sums are a sample without replacement, in which an entry is drawn in proportion to its attention. The
    state is the window's queries. While an allocated budget compares scores, there is no noise and no value counts.

    Attributes:
        window: the number of last queries.
        pooling: of attention along the text.
        large: the share of the entries that a head retains which have the largest values, the sinks among them.
        sinks: the number of first tokens that count as large.
        seed: of the noise.
    """

    pooling: Pooling
    large: float
    sinks: int
    seed: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_kind("pooling", self.pooling, Pooling)
        check_number("large", self.large, "a number in [0, 1)", lambda x: 0 <= x < 1)
        check_integer("sinks", self.sinks, least=0)
        check_integer("seed", self.seed, least=0)

    @property
    def needs(self) -> Needs:
        return replace(super().needs, by_count=True)

    def check(self, policy: Policy) -> None:
        super().check(policy)
        check_by_entry(policy, "scores entries with large values above all others")

    def __call__(self, entries: Slots, moment: Moment) -> Float[Array, "B H M"]:
        distant = self.distant(entries, moment)
        shares = WindowAttention(self.window, Reduction(rows="mean", group="mean"), normalise="distant")(
            entries, moment
        )
        shares = self.pooling.along_text(shares, entries.positions, distant)
        scores = jnp.log(jnp.where(distant, jnp.maximum(shares, 1e-30), 1e-30))
        if moment.counts is None:
            return scores
        values = entries.values.astype(jnp.float32)
        spread = jnp.max(values, axis=-1) - jnp.min(values, axis=-1)
        spread = jnp.where(entries.positions < self.sinks, jnp.inf, spread)
        number = share_of(self.large, moment.counts)
        largest = top_tokens(jnp.where(distant, spread, -jnp.inf), entries.positions, number, size=entries.slots)
        return jnp.where(mark(largest, entries.slots) & distant, ABOVE, scores + self.noise(entries, moment))

    def noise(self, entries: Slots, moment: Moment) -> Float[Array, "B H M"]:
        """Draws Gumbel noise."""
        layer = jax.random.fold_in(jax.random.key(self.seed), moment.layer.index)

        def draw(head: Array, now: Array, position: Array) -> Array:
            key = jax.random.fold_in(jax.random.fold_in(layer, head), now)
            return jax.random.gumbel(jax.random.fold_in(key, position))

        over_entries = jax.vmap(draw, (None, None, 0))
        over_heads = jax.vmap(over_entries, (0, None, 0))
        heads = moment.heads.kv_indices(entries.positions.shape[1])
        return jax.vmap(over_heads, (None, 0, 0))(heads, moment.next_position, entries.positions)


@preset
def vase(
    budget: int | float = 1024,
    window: int = 64,
    large: float = 0.25,
    kernel: int = 5,
    sinks: int = 4,
    seed: int = 0,
    every: int | None = 64,
) -> Policy:
    """Retains the tokens with the largest values, and a random sample of the others in proportion to their attention.

    With A the mean over the last `window` queries and the query group of the softmax over all older entries, averaged
    over `kernel` neighbours, and new Gumbel noise G at every eviction,

        large entries: the sinks, then the largest max(v_c) - min(v_c) over channels, up to the share `large`
        score[h, c] = log A[h, c] + G[h, c] of all others

    Args:
        budget: the most entries that a query sees, itself and the buffer included: the paper's budget + `every`. An
            integer >= 1, or a float in (0, 1] for that share of each row's prompt.
        window: the number of most recent tokens, which are always retained and whose queries score the others.
        large: the share of the budget for tokens with large values, sinks included, in [0, 1).
        kernel: the size of the mean along the text, odd.
        sinks: the number of first tokens, which are always retained.
        seed: of the noise.
        every: the number of tokens that are evicted at a time. None compresses the prompt only.

    Raises:
        ValueError: for a value that is not accepted, or an integer budget smaller than sinks + `window` + `every`.
    """
    return Policy(
        score=StochasticAttention(window, Pooling("avg", kernel), large, sinks, seed),
        budget=budget_of(budget),
        protect=Protect(sinks=sinks, recent=window),
        every=every,
    )
