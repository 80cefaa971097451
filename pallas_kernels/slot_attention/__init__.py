"""Attention of one or a few query rows over the slots of a cache."""

from ..dispatch import dispatch
from . import reference
from .reference import Asked, SlotAttention

slot_attention = dispatch(reference.slot_attention, "triton", "mosaic_gpu", "mosaic_tpu")

__all__ = ["Asked", "SlotAttention", "slot_attention"]
