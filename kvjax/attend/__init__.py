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
from .twice import attending_once, in_array, once, runs_twice, twice

__all__ = [
    "Borrowing",
    "ReadPlan",
    "Reading",
    "Replaying",
    "RoomMaker",
    "Stepping",
    "attending_once",
    "expired",
    "finished",
    "in_array",
    "met_keys",
    "once",
    "over_heads",
    "over_layers",
    "over_rows",
    "positions_behind",
    "rotated",
    "runs_twice",
    "twice",
]
