"""Kernels with a plain reference each. They know arrays and positions, not models or policies.

One rule says what a query may see, everywhere: a key at position p is visible from position t if 0 <= p <= t, and
t - p < window where there is a sliding window. Empty slots and padding have position -1, so they see and show nothing.
"""

from .dispatch import Implementation, implementations, use
from .prompt_attention import prompt_attention
from .quantized import QuantizedArray, Stored, plain, updated
from .segment_attention import PAGE, pages, segment_attention
from .slot_attention import Asked, SlotAttention, slot_attention
from .tiling import after_last, fold
from .top_tokens import compact, top_counts, top_tokens
from .window_scores import Reduction, window_scores

__all__ = [
    "PAGE",
    "Asked",
    "Implementation",
    "QuantizedArray",
    "Reduction",
    "SlotAttention",
    "Stored",
    "after_last",
    "compact",
    "fold",
    "implementations",
    "pages",
    "plain",
    "prompt_attention",
    "segment_attention",
    "slot_attention",
    "top_counts",
    "top_tokens",
    "updated",
    "use",
    "window_scores",
]
