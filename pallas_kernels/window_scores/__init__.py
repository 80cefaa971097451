"""The attention that each key received from a window of queries: the score of most policies."""

from ..dispatch import dispatch
from . import reference
from .reference import Reduction

window_scores = dispatch(reference.window_scores, "triton", "mosaic_tpu")

__all__ = ["Reduction", "window_scores"]
