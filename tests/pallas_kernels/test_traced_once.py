"""Equal calls share one trace, and calls with other shapes or options do not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.pallas_kernels import traced_once

traces: list[tuple[object, ...]] = []


@traced_once
def scaled(x: jax.Array, *, by: float, bias: jax.Array | None = None) -> jax.Array:
    traces.append((x.shape, by, bias is None))
    return x * by if bias is None else x * by + bias


def test_equal_layers_are_traced_once_and_called() -> None:
    def layers(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        for _ in range(3):
            x = scaled(x, by=0.5)
        x = scaled(x, by=1)
        x = scaled(x, by=1.0, bias=x)
        return x, scaled(y, by=0.5)

    traces.clear()
    x, y = jnp.arange(4.0), jnp.arange(6.0)
    program = jax.jit(layers).trace(x, y)
    assert traces == [((4,), 0.5, True), ((4,), 1, True), ((4,), 1.0, False), ((6,), 0.5, True)]
    assert program.lower().as_text().count("call @run") == 6
    np.testing.assert_array_equal(program.lower().compile()(x, y)[0], 2 * x / 8)


def test_outside_of_a_trace_nothing_is_compiled() -> None:
    traces.clear()
    for _ in range(2):
        np.testing.assert_array_equal(scaled(jnp.ones(3), by=2.0), np.full(3, 2))
    assert len(traces) == 2
