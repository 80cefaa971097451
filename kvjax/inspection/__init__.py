"""Shows which entries each head retains: `draw` as a picture of a cache, `record` and `page` token by token."""

from .drawing import draw
from .merging import NOWHERE, SEVERAL
from .page import page
from .recording import Recording, record

__all__ = ["NOWHERE", "SEVERAL", "Recording", "draw", "page", "record"]
