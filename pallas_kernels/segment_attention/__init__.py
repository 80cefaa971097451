"""Attention of few queries over segments of a pool, each as long as what it holds."""

from ..dispatch import dispatch
from . import reference
from .reference import PAGE, pages

segment_attention = dispatch(reference.segment_attention, "triton", "mosaic_tpu")

__all__ = ["PAGE", "pages", "segment_attention"]
