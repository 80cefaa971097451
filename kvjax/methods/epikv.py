"""EpiKV (Kolawole and Smith, arXiv 2606.26472): retains generated tokens at which hidden states change in mid layers.

It follows the paper's text; no code is released.

Differences from the paper:

- The paper names layers 10 and 21 of a model of 32 layers. A share of the depth stands for them, so that other models
  have such layers, too. h_l is what enters layer l; the paper does not say whether it counts the embeddings.
- The paper gives no epsilon of the z-score. It is 1e-6, and deviations are those of a population. While fewer than
  `window` tokens have been generated, the window has those.
- The paper's budgets exceed its prompts. A prompt beyond the budget keeps its first `sinks` and its newest tokens.
- A token that was generated in the step before has no score yet, and counts as one whose score is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache import Slots
from kvjax.policy import (
    Attended,
    LayerShape,
    Moment,
    Needs,
    Policy,
    Protect,
    Score,
    check_integer,
    check_number,
    share_of,
)

from .common.budgets import budget_of
from .registry import preset

READ = 2.0**20  # the state of tokens that were read; scores, below 2 sqrt(2^31), are less
EPSILON = 1e-6


class Change(NamedTuple):
    """The state of a layer after the last token. All heads have the same numbers.

    Attributes:
        last: the residual stream of the last token.
        gaps: by how much it has changed at the last generated tokens, the newest one last.
        tokens: the number of these tokens, at most those of `gaps`.
        deviation: the z-score of the newest gap in this layer.
        score: of the last token, from the deviations of two layers.
        waiting: the position of the last token if it was generated, and so waits for its score, or -1.
    """

    last: Float[Array, "B H E"]
    gaps: Float[Array, "B H window"]
    tokens: Int[Array, "B H"]
    deviation: Float[Array, "B H"]
    score: Float[Array, "B H"]
    waiting: Int[Array, "B H"]


@dataclass(frozen=True)
class HiddenChange(Score):
    """Scores generated tokens, once and for all layers, by the change of hidden states in two layers.

    With h_l(t) the residual stream that enters layer l at position t, and the mean and the standard deviation of g_l
    over the newest `window` generated tokens, t included,

        g_l(t) = |h_l(t) - h_l(t - 1)|,    z_l(t) = (g_l(t) - mean) / (deviation + 1e-6),

        score(t) = z_early(t) - z_late(t)

    Tokens that were read, not generated, score more than all others, and newer ones more than older ones. The state per
    slot is a float32 number. The state per row is that of `Change` in each layer.

    Attributes:
        window: w, the number of generated tokens that the mean and the deviation are of.
        early: the layer whose change tells an important token, as a share of the depth in [0, 1).
        late: the layer whose change tells an expendable one, likewise.
    """

    window: int = 64
    early: float = 10 / 32
    late: float = 21 / 32

    def __post_init__(self) -> None:
        check_integer("window", self.window, least=2)
        for name in ("early", "late"):
            check_number(name, getattr(self, name), "a share of the depth in [0, 1)", lambda x: 0 <= x < 1)

    @property
    def needs(self) -> Needs:
        return Needs(hidden="residual", slotwise=True, marks=frozenset({"signed", "ordinal"}))

    def check(self, policy: Policy) -> None:
        layout = policy.budget.layout
        if layout is not None and any(layout.dense):
            raise ValueError(
                "it scores the tokens of all layers by two of them, which must evict, and the budget "
                f"{type(policy.budget).__name__} leaves some layers whole; expected a budget without dense layers"
            )

    def init(self, shape: LayerShape) -> tuple[Float[Array, "B H slots"], Change]:
        heads = shape.batch, shape.kv_heads
        none = jnp.zeros(heads, jnp.float32)
        change = Change(
            last=jnp.zeros((*heads, shape.hidden), shape.dtype),
            gaps=jnp.zeros((*heads, self.window), jnp.float32),
            tokens=jnp.zeros(heads, jnp.int32),
            deviation=none,
            score=none,
            waiting=jnp.full(heads, -1, jnp.int32),
        )
        return shape.per_slot(), change

    def observe(self, entries: Slots, attended: Attended) -> tuple[Float[Array, "B H M"], Change]:
        assert attended.hidden is not None
        before: Change = entries.per_row
        at = attended.positions[:, -1][:, None]  # -1 in rows without a token, which change nothing
        comes, first = at >= 0, at - attended.lengths[:, None] + 1
        scored = (entries.positions == before.waiting[..., None]) & (before.waiting >= 0)[..., None] & comes[..., None]
        state = jnp.where(scored, before.score[..., None], entries.per_slot)
        last = jnp.where(comes[..., None], attended.hidden[:, None, -1].astype(before.last.dtype), before.last)
        if not attended.decoding:
            read = (entries.positions >= first[..., None]) & comes[..., None]
            return jnp.where(read, READ, state), before._replace(
                last=last, waiting=jnp.where(comes, -1, before.waiting)
            )
        moved = last.astype(jnp.float32) - before.last.astype(jnp.float32)
        gap = jnp.sqrt(jnp.sum(moved * moved, axis=-1))
        gaps = jnp.concatenate([before.gaps[..., 1:], gap[..., None]], axis=-1)
        count = jnp.minimum(before.tokens + 1, self.window)
        seen = jnp.arange(self.window) >= self.window - count[..., None]
        mean = jnp.sum(jnp.where(seen, gaps, 0), axis=-1) / count
        variance = jnp.sum(jnp.where(seen, (gaps - mean[..., None]) ** 2, 0), axis=-1) / count
        after = Change(last, gaps, count, (gap - mean) / (jnp.sqrt(variance) + EPSILON), before.score, at)
        kept = (
            jnp.where(comes.reshape(*comes.shape, *[1] * (x.ndim - 2)), x, y)
            for x, y in zip(after, before, strict=True)
        )
        return state, Change(*kept)

    def across(self, per_row: Sequence[Change | None]) -> Sequence[Change | None]:
        """Gives all layers the score of the last token. Beside a layer that retains everything, the nearest one tells.

        Such a layer keeps no state.
        """
        known = {i: own for i, own in enumerate(per_row) if own is not None}
        if not known:
            return per_row
        layers = (share_of(share, len(per_row)) for share in (self.early, self.late))
        early, late = (known[min(known, key=lambda i: abs(i - layer))] for layer in layers)

        def score(heads: int) -> Float[Array, "B H"]:
            return _of_heads(early.deviation, heads) - _of_heads(late.deviation, heads)

        return [None if own is None else own._replace(score=score(own.score.shape[1])) for own in per_row]

    def __call__(self, entries: Slots, moment: Moment) -> Float[Array, "B H M"]:
        return jnp.where(entries.per_slot >= READ, READ + entries.positions.astype(jnp.float32), entries.per_slot)


def _of_heads(x: Float[Array, "B H"], heads: int) -> Float[Array, "B heads"]:
    """Returns what all heads have in common for a number of heads. On a mesh an equal number needs no communication."""
    return x if x.shape[1] == heads else jnp.repeat(x[:, :1], heads, axis=1)


@preset
def epikv(
    budget: int | float = 4096,
    window: int = 64,
    early: float = 10 / 32,
    late: float = 21 / 32,
    sinks: int = 0,
    recent: int = 128,
    every: int = 1,
) -> Policy:
    """Retains the prompt, the newest tokens, and those at which the hidden state has changed in mid layers.

    With h_l(t) the hidden state that enters layer l, all heads of all layers score a generated token once, by two
    layers:

        g_l(t) = |h_l(t) - h_l(t - 1)|

        z_l(t) = (g_l(t) - mean of g_l over the window) / its standard deviation

        score(t) = z_early(t) - z_late(t)

    No attention weights are read. Tokens of prompts are evicted only if no generated token is left.

    Args:
        budget: the most entries that a query sees, the prompt included: the paper's K. An integer >= 1, or a float in
            (0, 1] for that share of each row's prompt.
        window: the newest generated tokens that the mean and the deviation are of: the paper's w, an integer >= 2.
        early: the layer whose change tells an important token, as a share of the depth in [0, 1): 10 of 32. The depth
            counts the layers that cache entries: not recurrent layers, nor those that read another layer's entries.
        late: the layer whose change tells an expendable one, likewise: 21 of 32.
        sinks: the number of first tokens that are always retained, which matters for prompts beyond the budget.
        recent: the number of newest tokens that are always retained; the paper's min(128, K / 4).
        every: the number of entries that a full head evicts at a time.

    Raises:
        ValueError: for a value that is not accepted, or a budget smaller than sinks + recent + `every`.
    """
    return Policy(
        score=HiddenChange(window, early, late),
        budget=budget_of(budget),
        protect=Protect(sinks=sinks, recent=recent),
        every=every,
    )
