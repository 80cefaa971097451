"""Where queries meet a cache: attention functions that the decoder's layers call, one for each kind of call.

Each returns an `attend(layer, q, k, v, entries) -> (context, entries)`. The decoder threads the entries through its
layers; every layer's part is replaced once that layer has attended.
"""

from .differentiable import differentiable
from .mesh import over_heads, over_layers, over_rows
from .positions import positions_behind
from .prompt import ReadPlan, finished, reading
from .replay import replaying
from .rotation import expired, met_keys, rotated
from .step import RoomMaker, stepping
from .twice import pays, twice

__all__ = [
    "ReadPlan",
    "RoomMaker",
    "differentiable",
    "expired",
    "finished",
    "met_keys",
    "over_heads",
    "over_layers",
    "over_rows",
    "pays",
    "positions_behind",
    "reading",
    "replaying",
    "rotated",
    "stepping",
    "twice",
]
