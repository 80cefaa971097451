"""The tensors of a text decoder, of a checkpoint that may also hold what takes images."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvjax.checkpoint.tensors import Stored
from kvjax.models import DecoderConfig, family


def text_tensors(
    tensors: Mapping[str, Stored], unreadable: set[str] | None, config: DecoderConfig
) -> tuple[dict[str, Stored], set[str] | None]:
    """Returns the tensors under the names of the family, without those that it leaves unread.

    Args:
        tensors, unreadable: from `open_tensors`.
        config: of the text decoder.
    """
    named: Callable[[str], str | None] = getattr(family(config.family), "text_name", str)
    pairs = ((named(name), tensor) for name, tensor in tensors.items())
    found = {name: tensor for name, tensor in pairs if name is not None}
    return found, None if unreadable is None else {name for name in map(named, unreadable) if name is not None}
