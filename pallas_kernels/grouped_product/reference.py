"""The definition of `grouped_product`."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def grouped_product(
    rows: Float[Array, "M I"], matrices: Float[Array, "groups I O"], sizes: Int[Array, "groups"]
) -> Float[Array, "M O"]:
    """Multiplies the first `sizes[0]` rows with the first matrix, the next `sizes[1]` rows with the second, and so on.

    Args:
        rows: sorted by the matrix that they belong to.
        matrices: in the dtype of the rows.
        sizes: the number of rows of each matrix; their sum is at most M. int32.

    Returns:
        The products in the dtype of the rows. Rows beyond the sum of `sizes` are undefined.
    """
    group = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(len(rows)), side="right")
    own = matrices.astype(jnp.float32)[jnp.minimum(group, len(matrices) - 1)]
    return jnp.einsum("MI,MIO->MO", rows.astype(jnp.float32), own, precision="highest").astype(rows.dtype)
