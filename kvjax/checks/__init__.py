"""Checks of arguments, and the messages that say what is accepted."""

from .arguments import (
    LARGEST,
    check_integers,
    check_one_kind,
    check_params,
    check_saved,
    check_truth,
    check_type,
    checked_size,
    dtype_of,
    index_of,
    is_finite,
    is_integer,
    is_number,
    path_of,
)
from .shown import bytes_text, counted, cut, did_you_mean, installs, shown, system_error

__all__ = [
    "LARGEST",
    "bytes_text",
    "check_integers",
    "check_one_kind",
    "check_params",
    "check_saved",
    "check_truth",
    "check_type",
    "checked_size",
    "counted",
    "cut",
    "did_you_mean",
    "dtype_of",
    "index_of",
    "installs",
    "is_finite",
    "is_integer",
    "is_number",
    "path_of",
    "shown",
    "system_error",
]
