"""What a storage may settle the entries of a prompt into. It knows no policy."""

from __future__ import annotations

from typing import Any, Protocol

from jaxtyping import Array, Float, Int


class Settled(Protocol):
    """Entries beside those in slots, in a form of their own: a pytree whose leaves have axes [B, H, ...].

    Nothing is written to them any more, and none of them leaves.
    """

    @property
    def positions(self) -> Int[Array, "B H T"]:
        """The token position of each entry, int32, -1 where there is none."""
        ...

    def plain(self) -> tuple[Float[Array, "B H T D"], Float[Array, "B H T D"]]:
        """Keys and values as arrays."""
        ...

    def attention(
        self, q: Float[Array, "B Hq W D"], positions: Int[Array, "B W"], **logits: Any
    ) -> tuple[Float[Array, "B Hq W D"], Float[Array, "B Hq W"]]:
        """The context and the log-sum-exp of W query rows; arguments are those of `slot_attention`."""
        ...
