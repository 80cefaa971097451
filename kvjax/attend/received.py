"""Computes the attention of a call's queries, and its reductions for scores in the same pass or in a second one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache import Slots
from kvjax.mesh.heads import Heads
from kvjax.models import AttentionLayer, join_sinks
from kvjax.pallas_kernels import in_one_pass, prompt_attention, scored_attention
from kvjax.policy import Attended, Received


def attention(
    layer: AttentionLayer,
    heads: Heads,
    q: Float[Array, "B Hq N D"],
    entries: Slots,
    positions: Int[Array, "B N"],
    call: Literal["prompts", "replays"],
    wishes: Sequence[Received] = (),
) -> tuple[Float[Array, "B Hq N D"], Float[Array, "B Hq N"], dict[Received, Array]]:
    """Computes the attention of new tokens, and the reductions of its weights that the same pass can produce.

    Replayed tokens leave no entries, so their own columns are skipped.

    Args:
        entries: the cached entries, and the new tokens' own behind them; as arrays.
        wishes: the reductions that the score requests.
    """
    before = entries.slots - q.shape[2]
    served = [wish for wish in wishes if wish.shown(call, before) and _in_one_pass(wish, layer, heads)]
    arrays = q, entries.keys, entries.values, positions, entries.positions
    if served:
        reductions, own = tuple(wish.reduction for wish in served), call != "replays"
        context, lse, sums = scored_attention(
            *arrays, **layer.logits, bias=entries.bias, reductions=reductions, own=own
        )
    else:
        context, lse = prompt_attention(*arrays, **layer.logits, bias=entries.bias)
        sums = ()
    context, lse = join_sinks(context, lse, layer.sinks)  # earlier chunks are among the keys, so they join once
    return context, lse, dict(zip(served, sums, strict=True))


def _in_one_pass(wish: Received, layer: AttentionLayer, heads: Heads) -> bool:
    """Returns whether all queries are here, count alike, and attend with the log-sum-exp that attention computes."""
    alike = wish.last is None and wish.weigh is None
    return alike and heads.group_axis is None and layer.sinks is None and in_one_pass(wish.reduction)


def received(
    wish: Received | None,
    call: Literal["prompts", "replays"],
    found: dict[Received, Array],
    layer: AttentionLayer,
    heads: Heads,
    q: Float[Array, "B Hq N D"],
    lse: Float[Array, "B Hq N"],
    entries: Slots,
    positions: Int[Array, "B N"],
    attended: Callable[..., Attended],
) -> Float[Array, "B H *G M"] | None:
    """Returns the attention that entries received from the queries of a call, reduced as the score requests.

    Args:
        found: what `attention` computed. Anything else is computed from `q` and `lse`.
        attended: what the score observes, but for queries and `received`. Weights of queries follow from it.
    """
    if wish is None or not wish.shown(call, entries.slots - q.shape[2]):
        return None
    if wish in found:
        return found[wish]
    if wish.weigh is not None:  # the weight exp(logit - lse) of a query times w is exp(logit - (lse - log w))
        weights = wish.weigh(attended(queries=q, received=None))[:, None]
        lse = jnp.where(jnp.isneginf(lse), lse, lse - jnp.log(weights))
    last = slice(-wish.last if wish.last else None, None)
    q, lse = (heads.whole_groups(x[:, :, last]) for x in (q, lse))
    return entries.received(
        q=q,
        lse=lse,
        query_positions=positions[:, last],
        **layer.logits,
        reduction=wish.reduction,
    )
