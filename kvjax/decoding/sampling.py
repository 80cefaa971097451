"""Samplers, which draw the next token from the logits.

A sampler is a pure function of (logits, keys, seen). It is a frozen dataclass, so it can be a static argument of
`jax.jit`. The steps have the order of transformers: repetition penalty, temperature, top-k, top-p, min-p, draw. At
least one token always remains. Tokens that tie at a threshold are all kept or all removed.

Axes: B batch, N tokens, V vocabulary.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, Key

from kvjax.checks import did_you_mean, is_finite, shown
from kvjax.models import Suppressed

FLOAT32 = jnp.finfo(jnp.float32)


def mark_seen(seen: Bool[Array, "B V"], tokens: Int[Array, "B N"], valid: Bool[Array, "B N"]) -> Bool[Array, "B V"]:
    """Adds the valid tokens of each row to the tokens that the row has seen."""
    vocabulary = seen.shape[-1]
    rows = jnp.arange(seen.shape[0])[:, None]
    return seen.at[rows, jnp.where(valid, tokens, vocabulary)].set(True, mode="drop")


def suppress(logits: Float[Array, "B V"], suppressed: Suppressed, begins: Bool[Array, "B"]) -> Float[Array, "B V"]:
    """Sets the logits of suppressed tokens to -inf, in rows that begin an answer also those of `suppressed.first`."""
    if suppressed.always:
        logits = logits.at[:, np.array(suppressed.always)].set(-jnp.inf)
    if suppressed.first:
        first = np.array(suppressed.first)
        logits = logits.at[:, first].set(jnp.where(begins[:, None], -jnp.inf, logits[:, first]))
    return logits


def log_probability(logits: Float[Array, "B V"], tokens: Int[Array, "B"]) -> Float32[Array, "B"]:
    """Returns the natural log-probability of each row's token under softmax(logits).

    `logits` are the model's own, before any sampler.
    """
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)


def most_probable(logits: Float[Array, "B V"]) -> Int32[Array, "B"]:
    """The token with the largest logit of each row, and the first of equal ones. NaN exceeds all finite ones."""
    return jax.lax.argmax(logits, axis=1, index_dtype=jnp.int32)


def penalize_repetition(
    logits: Float32[Array, "B V"], seen: Bool[Array, "B V"], penalty: float | Float32[Array, "B 1"]
) -> Float32[Array, "B V"]:
    """Applies the repetition penalty of CTRL (arXiv 1909.05858) to seen tokens.

    It divides their positive logits by `penalty`, a normal float32 number > 0, and multiplies their negative logits by
    it. The results are finite.
    """
    penalized = jnp.where(logits < 0, logits * penalty, logits / penalty)
    return jnp.where(seen, jnp.clip(penalized, -FLOAT32.max, FLOAT32.max), logits)


def tempered(logits: Float32[Array, "B V"], temperature: float | Float32[Array, "B 1"]) -> Float32[Array, "B V"]:
    """Shifts the largest logit of each row to 0 and divides by the temperature, a normal float32 number > 0."""
    # The shift comes first, so that a small temperature does not overflow.
    return (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature


def keep_top_k(logits: Float32[Array, "B V"], k: int) -> Float32[Array, "B V"]:
    """Keeps the `k` largest logits of each row and those that tie with the k-th; sets the others to -inf."""
    largest, _ = jax.lax.top_k(logits, min(k, logits.shape[-1]))
    # The minimum of `largest` is its last entry. XLA on the CPU merges a slice of the last entry into the top-k, and
    # then sorts whole rows.
    return jnp.where(logits >= jnp.min(largest, axis=-1, keepdims=True), logits, -jnp.inf)


def keep_top_p(logits: Float32[Array, "B V"], p: float | Float32[Array, "B 1"]) -> Float32[Array, "B V"]:
    """Nucleus sampling (arXiv 1904.09751): keeps a token if the more probable tokens sum to less than `p`.

    The kept set is the smallest set of the most probable tokens that reaches `p`, plus the tokens that tie with its
    least probable member. The others are set to -inf.
    """
    probabilities = jax.nn.softmax(logits, axis=-1)
    # Non-negative floats have the same order as their bits, so a bisection on the bits finds the exact threshold with
    # 31 sums. A sort of 128k logits takes 25 times as long on a CPU.
    bits = jax.lax.bitcast_convert_type(probabilities, jnp.int32)

    def halve(_: int, bounds: tuple[Int32[Array, "B 1"], ...]) -> tuple[Int32[Array, "B 1"], ...]:
        low, high = bounds
        middle = low + (high - low) // 2
        above = jnp.sum(probabilities, axis=-1, keepdims=True, where=bits > middle)
        return jnp.where(above < p, low, middle + 1), jnp.where(above < p, middle, high)

    zero = jnp.zeros_like(bits[:, :1])
    one = jax.lax.bitcast_convert_type(jnp.float32(1), jnp.int32)
    threshold, _ = jax.lax.fori_loop(0, 31, halve, (zero, zero + one))
    threshold = jnp.minimum(threshold, jnp.max(bits, axis=-1, keepdims=True))  # of a `p` that is 0 in float32
    return jnp.where(bits >= threshold, logits, -jnp.inf)


def keep_min_p(logits: Float32[Array, "B V"], log_p: float | Float32[Array, "B 1"]) -> Float32[Array, "B V"]:
    """Min-p (arXiv 2407.01082): keeps the tokens that are at least exp(`log_p`) times as probable as the best one."""
    floor = jnp.max(logits, axis=-1, keepdims=True) + log_p
    return jnp.where(logits >= floor, logits, -jnp.inf)


class Settings(NamedTuple):
    """A sampler as numbers, in the form in which the steps take them. A number that changes nothing stands for None.

    Attributes:
        greedy: whether the most probable token is taken. Temperature and filters then have no part.
        temperature: a normal float32 number > 0.
        top_k: 0 keeps all.
        top_p: infinity keeps all.
        log_min_p: the natural logarithm of min-p; -inf keeps all.
        penalty: a normal float32 number > 0.
    """

    greedy: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = math.inf
    log_min_p: float = -math.inf
    penalty: float = 1.0


def _normal(x: float) -> float:
    """The nearest number to x > 0 that is neither 0 nor infinite in float32. Devices round subnormals to 0."""
    return min(max(x, float(FLOAT32.tiny)), float(FLOAT32.max))


def _require(name: str, value: Any, valid: Callable[[Any], bool], accepted: str, integral: bool = False) -> None:
    """Raises ValueError unless `value` is a finite number for which `valid` holds."""
    is_number = isinstance(value, Integral if integral else Real) and not isinstance(value, bool)
    if not is_number or not is_finite(value) or not valid(value):
        raise ValueError(f"{name}={shown(value)}: expected {accepted}")


@dataclass(frozen=True, kw_only=True)
class SamplingMethod(ABC):
    """The base class of samplers.

    Attributes:
        repetition_penalty: a number > 0. A value > 1 makes tokens of the prompt and the answer less likely, a value < 1
            makes them more likely, and None or 1 changes nothing.

    Raises:
        ValueError: an attribute is out of its range; the message names it.
    """

    repetition_penalty: float | None = None

    def __init_subclass__(cls) -> None:
        # A sampler is a pytree without leaves, so that a decoding state may hold one sampler, or the settings of rows.
        jax.tree_util.register_static(cls)

    def __post_init__(self) -> None:
        if self.repetition_penalty is not None:
            _require("repetition_penalty", self.repetition_penalty, lambda x: x > 0, "a number > 0")

    @abstractmethod
    def __call__(
        self,
        logits: Float[Array, "B V"],
        keys: Key[Array, "B"] | None = None,
        seen: Bool[Array, "B V"] | None = None,
    ) -> Int32[Array, "B"]:
        """Draws the next token of each row. It depends on the row's own logits, key and `seen` only.

        Args:
            logits: the model's logits, unmodified.
            keys: one PRNG key per row. The sampler keeps no state, so a key must be a function of the seed, the row and
                the position.
            seen: marks the tokens of the prompt and the answer; required if `needs_seen`.

        Raises:
            ValueError: `keys` or `seen` is required and missing.
        """

    @property
    def settings(self) -> Settings:
        """The sampler as numbers. Raises ValueError for a sampler that has no such form."""
        raise ValueError(f"{self} cannot be given for one of several rows: expected kvjax.Greedy or kvjax.Sampler")

    @property
    def penalty(self) -> float:
        """The repetition penalty as the steps take it."""
        return 1.0 if self.repetition_penalty is None else _normal(self.repetition_penalty)

    @property
    def needs_seen(self) -> bool:
        """Returns whether the sampler requires `seen`. If not, the caller need not track it."""
        return self.repetition_penalty not in (None, 1.0)

    def penalized(self, logits: Float[Array, "B V"], seen: Bool[Array, "B V"] | None = None) -> Float32[Array, "B V"]:
        """Returns float32 logits after the repetition penalty. Raises ValueError if `seen` is required and missing."""
        logits = logits.astype(jnp.float32)
        if not self.needs_seen:
            return logits
        if seen is None:
            raise ValueError(f"seen=None: {self} requires the mask [B, V] of tokens in the prompt and the answer")
        return penalize_repetition(logits, seen, self.penalty)


@dataclass(frozen=True)
class Greedy(SamplingMethod):
    """Takes the most probable token, and the first of equal ones. It requires no keys."""

    @property
    def settings(self) -> Settings:
        return Settings(greedy=True, penalty=self.penalty)

    def __call__(
        self,
        logits: Float[Array, "B V"],
        keys: Key[Array, "B"] | None = None,
        seen: Bool[Array, "B V"] | None = None,
    ) -> Int32[Array, "B"]:
        return most_probable(self.penalized(logits, seen))


@dataclass(frozen=True)
class Sampler(SamplingMethod):
    """Draws from the softmax of the logits after the steps that are set, in the order of transformers.

    Attributes:
        temperature: divides the logits; a number > 0.
        top_k: keeps the k most probable tokens; an integer >= 1, or None for all.
        top_p: keeps the most probable tokens that together reach this probability; in (0, 1], or None for all.
        min_p: keeps tokens at least this many times as probable as the most probable one; in [0, 1], or None for all.
        repetition_penalty: see `SamplingMethod`.

    Raises:
        ValueError: an attribute is out of its range; the message names it.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _require("temperature", self.temperature, lambda x: x > 0, "a number > 0 (Greedy is the limit of 0)")
        if self.top_k is not None:
            _require("top_k", self.top_k, lambda x: x >= 1, "an integer >= 1", integral=True)
        if self.top_p is not None:
            _require("top_p", self.top_p, lambda x: 0 < x <= 1, "a number in (0, 1]")
        if self.min_p is not None:
            _require("min_p", self.min_p, lambda x: 0 <= x <= 1, "a number in [0, 1]")

    @property
    def settings(self) -> Settings:
        return Settings(
            temperature=_normal(self.temperature),
            top_k=self.top_k or 0,
            top_p=math.inf if self.top_p in (None, 1) else self.top_p,
            log_min_p=math.log(self.min_p) if self.min_p else -math.inf,
            penalty=self.penalty,
        )

    def filtered(self, logits: Float[Array, "B V"], seen: Bool[Array, "B V"] | None = None) -> Float32[Array, "B V"]:
        """Returns the logits that a token is drawn from. The largest of each row is 0, and removed tokens are -inf."""
        settings = self.settings
        logits = tempered(self.penalized(logits, seen), settings.temperature)
        if settings.top_k:
            logits = keep_top_k(logits, settings.top_k)
        if settings.top_p < math.inf:
            logits = keep_top_p(logits, settings.top_p)
        if settings.log_min_p > -math.inf:
            logits = keep_min_p(logits, settings.log_min_p)
        return logits

    def __call__(
        self,
        logits: Float[Array, "B V"],
        keys: Key[Array, "B"] | None = None,
        seen: Bool[Array, "B V"] | None = None,
    ) -> Int32[Array, "B"]:
        if keys is None:
            raise ValueError(f"keys=None: {self} requires one PRNG key per row")
        return jax.vmap(jax.random.categorical)(keys, self.filtered(logits, seen)).astype(jnp.int32)


def parse(text: str) -> SamplingMethod:
    """Parses a sampler from a text such as `greedy`, `greedy,repetition_penalty=1.1` or `temperature=0.7,top_p=0.9`.

    Raises:
        ValueError: a part of the text is not understood, or a value is out of its range; the message names it.
    """
    items = [item.strip() for item in text.split(",")]
    method: type[SamplingMethod] = Sampler
    if items[0] == "greedy":
        method, items = Greedy, items[1:]
    names = [field.name for field in fields(method)]
    accepted = f"'greedy' or NAME=NUMBER of {', '.join(names)}, separated by commas"
    settings: dict[str, float] = {}
    for item in items:
        name, equals, value = (part.strip() for part in item.partition("="))
        if not equals or name not in names or name in settings:
            fault = "is given twice" if name in settings else "is not understood"
            near = did_you_mean(name, ["greedy", *names]) if name not in names else ""
            raise ValueError(f"{shown(item)} in sampler {shown(text)} {fault}; accepted: {accepted}{near}")
        try:
            settings[name] = int(value) if name == "top_k" else float(value)
        except ValueError:
            kind = "an integer" if name == "top_k" else "a number"
            raise ValueError(f"{name}={shown(value)} in sampler {shown(text)}: expected {kind}") from None
    return method(**settings)
