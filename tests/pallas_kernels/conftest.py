"""Products in float32, where a GPU would round their factors to TF32."""

from collections.abc import Iterator

import jax
import pytest

from tests.pallas_kernels.checks import on_gpu


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    with jax.default_matmul_precision("highest" if on_gpu() else None):
        yield
