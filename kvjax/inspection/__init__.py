"""Records which entries each head retains and when it evicts the others, and shows the recording as a page."""

from .merging import NOWHERE, SEVERAL
from .page import page
from .recording import Recording, record

__all__ = ["NOWHERE", "SEVERAL", "Recording", "page", "record"]
