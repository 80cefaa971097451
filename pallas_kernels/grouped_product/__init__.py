"""Products of sorted rows, each group of them with a matrix of its own."""

from ..dispatch import dispatch
from . import reference

grouped_product = dispatch(reference.grouped_product, "triton", "xla")

__all__ = ["grouped_product"]
