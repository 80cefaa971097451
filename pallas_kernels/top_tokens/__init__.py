"""The exact top-k scores of each head, with ties to the earlier position."""

from ..dispatch import dispatch
from . import reference
from .xla import compact, top_counts

top_tokens = dispatch(reference.top_tokens, "triton", "mosaic_tpu", "xla")

__all__ = ["compact", "top_counts", "top_tokens"]
