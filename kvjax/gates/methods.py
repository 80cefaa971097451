"""The methods whose gates can be trained: what each minimises, and the settings that it alone has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvjax import policies
from kvjax.checks import shown
from kvjax.files.texts import Stream
from kvjax.models import Decoder
from kvjax.policy import check_integer

from .lookahead import divergence
from .mixing import distillation
from .objective import Objective, Recipe
from .reconstruction import cross_entropy, log_scores
from .restoration import restoration


@dataclass(frozen=True)
class Training:
    """The training of the gates of a method.

    Attributes:
        objective: makes what is minimised, from the model, the recipe, the stream, the tokenizer and the options.
        learning_rate: the default of the recipe's.
        options: the settings that not all methods have, each with the smallest integer that it accepts; None for a
            policy as text.
    """

    objective: Callable[..., Objective]
    learning_rate: float
    options: Mapping[str, int | None] = field(default_factory=dict)


def _of_width(params: Decoder, recipe: Recipe, stream: Stream, tokenizer: Any, inner: int | None = None) -> Objective:
    """`log_scores` for networks of this width; 0 is a linear network, and None an eighth of the hidden size."""
    width = max(params.config.hidden_size // 8, 1) if inner is None else inner or None
    return log_scores(params, recipe, stream, tokenizer, width)


TRAININGS: dict[str, Training] = {
    "kvzap": Training(_of_width, 1e-3, {"inner": 0}),
    "fastkvzip": Training(cross_entropy, 1e-3),
    "duo_attention": Training(distillation, 0.02, {"sinks": 0, "recent": 1}),
    "lookaheadkv": Training(divergence, 1e-3, {"tokens": 1, "rank": 1, "answer": 1}),
    "restorekv": Training(restoration, 1e-3, {"tokens": 1, "rank": 1, "question": 1, "answer": 1, "base": None}),
}


def check_options(method: str, options: Mapping[str, int | str]) -> None:
    """Raises ValueError for an option that the method does not have, or a value that it does not accept."""
    for name, value in options.items():
        owners = [owner for owner, own in TRAININGS.items() if name in own.options]
        if method not in owners:
            alone = f"{' and '.join(owners)} alone {'have' if len(owners) > 1 else 'has'}"
            raise ValueError(f"{name}={shown(value)} with method={method}: expected no {name}, which {alone}")
        if (least := TRAININGS[method].options[name]) is None:
            policies.parse(str(value))
        else:
            check_integer(name, value, least)
