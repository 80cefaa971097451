"""The lowest scores of each head: what a decode step evicts."""

from ..dispatch import dispatch
from . import reference

lowest_tokens = dispatch(reference.lowest_tokens, "triton", "xla")

__all__ = ["lowest_tokens"]
