"""Checks of arguments, and the messages that say what is accepted."""

from .arguments import (
    LARGEST,
    check_integers,
    check_one_kind,
    check_params,
    check_path,
    check_saved,
    check_size,
    check_truth,
    check_type,
    dtype_of,
    index_of,
    is_finite,
    is_integer,
    is_number,
)
from .shown import bytes_text, counted, cut, did_you_mean, installs, shown, system_error

__all__ = [
    "LARGEST",
    "bytes_text",
    "check_integers",
    "check_one_kind",
    "check_params",
    "check_path",
    "check_saved",
    "check_size",
    "check_truth",
    "check_type",
    "counted",
    "cut",
    "did_you_mean",
    "dtype_of",
    "index_of",
    "installs",
    "is_finite",
    "is_integer",
    "is_number",
    "shown",
    "system_error",
]
