"""Attention functions that the decoder's layers call, one for each kind of call.

Each returns an `attend(layer, q, k, v, entries) -> (context, entries)`. The decoder threads the entries through its
layers; every layer's part is replaced once that layer has attended.
"""

from .borrow import Borrowing
from .mesh import over_heads, over_layers, over_rows
from .positions import expired, met_keys, positions_behind, rotated
from .prompt import Reading, ReadPlan, finished
from .replay import Replaying
from .step import RoomMaker, Stepping

__all__ = [
    "Borrowing",
    "ReadPlan",
    "Reading",
    "Replaying",
    "RoomMaker",
    "Stepping",
    "expired",
    "finished",
    "met_keys",
    "over_heads",
    "over_layers",
    "over_rows",
    "positions_behind",
    "rotated",
]
