"""The statistics that scores may read: their names, shapes and meaning.

Names and shapes are those of the files that the authors of Q-Filters and of expected attention published. L layers come
first, then Hq query heads or H kv heads of D channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvjax.models import DecoderConfig

STATISTICS: Mapping[str, Callable[[DecoderConfig], tuple[int, ...]]] = {
    # Minus the principal right-singular vector of the queries after RoPE, which has a positive mean product with them;
    # the mean over a query group.
    "q_filters": lambda config: (config.num_layers, config.num_kv_heads, config.head_dim),
    # The mean of the queries before RoPE.
    "query_mean": lambda config: (config.num_layers, config.num_heads, config.head_dim),
    # The covariance of the queries before RoPE.
    "query_cov": lambda config: (config.num_layers, config.num_heads, config.head_dim, config.head_dim),
    # The mean norm of each pair of channels that RoPE rotates; 0 behind the last pair.
    "query_norms": lambda config: (config.num_layers, config.num_heads, config.head_dim // 2),
}
