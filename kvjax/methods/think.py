"""ThinK (Xu et al., ICLR 2025, arXiv 2407.21018): drops key channels that the last queries of a prompt weigh least.

Differences from the released code and kvpress:

- Channels are chosen among the keys that the base retains, and the newest 32 entries keep all, as in the released code.
  kvpress drops channels of the newest entries too (`recent=0`), and sets them to zero, so that memory stays the same.
- Entries are stored per kv head, and so are channels; the squares of the queries are averaged over the query group, as
  in kvpress. The released code stores keys and channels per query head.
- Prompts within the budget lose channels too, as in kvpress. The released code leaves them as they are.
- Layers with a sliding window keep all channels: their entries leave while the answer grows, and would leave empty
  slots behind.
- Value channels (the paper's appendix) are not dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache import Slots
from kvjax.pallas_kernels import slot_attention
from kvjax.policy import (
    PLAIN,
    Attended,
    LayerShape,
    Policy,
    Storage,
    check_integer,
    check_kind,
    check_number,
    share_of,
)

from .common.settling import check_settling
from .common.window_attention import QueryRing
from .full import full
from .registry import preset

FULL = full()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ThinEntries:
    """Entries of a prompt with C of the D channels of their keys. Nothing is written to them any more.

    A dropped channel counts as zero, so logits are those of the queries' own C channels.

    Attributes:
        keys: the channels that are left, in the order of `channels`.
        values: with all channels.
        positions: the token position in each of the T slots, int32, -1 if the slot is empty.
        channels: the indices of the channels that each head's keys have, ascending, int32.
    """

    keys: Float[Array, "B H T C"]
    values: Float[Array, "B H T D"]
    positions: Int[Array, "B H T"]
    channels: Int[Array, "B H C"]

    def plain(self) -> tuple[Float[Array, "B H T D"], Float[Array, "B H T D"]]:
        """Returns keys with all channels, zero where they were dropped, and values."""
        at = self.channels[..., None, :] == jnp.arange(self.values.shape[-1])[:, None]  # [B, H, D, C]
        source = jnp.sum(jnp.where(at, jnp.arange(self.channels.shape[-1]), 0), axis=-1)
        keys = jnp.take_along_axis(self.keys, source[:, :, None], axis=-1, mode="promise_in_bounds")
        return jnp.where(jnp.any(at, axis=-1)[:, :, None], keys, 0), self.values

    def attention(
        self, q: Float[Array, "B Hq W D"], positions: Int[Array, "B W"], **logits: Any
    ) -> tuple[Float[Array, "B Hq W D"], Float[Array, "B Hq W"]]:
        """Computes `Settled.attention`; the queries use the channels that are left."""
        B, H, _ = self.channels.shape
        grouped = q.reshape(B, H, -1, q.shape[-1])
        own = jnp.take_along_axis(grouped, self.channels[:, :, None], axis=-1, mode="promise_in_bounds")
        own = own.reshape(*q.shape[:-1], -1)
        found = slot_attention(own, self.keys, self.values, positions, self.positions, **logits)
        return found.context, found.lse


@dataclass(frozen=True)
class ThinKeys(Storage):
    """Drops the key channels of a prompt that its last queries weigh least. Values and later keys keep all.

    Channel c of a kv head scores the sum of q_c^2 over the last queries of its query group, times the sum of k_c^2 over
    the entries that the head retains. The best D - floor(D ratio) channels stay, at least one; of equal ones, the
    first. On a mesh where devices share a kv head, they exchange the group's queries.

    Attributes:
        ratio: the share of channels that is dropped, above 0 and below 1.
        window: the number of last queries of the prompt that weigh channels.
        recent: the number of newest entries whose keys keep all channels.
    """

    ratio: float = 0.4
    window: int = 32
    recent: int = 32

    def __post_init__(self) -> None:
        check_number("ratio", self.ratio, "a number above 0 and below 1", lambda x: 0 < x < 1)
        check_integer("window", self.window, least=1)
        check_integer("recent", self.recent, least=0)

    @property
    def newest(self) -> int:
        return self.recent

    def check(self, policy: Policy) -> None:
        check_settling("drops channels of keys", policy)

    def init(self, shape: LayerShape) -> QueryRing:
        return QueryRing.empty(shape, self.window)

    def observe(self, entries: Slots, attended: Attended) -> QueryRing:
        return entries.storing.push(attended)

    def settle(self, entries: Slots, **logits: Any) -> Slots:
        B, H, _, D = entries.keys.shape
        queries = entries.storing.queries.astype(jnp.float32).reshape(B, H, -1, D)
        keys = jnp.where(entries.positions[..., None] >= 0, entries.keys.astype(jnp.float32), 0)
        scores = jnp.sum(queries**2, axis=2) * jnp.sum(keys**2, axis=2)
        _, channels = jax.lax.top_k(scores, max(1, D - share_of(self.ratio, D)))
        channels = jnp.sort(channels, axis=-1)
        newest, older = entries.parted(self.recent)
        left = jnp.take_along_axis(older.keys, channels[:, :, None], axis=-1, mode="promise_in_bounds")
        return replace(newest, settled=ThinEntries(left, older.values, older.positions, channels))


@preset
def think(base: Policy = FULL, ratio: float = 0.4, window: int = 32, recent: int = 32) -> Policy:
    """Drops channels of the keys of a prompt once it has been read, and compressed as the base says.

        score[h, channel] = |Q_channel|^2 |K_channel|^2

    Q_channel is the channel of the last `window` queries of the head's query heads, and K_channel that of all keys that
    the head retains. The floor(D ratio) channels with the lowest scores leave all keys of the prompt but the newest.
    Later queries use the channels that are left for these keys. Generated tokens and later turns keep all channels, and
    so do layers with a sliding window.

    Args:
        base: decides what is retained of the prompt; a policy that compresses prompts only.
        ratio: the share of channels that is dropped, above 0 and below 1 (the paper's lambda).
        window: the number of queries at the end of the prompt that weigh channels (the paper's S_obs).
        recent: the number of newest entries whose keys keep all channels, 32 in the released code. 0: kvpress.

    Raises:
        ValueError: for a value that is not accepted, and for a base that evicts while decoding, whose budget is
            allocated across heads or layers, whose keys are rotated to their places in the cache, whose merge weighs
            entries, or that stores its cache in another form already.
    """
    check_kind("base", base, Policy)
    if base.storage != PLAIN:
        raise ValueError("its base already stores keys and values in another form; choose one that stores arrays")
    return replace(base, storage=ThinKeys(ratio, window, recent))
