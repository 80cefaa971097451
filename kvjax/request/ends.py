"""Finds the tokens that end an answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard

import numpy as np
from jaxtyping import Int

from kvjax.checks import counted, is_integer, shown
from kvjax.models import Decoder

EndTokens: TypeAlias = int | Sequence[int] | Sequence[Sequence[int]] | None

# The tokens that end a turn in published chat templates. gpt-oss ends messages within a turn with <|end|>.
TURN_ENDS = ("<end_of_turn>", "<turn|>", "<|im_end|>", "<|eot_id|>", "<|end|>", "<|end_of_turn|>", "<|eom_id|>")
MESSAGE_END, RETURN = "<|end|>", "<|return|>"  # of gpt-oss


def default_ends(params: Decoder, tokenizer: Any) -> tuple[int, ...]:
    """The end tokens that a checkpoint and a tokenizer state: `params.card`, `eos_token_id`, the turn's end.

    An id beyond the model's vocabulary is left out, because the model cannot generate it.
    """
    ends = [*params.card.end_tokens]
    if tokenizer is not None:
        ends += [] if tokenizer.eos_token_id is None else np.atleast_1d(tokenizer.eos_token_id).tolist()
        ends += turn_ends(tokenizer)
    return tuple(token for token in dict.fromkeys(ends) if token < params.config.vocab_size)


def turn_ends(tokenizer: Any) -> list[int]:
    """The known tokens of a chat template that end a turn."""
    template = getattr(tokenizer, "chat_template", None) or ""
    text = template if isinstance(template, str) else "".join(template.values())
    found = [name for name in TURN_ENDS if name in text and not (name == MESSAGE_END and RETURN in text)]
    ids = [tokenizer.convert_tokens_to_ids(name) for name in found]
    return [index for index, name in zip(ids, found, strict=True) if _is_token(tokenizer, index, name)]


def _is_token(tokenizer: Any, index: Any, name: str) -> bool:
    """Returns whether a name is one token; tokenizers give the id of the unknown token otherwise."""
    return is_integer(index) and tokenizer.convert_ids_to_tokens(index) == name


def end_tokens(eos: EndTokens, default: Sequence[int], batch: int, vocab_size: int) -> Int[np.ndarray, "B E"]:
    """The end tokens of each row, padded with -1; `default` for None. Raises ValueError for what are none."""
    eos = default if eos is None else eos
    eos = eos.tolist() if hasattr(eos, "tolist") else eos
    given: list[Any] = list(eos) if _has_items(eos) else [eos]
    given = [each.tolist() if hasattr(each, "tolist") else each for each in given]
    by_row = bool(given) and all(map(_has_items, given))
    rows = [list(row) for row in given] if by_row else [given] * batch
    if not all(is_integer(token) and 0 <= token < vocab_size for row in rows for token in row):
        raise ValueError(
            f"eos={shown(eos)}: expected a token id in 0 .. {vocab_size - 1}, a list of ids, or a list of ids per row"
        )
    if len(rows) != batch:
        raise ValueError(
            f"eos has {counted(len(rows), 'row')}: expected {batch}, the size of the batch, or ids for all rows"
        )
    ends = np.full((batch, max((len(row) for row in rows), default=0)), -1, np.int32)
    for padded, row in zip(ends, rows, strict=True):
        padded[: len(row)] = row
    return ends


def _has_items(value: Any) -> TypeGuard[Iterable[Any]]:
    """Returns whether a value is a list of others, such as a set; texts, bytes and dicts are none."""
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
