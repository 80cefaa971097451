"""Checks of arguments that several functions share."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvjax.models import Decoder

LARGEST = 2**31 - 1  # of int32, the dtype of tokens, positions and numbers of entries


def is_integer(value: Any) -> bool:
    """Whether a value is an integer of Python or NumPy."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def check_size(name: str, value: Any) -> None:
    """Raises ValueError unless `value` is an integer in 1 .. LARGEST."""
    if not is_integer(value) or not 1 <= value <= LARGEST:
        raise ValueError(f"{name}={value!r}: expected an integer in 1 .. {LARGEST}")


def check_params(params: Any) -> None:
    """Raises ValueError unless `params` is a decoder."""
    if isinstance(params, tuple) and params and isinstance(params[0], Decoder):
        raise ValueError("params is a tuple: expected the decoder alone, as in params, tokenizer = kvjax.load(path)")
    if not isinstance(params, Decoder):
        raise ValueError(
            f"params is of type {type(params).__name__}: expected a Decoder, the first result of kvjax.load"
        )
