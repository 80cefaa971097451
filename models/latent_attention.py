"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) as attention over one kv head.

A token has a latent c of R channels and a rotated key r of C channels. Head h has the key [r, U_h c] and the value
V_h c. The products of queries with keys, and the sum of values, are linear in c:

    [q, p] . [r, U_h c] = [q, U_h^T p] . [r, c],        sum_m a_m V_h c_m = V_h sum_m a_m c_m.

So all query heads share one key [r, c] and one value [0, c] of C + R channels: a policy sees a model of one kv head.
The zeros keep keys and values of one size. The key contains the value, so a cache may hold the key alone and return
sums of keys for the contexts, whose first C channels nothing reads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from .attend import Attend, AttentionLayer
from .config import DecoderConfig
from .linear import heads_first, linear, weight
from .norm import RMSNorm, maybe

EPSILON = 1e-6  # of the norms of latents, whatever the config has for the others


class LatentAttention(nnx.Module):
    """The projections to queries, one key and one value of each token, and back, without attention itself.

    It has the interface of `kvjax.models.decoder.Attention`.
    """

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, dtype: DTypeLike):
        latent = config.latent
        assert latent is not None
        E, Hq = config.hidden_size, config.num_heads
        R, C, P, V = latent.rank, latent.rotated, latent.unrotated, latent.value
        own = replace(config, norm_epsilon=EPSILON)
        Q, compressed = latent.query_rank or E, latent.query_rank is not None
        by_head = ("rank", "heads", "head_dim")
        self.query_down = weight(rngs, (E, Q), ("embed", "rank"), E, dtype) if compressed else None
        self.query_norm = RMSNorm(own, (Q,), ("rank",), dtype) if compressed else None
        self.query = weight(rngs, (Q, Hq, P), by_head, Q, dtype)
        self.query_rotated = weight(rngs, (Q, Hq, C), by_head, Q, dtype)
        self.down = weight(rngs, (E, R), ("embed", "rank"), E, dtype)
        self.norm = RMSNorm(own, (R,), ("rank",), dtype)
        self.key_rotated = weight(rngs, (E, C), ("embed", "head_dim"), E, dtype)
        self.key = weight(rngs, (R, Hq, P), by_head, R, dtype)
        self.value = weight(rngs, (R, Hq, V), by_head, R, dtype)
        self.output = weight(rngs, (Hq, V, E), ("heads", "head_dim", "embed"), Hq * V, dtype)
        self.rotated = C
        self.gates: nnx.Dict[Any] = nnx.Dict()
        self.statistics: nnx.Dict[Any] = nnx.Dict()

    def __call__(
        self, x: Float[Array, "B N E"], layer: AttentionLayer, attend: Attend, cache: Any
    ) -> tuple[Float[Array, "B Hq N D"], Any]:
        source = x if self.query_down is None else maybe(self.query_norm, linear(x, self.query_down[...], None))
        unrotated, rotated = (
            heads_first(linear(source, part[...].reshape(source.shape[-1], -1), None), part.shape[-1])
            for part in (self.query, self.query_rotated)
        )
        q = jnp.concatenate([rotated, jnp.einsum("BHNP,RHP->BHNR", unrotated, self.key[...])], axis=-1)
        latent = self.norm(linear(x, self.down[...], None))
        k = jnp.concatenate([linear(x, self.key_rotated[...], None), latent], axis=-1)
        v = jnp.pad(latent, ((0, 0), (0, 0), (self.rotated, 0)))
        return attend(replace(layer, hidden=x, gates=self.gates), q, k[:, None], v[:, None], cache)

    @property
    def weights(self) -> dict[str, Any]:
        """The weights that an `AttentionLayer` has. `output` maps the value that a cache holds to hidden states."""
        output = jnp.einsum("RHV,HVE->HRE", self.value[...], self.output[...])
        return {
            "output": jnp.pad(output, ((0, 0), (self.rotated, 0), (0, 0))),
            "sinks": None,
            "statistics": {name: statistic[...] for name, statistic in self.statistics.items()},
        }

    def project_out(self, context: Float[Array, "B Hq N D"]) -> Float[Array, "B N E"]:
        """Projects the contexts of all heads back to hidden states."""
        values = jnp.einsum("BHNR,RHV->BNHV", context[..., self.rotated :], self.value[...])
        B, N, Hq, V = values.shape
        return linear(values.reshape(B, N, Hq * V), self.output[...].reshape(Hq * V, -1), None)
