"""Prompt attention with what each key received, in plain XLA; see `blocked`."""

from ..xla.blocked import blocked as scored_attention

__all__ = ["scored_attention"]
