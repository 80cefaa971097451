"""The statements of a checkpoint beside its weights and shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Suppressed(NamedTuple):
    """Token ids that are never drawn.

    Attributes:
        always: at no place of an answer.
        first: not as the first token of an answer.
    """

    always: tuple[int, ...] = ()
    first: tuple[int, ...] = ()


NONE_SUPPRESSED = Suppressed()
"""Every token may be chosen at every step."""


@dataclass(frozen=True)
class Card:
    """The statements of a checkpoint about generation, and its two files. It is static data of a `Decoder`.

    Attributes:
        end_tokens: the ids that end an answer.
        sampler: the default sampler, as text that `kvjax.decoding.sampling.parse` reads; None if nothing is said.
        suppressed: the ids that answers do not have, or do not begin with.
        ignored: `field=value` of what is asked for and not applied.
        bos_token: the id before a text, or None.
        pad_token: the id of padding, or None.
        config: the fields of config.json, as JSON; empty for other forms, such as GGUF.
        generation: the content of generation_config.json; empty if there is none.
    """

    end_tokens: tuple[int, ...] = ()
    sampler: str | None = None
    suppressed: Suppressed = NONE_SUPPRESSED
    ignored: tuple[str, ...] = ()
    bos_token: int | None = None
    pad_token: int | None = None
    config: str = ""
    generation: str = ""
