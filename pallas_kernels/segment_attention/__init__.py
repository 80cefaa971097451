"""Attention of one or a few query rows over the segments of a pool. Each segment has a length of its own."""

from ..dispatch import dispatch
from . import reference
from .pages import PAGE, pages
from .reference import SegmentAttention

segment_attention = dispatch(reference.segment_attention, "triton", "mosaic_gpu", "mosaic_tpu", "xla")

__all__ = ["PAGE", "SegmentAttention", "pages", "segment_attention"]
