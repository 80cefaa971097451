"""An engine on several hosts: process 0 leads, and the others run the same programs in the same order.

The leader announces each piece of work before it begins it. The messages go through the key-value store with which
`jax.distributed` connects the processes, so they never wait for a device.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

import jax
from flax.serialization import msgpack_restore, msgpack_serialize
from jax._src import distributed  # the store has no public name
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int, Int32

from kvjax.decoding.row_guides import RowGuides
from kvjax.runtime.modes import own_modes

from .device import Device, Read
from .errors import EngineClosedError, TooLongError
from .resident import Start
from .reuse import Wanted

if TYPE_CHECKING:
    import numpy as np

    from .loop import Loop

BLOCK = 256  # messages that are kept until everybody has received them
POLL = 10_000  # milliseconds that a process waits for a message before it looks again
PATIENCE = 600_000  # milliseconds that processes wait for the others at the end of a block
_engines = count()


def check_hosts(mesh: Mesh) -> None:
    """Raises ValueError for a mesh over some of several processes, of which the others would wait for nothing."""
    held = {device.process_index for device in mesh.devices.flat}
    if len(held) > 1 and len(held) < jax.process_count():
        raise ValueError(
            f"the parameters lie on devices of {len(held)} of {jax.process_count()} processes: expected a mesh over "
            "all processes, or over this one"
        )


class Channel:
    """Messages from process 0 to all others, each of which receives all of them in order.

    A message is a dict of numbers, texts, NumPy arrays, and lists of these.
    """

    def __init__(self) -> None:
        """All processes make their channels in the same order."""
        self._name = f"kvjax/engine/{next(_engines)}"
        self._client: Any = distributed.global_state.client
        self._count = 0

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message. At the end of a block it waits until the others have received the block."""
        self._client.key_value_set_bytes(self._key, msgpack_serialize(message))
        if self._next():
            self._client.key_value_delete(f"{self._name}/{self._count // BLOCK - 1}/")

    def receive(self) -> dict[str, Any]:
        """Waits for the next message."""
        while True:
            try:
                data = self._client.blocking_key_value_get_bytes(self._key, POLL)
                break
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
        self._next()
        return msgpack_restore(data)

    @property
    def _key(self) -> str:
        return f"{self._name}/{self._count // BLOCK}/{self._count % BLOCK}"

    def _next(self) -> bool:
        """Counts a message. Returns whether all have now received all messages of the block before."""
        first = self._count >= BLOCK and self._count % BLOCK == 0
        if first:
            self._client.wait_at_barrier(f"{self._name}/{self._count}", PATIENCE)
        self._count += 1
        return first


class Leader:
    """The device of process 0, whose methods have all other processes do the same."""

    def __init__(self, device: Device, channel: Channel) -> None:
        self._device, self._channel = device, channel

    def together(self, waiting: Sequence[Wanted]) -> int:
        """Does what `Device.together` does, which runs nothing."""
        return self._device.together(waiting)

    def read(self, requests: Sequence[Wanted]) -> Generator[None, None, Read]:
        """Does what `Device.read` does."""
        units = self._device.read(requests)
        self._channel.send({"do": "read", "requests": [one._asdict() for one in requests]})
        while True:
            try:
                next(units)
            except StopIteration as stop:
                return stop.value
            yield
            self._channel.send({"do": "unit"})

    def admit(
        self, read: Read, start: Start, rows: Sequence[int], guides: RowGuides | None = None
    ) -> Int32[Array, "R _ 1"]:
        """Does what `Device.admit` does."""
        arrays = {"start": jax.tree.leaves(start), "guides": jax.tree.leaves(guides)}
        self._channel.send({"do": "admit", "rows": list(rows), **arrays})
        return self._device.admit(read, start, rows, guides)

    def advance(self, wanted: Bool[np.ndarray, "B"], most: int) -> tuple[Int32[Array, "3 B K"], Int[Array, ""]]:
        """Does what `Device.advance` does."""
        self._channel.send({"do": "advance", "wanted": wanted, "most": most})
        return self._device.advance(wanted, most)

    def advance_guided(self, wanted: Bool[np.ndarray, "B"], guides: RowGuides) -> Int32[Array, "R B 1"]:
        """Does what `Device.advance_guided` does."""
        self._channel.send({"do": "advance guided", "wanted": wanted, "guides": jax.tree.leaves(guides)})
        return self._device.advance_guided(wanted, guides)

    def keep(self, tokens: Int[np.ndarray, "N"], row: int) -> None:
        """Does what `Device.keep` does."""
        self._channel.send({"do": "keep", "tokens": tokens, "row": row})
        self._device.keep(tokens, row)

    def lead(self, loop: Loop) -> None:
        """Runs a loop to its end, and tells the others of it."""
        loop.run()
        self._channel.send({"do": "end", "error": None if loop.error is None else str(loop.error)})


@own_modes()
def follow(device: Device, channel: Channel, example: Start) -> None:
    """Does what process 0 does, until it ends.

    Args:
        example: the start of any request.

    Raises:
        EngineClosedError: the loop of process 0 has failed.
    """
    units: Generator[None, None, Read] | None = None
    read: Read | None = None
    while True:
        message = channel.receive()
        match message["do"]:
            case "read" | "unit" as kind:
                if kind == "read":
                    units = device.read([Wanted(**one) for one in message["requests"]])
                assert units is not None
                try:
                    next(units)
                except StopIteration as stop:
                    read = stop.value
                except TooLongError:  # process 0 tells it to the client
                    units = None
            case "keep":
                device.keep(message["tokens"], message["row"])
            case "admit":
                assert read is not None
                start = jax.tree.unflatten(jax.tree.structure(example), message["start"])
                guides = RowGuides(*message["guides"]) if message["guides"] else None
                device.admit(read, start, message["rows"], guides)
                units = read = None
            case "advance":
                device.advance(message["wanted"], message["most"])
            case "advance guided":
                device.advance_guided(message["wanted"], RowGuides(*message["guides"]))
            case "end":
                if message["error"] is not None:
                    raise EngineClosedError(f"on process 0, {message['error']}")
                return
