"""Prompt attention that also returns what each key received, in one pass over the keys."""

from ..dispatch import dispatch, implementation
from ..window_scores import Reduction
from . import reference

scored_attention = dispatch(reference.scored_attention, "xla")

__all__ = ["in_one_pass", "scored_attention"]


def in_one_pass(reduction: Reduction) -> bool:
    """Returns whether `scored_attention` serves a reduction here, so that `window_scores` need not run after it.

    It shares the code of `prompt_attention` in XLA. Where a kernel computes that, contexts are the kernel's.
    """
    return implementation("prompt_attention").name in ("xla", "reference") and reduction.rows != "mean"
