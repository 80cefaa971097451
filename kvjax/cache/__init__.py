"""The entries that a cache holds: fixed shapes, pytrees, no policies and no models.

Axis letters: B rows of the batch, H kv heads, S slots of a layer, D head size, L layers; of a pool, P lanes and T rows.
"""

from .entries import Entries, StepQuery, Take, Usage, statics
from .from_keys import FromKeys, Values
from .layers import Layers
from .packing import empty_pool, planned_pool
from .segments import Segments
from .sizes import UNLIMITED, bucket, room_for, rows_to_grow
from .slots import Settled, Slots, mark

__all__ = [
    "UNLIMITED",
    "Entries",
    "FromKeys",
    "Layers",
    "Segments",
    "Settled",
    "Slots",
    "StepQuery",
    "Take",
    "Usage",
    "Values",
    "bucket",
    "empty_pool",
    "mark",
    "planned_pool",
    "room_for",
    "rows_to_grow",
    "statics",
]
