"""Attention and scoring kernels. They know no models and no policies.

An operation is a folder. `reference.py` defines its result in plain float32 `jax.numpy`; the other modules, one per
backend, compute it. A folder that has the name of a backend holds what the kernels of several operations share.

Axis letters, in every signature of this package:

    B   batch rows
    Hq  query heads
    H   kv heads
    G   query heads per kv head, the group: G = Hq / H
    W   query rows: 1 while decoding, the observation window for a score
    X   extra query rows, see `Asked`
    R   query rows of one kv head, group-major: R = G W
    N   new tokens, or the tokens of a prompt
    M   entries that are attended to or scored
    S   slots per kv head
    P   lanes of a pool, each with the segments of H / P consecutive kv heads
    T   rows per lane of a pool
    D   head size, in channels
    E   hidden size of the model; no kernel sees it
    I   inputs of a matrix, O its outputs, in a product

One rule says what a query sees: a key at position p is visible from position t if 0 <= p <= t, and t - p < window if
the model has a sliding window. `window` is always that sliding window. Empty slots and padding have position -1, so
they neither see nor are seen.
"""

from .arrays import after_last, fold
from .by_group import Times, by_group
from .dispatch import Implementation, implementations, mapped, use
from .forms import apart, dot_products, matmul, shared, weighted_sum
from .grouped_product import grouped_product
from .lowest_tokens import lowest_tokens
from .overwrites import change_block, set_entries, set_slot
from .prompt_attention import prompt_attention
from .quantized import QuantizedArray, Stored, plain, updated
from .scored_attention import in_one_pass, scored_attention
from .segment_attention import PAGE, SegmentAttention, pages, segment_attention
from .slot_attention import Asked, SlotAttention, slot_attention
from .softmax import capped, finite_or_zero, joined
from .top_tokens import compact, top_counts, top_tokens
from .traced_once import traced_once
from .visibility import visible
from .window_scores import Reduction, window_scores
from .write_rows import set_slots, write_rows

__all__ = [
    "PAGE",
    "Asked",
    "Implementation",
    "QuantizedArray",
    "Reduction",
    "SegmentAttention",
    "SlotAttention",
    "Stored",
    "Times",
    "after_last",
    "apart",
    "by_group",
    "capped",
    "change_block",
    "compact",
    "dot_products",
    "finite_or_zero",
    "fold",
    "grouped_product",
    "implementations",
    "in_one_pass",
    "joined",
    "lowest_tokens",
    "mapped",
    "matmul",
    "pages",
    "plain",
    "prompt_attention",
    "scored_attention",
    "segment_attention",
    "set_entries",
    "set_slot",
    "set_slots",
    "shared",
    "slot_attention",
    "top_counts",
    "top_tokens",
    "traced_once",
    "updated",
    "use",
    "visible",
    "weighted_sum",
    "window_scores",
    "write_rows",
]
