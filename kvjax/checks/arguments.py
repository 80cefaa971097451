"""Checks of arguments that several functions share."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.models import Decoder, DecoderConfig

from .shown import shown

LONGEST_PATH = 4096  # characters; Linux takes as many bytes
LARGEST = 2**31 - 1  # of int32, the dtype of tokens, positions and numbers of entries


def is_integer(value: Any) -> bool:
    """Returns whether a value is an integer of Python or NumPy."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_finite(value: Any) -> bool:
    """Returns whether a number is finite as a float, which integers of more than 308 digits are not."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def is_number(value: Any) -> TypeGuard[float]:
    """Returns whether a value is a finite integer or float of Python."""
    return isinstance(value, int | float) and not isinstance(value, bool) and is_finite(value)


def checked_size(name: str, value: Any) -> int:
    """The integer in 1 .. LARGEST that `value` is, as one of Python, whose sums do not overflow. Raises ValueError."""
    if not is_integer(value) or not 1 <= value <= LARGEST:
        raise ValueError(f"{name}={shown(value)}: expected an integer in 1 .. {LARGEST}")
    return int(value)


def index_of(name: str, value: Any, count: int) -> int:
    """The index in 0 .. count - 1 that `value` means, where negative integers count from the end. Raises ValueError."""
    if not is_integer(value) or not -count <= value < count:
        raise ValueError(f"{name}={shown(value)}: expected an integer in 0 .. {count - 1}, or in {-count} .. -1")
    return int(value) % count


def check_truth(name: str, value: Any) -> None:
    """Raises ValueError unless `value` is True or False: a text such as "no" would count as True."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={shown(value)}: expected True or False")


def check_type(name: str, value: Any, kind: type) -> None:
    """Raises ValueError unless `value` is a `kind`."""
    if not isinstance(value, kind):
        raise ValueError(f"{name} is of type {type(value).__name__}: expected a {kind.__name__}")


def path_of(name: str, value: Any) -> Path:
    """The path that `value` means, in which ~ is a home folder. Raises ValueError."""
    if not isinstance(value, str | os.PathLike):
        raise ValueError(f"{name} is of type {type(value).__name__}: expected a path")
    if len(os.fspath(value)) > LONGEST_PATH:
        raise ValueError(f"{name}={shown(value)}: expected a path of at most {LONGEST_PATH} characters")
    if "\0" in str(value):
        raise ValueError(f"{name}={shown(value)}: expected a path without the character of code 0")
    try:
        return Path(value).expanduser()
    except RuntimeError:
        raise ValueError(f"{name}={shown(value)}: expected the home folder of a user of this system") from None


def dtype_of(value: Any) -> jnp.dtype:
    """The dtype that `value` names. Raises ValueError."""
    try:
        return jnp.dtype(value)
    except TypeError:
        raise ValueError(f"dtype={shown(value)}: expected a dtype, such as 'bfloat16'") from None


def check_saved(tokenizer: Any) -> None:
    """Raises ValueError unless `tokenizer` is None or can be written."""
    if tokenizer is not None and not hasattr(tokenizer, "save_pretrained"):
        raise ValueError(
            f"tokenizer is of type {type(tokenizer).__name__}: expected a tokenizer of transformers or None"
        )


def check_integers(name: str, value: Any) -> None:
    """Raises ValueError for an array, or what can be one, that does not hold integers of 32 bits.

    Of an array on a device only the dtype is looked at, which needs no transfer.
    """
    if isinstance(value, jax.Array):
        if value.dtype.kind not in "iu":
            raise ValueError(f"{name} is a JAX array of dtype {value.dtype}: expected integers")
        return
    try:
        given = np.asarray(value)
    except (ValueError, OverflowError):
        given = np.asarray(None)
    if given.dtype.kind not in "iu" or (given.size and not -LARGEST <= given.min() <= given.max() <= LARGEST):
        raise ValueError(f"{name}={shown(value)}: expected integers")


def check_params(params: Any) -> None:
    """Raises ValueError unless `params` is a decoder of arrays."""
    if isinstance(params, tuple) and params and isinstance(params[0], Decoder):
        raise ValueError("params is a tuple: expected the decoder alone, as in params, tokenizer = kvjax.load(path)")
    if not isinstance(params, Decoder):
        raise ValueError(
            f"params is of type {type(params).__name__}: expected a Decoder, the first result of kvjax.load"
        )
    if isinstance(params.embed.get_raw_value(), jax.ShapeDtypeStruct):  # all leaves take long to list
        raise ValueError("params has shapes in place of arrays: expected a Decoder of arrays")


def check_one_kind(what: str, config: DecoderConfig) -> None:
    """Raises ValueError unless all layers of a model have entries, and kv heads of one number and size."""
    kinds, readers = config.kinds_of_heads, len(config.sources)
    if readers:
        raise ValueError(
            f"{what} for a model whose last layers, {readers}, read the entries of others: expected a model without "
            "such layers"
        )
    if len(kinds) > 1:
        each = " and ".join(map(str, kinds))
        raise ValueError(f"{what} for layers with kv heads of several kinds, {each}: expected a model with one kind")
