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
    text_name: Callable[[str, DecoderConfig], str | None] = getattr(family(config.family), "text_name", _same)
    named = {name: text_name(name, config) for name in {*tensors, *(unreadable or ())}}
    found = {own: tensor for name, tensor in tensors.items() if (own := named[name]) is not None}
    return found, None if unreadable is None else {own for name in unreadable if (own := named[name]) is not None}


def _same(name: str, config: DecoderConfig) -> str:
    return name
