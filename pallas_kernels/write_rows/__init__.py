"""Overwrites of one entry per kv head, in slots or segments."""

from ..dispatch import dispatch
from . import reference
from .reference import set_slots

write_rows = dispatch(reference.write_rows, "mosaic_tpu")

__all__ = ["set_slots", "write_rows"]
