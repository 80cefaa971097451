"""Seeing what a policy does: which entries each head holds of a text, and when it lets go of the others, as a page."""

from .merging import NOWHERE, SEVERAL
from .page import page
from .recording import Recording, record

__all__ = ["NOWHERE", "SEVERAL", "Recording", "page", "record"]
