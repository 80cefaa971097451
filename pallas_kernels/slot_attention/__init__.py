"""Attention of one or a few query rows over the slots of a cache."""

from ..dispatch import dispatch
from . import reference
from .asked import Asked
from .reference import SlotAttention

slot_attention = dispatch(reference.slot_attention, "triton", "mosaic_gpu", "mosaic_tpu", "xla")

__all__ = ["Asked", "SlotAttention", "slot_attention"]
