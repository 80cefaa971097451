"""Entries whose keys have lost channels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.pallas_kernels import slot_attention


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
