"""Attention of many new tokens over cached entries and, causally, over themselves, with its log-sum-exp."""

from ..dispatch import dispatch
from . import reference

prompt_attention = dispatch(reference.prompt_attention, "cudnn", "triton", "mosaic_tpu", "xla")

__all__ = ["prompt_attention"]
