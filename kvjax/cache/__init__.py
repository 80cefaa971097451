"""The entries that a cache holds: fixed shapes, pytrees, no policies and no models.

Axis letters: B rows of the batch, H kv heads, S slots of a layer, D head size, L layers; of a pool, P lanes and T rows.
"""

from .entries import Entries, MakeRoom, StepAttention, StepQuery, Take, Usage, statics
from .from_keys import FromKeys, Values
from .layers import Layers
from .packing import empty_pool, planned_pool
from .paging import whole_pages
from .segments import Segments
from .sizes import UNLIMITED, bucket, room_for
from .slots import Settled, Slots, mark

__all__ = [
    "UNLIMITED",
    "Entries",
    "FromKeys",
    "Layers",
    "MakeRoom",
    "Segments",
    "Settled",
    "Slots",
    "StepAttention",
    "StepQuery",
    "Take",
    "Usage",
    "Values",
    "bucket",
    "empty_pool",
    "mark",
    "planned_pool",
    "room_for",
    "statics",
    "whole_pages",
]
