"""One sampler per row, as arrays: one program draws for any mixture of samplers.

The steps are those of `kvjax.decoding.sampling`, with the same results. A step that no row has set is not computed.

Axes: B batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32, Key

from kvjax.decoding.sampling import SamplingMethod, keep_min_p, keep_top_p, most_probable, penalize_repetition, tempered


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowSamplers:
    """The settings of each row's sampler. The attributes are those of `kvjax.decoding.sampling.Settings`."""

    greedy: Bool[Any, "B"]
    temperature: Float32[Any, "B"]
    top_k: Int32[Any, "B"]
    top_p: Float32[Any, "B"]
    log_min_p: Float32[Any, "B"]
    penalty: Float32[Any, "B"]

    @classmethod
    def of(cls, samplers: Sequence[SamplingMethod]) -> RowSamplers:
        """The settings of one sampler per row, as NumPy arrays.

        Raises:
            ValueError: for a sampler other than `Greedy` and `Sampler`.
        """
        rows = [sampler.settings for sampler in samplers]
        return cls(
            greedy=np.array([row.greedy for row in rows]),
            temperature=np.array([row.temperature for row in rows], np.float32),
            top_k=np.array([min(row.top_k, 2**31 - 1) for row in rows], np.int32),
            top_p=np.array([row.top_p for row in rows], np.float32),
            log_min_p=np.array([row.log_min_p for row in rows], np.float32),
            penalty=np.array([row.penalty for row in rows], np.float32),
        )

    def __call__(
        self,
        logits: Float[Array, "B V"],
        keys: Key[Array, "B"] | None = None,
        seen: Bool[Array, "B V"] | None = None,
    ) -> Int32[Array, "B"]:
        """Draws the next token of each row. The arguments are those of `SamplingMethod`, and both are required."""
        assert keys is not None
        assert seen is not None
        penalty = self.penalty[:, None]
        logits = _where_set(penalty != 1, lambda x: penalize_repetition(x, seen, penalty), logits.astype(jnp.float32))
        best = most_probable(logits)

        def draw() -> Int32[Array, "B"]:
            filtered = tempered(logits, self.temperature[:, None])
            top_k, top_p = self.top_k[:, None], self.top_p[:, None]
            filtered = _where_set(top_k > 0, lambda x: keep_largest(x, top_k), filtered)
            filtered = _where_set(jnp.isfinite(top_p), lambda x: keep_top_p(x, top_p), filtered)
            filtered = keep_min_p(filtered, self.log_min_p[:, None])
            return jax.vmap(jax.random.categorical)(keys, filtered).astype(jnp.int32)

        return jnp.where(self.greedy, best, jax.lax.cond(jnp.all(self.greedy), lambda: best, draw))


def _where_set(
    rows: Bool[Array, "B 1"], step: Callable[[Float32[Array, "B V"]], Float32[Array, "B V"]], logits: Array
) -> Float32[Array, "B V"]:
    """The logits after a step in these rows. The step is not computed if there are none."""
    return jax.lax.cond(jnp.any(rows), lambda x: jnp.where(rows, step(x), x), lambda x: x, logits)


def keep_largest(logits: Float32[Array, "B V"], k: Int32[Array, "B 1"]) -> Float32[Array, "B V"]:
    """`keep_top_k` with each row's own k, of logits that are not positive."""
    # Floats that are not positive have the reverse order of their bits without the sign, so a bisection on the bits
    # finds the k-th largest with 31 counts.
    bits = jax.lax.bitcast_convert_type(jnp.abs(logits), jnp.int32)

    def halve(_: int, bounds: tuple[Int32[Array, "B 1"], ...]) -> tuple[Int32[Array, "B 1"], ...]:
        low, high = bounds
        middle = low + (high - low) // 2
        enough = jnp.sum(bits <= middle, axis=-1, keepdims=True) >= k
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    zero = jnp.zeros_like(bits[:, :1])
    infinite = jax.lax.bitcast_convert_type(jnp.float32(jnp.inf), jnp.int32)
    threshold, _ = jax.lax.fori_loop(0, 31, halve, (zero, zero + infinite))
    return jnp.where(bits <= threshold, logits, -jnp.inf)
