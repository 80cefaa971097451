"""The entries that a cache holds: fixed shapes, pytrees, no policies and no models.

Axis letters: B rows of the batch, H kv heads, S slots of a layer, D head size, L layers; of a pool, P lanes and T rows.
"""

from .coded import CodedEntries
from .entries import Entries, MakeRoom, StepAttention, Take, Usage
from .layers import Layers
from .overwrite import mark
from .packing import empty_pool, pack
from .paging import whole_pages
from .segments import Segments
from .settled import Settled
from .sizes import UNLIMITED, bucket, room_for
from .slots import Slots
from .thin import ThinEntries

__all__ = [
    "UNLIMITED",
    "CodedEntries",
    "Entries",
    "Layers",
    "MakeRoom",
    "Segments",
    "Settled",
    "Slots",
    "StepAttention",
    "Take",
    "ThinEntries",
    "Usage",
    "bucket",
    "empty_pool",
    "mark",
    "pack",
    "room_for",
    "whole_pages",
]
