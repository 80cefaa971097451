"""Statistics beside the parameters of a model, where scores find them."""

from __future__ import annotations

import os
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from kvjax.checks import check_one_kind, check_params
from kvjax.mesh.sharding import mesh_of, parameter_sharding, place
from kvjax.models import Decoder
from kvjax.runtime.modes import own_modes

from .files import read_statistics
from .forms import STATISTICS


@own_modes()
def with_statistics(
    params: Decoder, statistics: Mapping[str, Float[np.ndarray, "L *rest"]] | str | os.PathLike[str]
) -> Decoder:
    """The same parameters with statistics of queries beside them, which policies such as `qfilter` read.

    Statistics of several folders may be attached; those of a name replace earlier ones. They are float32, and a mesh
    divides them over kv heads. `kvjax.save` and `kvjax.save_hf` do not write them.

    Args:
        params: the decoder.
        statistics: a folder of statistics, a repository on the hub, a file of TriAttention's authors, or arrays by
            name. `query_mean` is [L, Hq, D], `query_cov` [L, Hq, D, D], `query_norms` [L, Hq, D / 2], `q_filters`
            [L, H, D].

    Raises:
        CheckpointError: the statistics cannot be read.
        ValueError: a name is unknown, a shape is not that of the model, its layers have kv heads of several kinds, or a
            number is NaN or infinite as float32.
    """
    check_params(params)
    check_one_kind("statistics", params.config)
    given = statistics if isinstance(statistics, Mapping) else read_statistics(statistics)
    if unknown := sorted(given.keys() - STATISTICS.keys()):
        raise ValueError(f"statistics {', '.join(map(str, unknown))}: expected some of {', '.join(STATISTICS)}")
    config = params.config
    expected = {name: STATISTICS[name](config) for name in given}
    wrong = [
        f"{name} has shape {np.shape(given[name])}, expected {shape}"
        for name, shape in expected.items()
        if np.shape(given[name]) != shape
    ]
    if wrong:
        raise ValueError(f"statistics of another model: {'; '.join(wrong)}")
    with np.errstate(over="ignore"):
        wide = {name: np.asarray(statistic).astype(np.float32) for name, statistic in given.items()}
    if broken := [name for name, statistic in wide.items() if not np.isfinite(statistic).all()]:
        raise ValueError(f"statistics {', '.join(broken)} have NaN or infinity as float32: expected finite numbers")
    graph, state = nnx.split(params)
    made = nnx.merge(graph, state)
    mesh = mesh_of(params)

    def parameter(statistic: Float[np.ndarray, "heads *rest"]) -> nnx.Param[Array]:
        axes = ("kv_heads", *("statistic" for _ in statistic.shape[1:]))
        host = nnx.Param(statistic, out_sharding=axes, eager_sharding=False)
        array = jnp.asarray(statistic) if mesh is None else place(statistic, parameter_sharding(mesh, host))
        return nnx.Param(array, out_sharding=axes, eager_sharding=False)

    for i, layer in enumerate(made.layers):
        own = {name: parameter(statistic[i]) for name, statistic in wide.items()}
        layer.attention.statistics = nnx.Dict({**dict(layer.attention.statistics), **own})
    return made
