"""Attention of one decoded token a row over its cache slots."""

from ..dispatch import dispatch
from . import reference

slot_attention = dispatch(reference.slot_attention, "triton", "mosaic_tpu")

__all__ = ["slot_attention"]
