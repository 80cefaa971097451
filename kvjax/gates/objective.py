"""Objectives of the training of gates, and the settings of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from jaxtyping import Array, Float

from kvjax.checks import checked_size
from kvjax.models import Decoder
from kvjax.policy import check_number

from .forms import Tensors

Weights: TypeAlias = tuple[Tensors, ...]  # the tensors of each layer
ANY_POSITIVE = "a number above 0"


@dataclass(frozen=True)
class Recipe:
    """The settings of a run that all methods have. Batches are functions of the seed and the step.

    Attributes:
        steps: the number of batches.
        batch: the number of texts per batch.
        length: the number of tokens per text.
        learning_rate: the largest one, after a linear warm-up of a twentieth of the steps; it falls to 0 as a cosine.
        seed: of the initial weights and of the texts.
        distinct: the number of different batches, which steps use in turn; None: each step has its own.

    Raises:
        ValueError: for a value that is not accepted.
    """

    steps: int
    batch: int
    length: int
    learning_rate: float
    seed: int = 0
    distinct: int | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "length"):
            checked_size(name, getattr(self, name))
        check_number("learning_rate", self.learning_rate, ANY_POSITIVE, lambda x: x > 0)
        check_number("seed", self.seed, "an integer in 0 .. 2**31 - 1", lambda x: x == int(x) and 0 <= x < 2**31)
        if self.distinct is not None:
            checked_size("distinct", self.distinct)
            if self.distinct > self.steps:
                raise ValueError(
                    f"distinct={self.distinct} with steps={self.steps}: expected at most one batch per step"
                )


@dataclass(frozen=True)
class Objective:
    """The loss that a method minimises.

    Attributes:
        method: a key of `FORMS`.
        sizes: of the method's tensors.
        initial: makes the weights that training begins with.
        batch: makes the arrays of the batch of a step.
        loss: of weights on a batch.
        bounded: what becomes of the weights after each step.
        settings: what the method alone has, by name. An interrupted run goes on with the same settings only, and the
            card lists them.
    """

    method: str
    sizes: Mapping[str, int | None]
    initial: Callable[[], Weights]
    batch: Callable[[int], tuple[Any, ...]]
    loss: Callable[[Weights, Decoder, Any], Float[Array, ""]]
    bounded: Callable[[Weights], Weights] = lambda weights: weights
    settings: Mapping[str, Any] = field(default_factory=dict)
