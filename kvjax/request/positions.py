"""Positions beyond those that a model was trained for."""

from __future__ import annotations

from kvjax.models import DecoderConfig


def beyond(config: DecoderConfig, longest: int, asked: str) -> str | None:
    """The warning for a text that is longer than those of the model's training; None if it is not longer.

    Args:
        longest: the number of tokens of prompt and answer.
        asked: what reaches this position, with its verb, such as "the request reaches".
    """
    if longest <= config.max_positions:
        return None
    return (
        f"{asked} position {longest} and the model was trained for {config.max_positions} ({config.rope}); RoPE "
        "extrapolates beyond that, but answers usually degrade"
    )
