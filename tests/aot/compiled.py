"""What tests compile for accelerators that are not here: models, presets, and the program that answers."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import kvjax
from benchmarks.aot import lower
from benchmarks.aot.graphs import compile_listed, outside_graphs
from benchmarks.aot.hlo import Loop
from benchmarks.aot.targets import target
from kvjax.gates.adapters import adapter_sizes
from kvjax.gates.attach import Network
from kvjax.gates.forms import FORMS
from kvjax.models import Decoder, DecoderConfig
from kvjax.policies import PRESETS, parse
from kvjax.statistics.forms import STATISTICS
from tests.policy.small import preset
from tests.tiny import decoder

CONFIG = replace(decoder().config, windows=(None, None), num_heads=16, num_kv_heads=8, head_dim=128)
KERNELS = {"h200:1": "triton", "v6e:2x2": "tpu_custom_call"}  # as a program calls them


def llama(layers: int, hidden: int, mlp: int, heads: int) -> DecoderConfig:
    """Llama 3's shapes, of 8 kv heads."""
    return replace(
        CONFIG, windows=(None,) * layers, hidden_size=hidden, mlp_size=mlp, num_heads=heads, vocab_size=128_256
    )


# A TPU's compiler takes long for wide products. The cache is as large in both.
SINGLE_LAYERS = {"h200:1": llama(1, 4096, 14_336, 32), "v6e:2x2": replace(CONFIG, windows=(None,), num_heads=32)}

SIZED = {"budget=24": "budget=1024", "window=4": "window=32", "recent=4": "recent=64", "heavy=4": "heavy=128"}
SIZED |= {"window=8": "window=256", "recent=8": "recent=256", "length=5": "length=16", "chunk=8": "chunk=256"}
SIZED |= {"chunk=16": "chunk=1024"}
OF_HEADS = ((1.0, 0.1, 0.7, 0.2, 0.3, 0.9, 0.4, 0.8),)  # of one layer
OPTIONS = {
    "budget": 1024,
    "window": 32,
    "recent": 256,
    "instruction": (7, 60),
    "starting": (9, 4),
    "suffix": (33,),
    "gates": OF_HEADS,
    "importance": OF_HEADS,
    "curve": OF_HEADS,
    "shares": (1.0,),
}


def sized(text: str) -> kvjax.Policy:
    """A preset of the tests with a budget to compile for, or the preset of that name with its own defaults."""
    if text in PRESETS and text != "full":
        return preset(text, OPTIONS)
    return parse(re.sub(r"\b(budget|window|recent|heavy|length|chunk)=\d+\b", lambda part: SIZED[part[0]], text))


def accelerators(name: str) -> list[jax.Device]:
    try:
        return target(name).devices()
    except ImportError as error:
        pytest.skip(str(error))


def plan_params(config: DecoderConfig, dtype: Any, mesh: Mesh) -> Decoder:
    """Shapes of parameters, of the gates of each method whose gates lie beside them, and of all statistics."""
    params, everywhere = PLAN_PARAMS(config, dtype, mesh), NamedSharding(mesh, PartitionSpec())
    of_heads = {"input_dim": config.hidden_size, "output_dim": config.num_kv_heads, "hidden_dim": 512}
    of_keys = {"input_dim": config.hidden_size, "nhead": config.num_kv_heads, "output_dim": 16, "sink": 16}
    of_keys["ngroup"] = config.num_heads // config.num_kv_heads
    learned = {**adapter_sizes(config), "rank": 8, "tokens": 32}
    tokens = jax.ShapeDtypeStruct((32, config.hidden_size), dtype, sharding=everywhere)
    of_methods = {"kvzap": of_heads, "fastkvzip": of_keys, "lookaheadkv": learned, "restorekv": learned}
    for method in ("lookaheadkv", "restorekv"):
        params.gates[method] = nnx.Param(tokens, eager_sharding=False)
    for layer in params.layers:
        for method, sizes in of_methods.items():
            shapes = FORMS[method].shapes(sizes).items()
            tensors: Any = {name: jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere) for name, shape in shapes}
            layer.attention.gates[method] = Network(method, tensors)
        for name, of in STATISTICS.items():
            shape = jax.ShapeDtypeStruct(of(config)[1:], jnp.float32, sharding=everywhere)
            layer.attention.statistics[name] = nnx.Param(shape, eager_sharding=False)
    return params


PLAN_PARAMS = lower.plan_params


class Answering(NamedTuple):
    """What `generate` runs to answer, compiled for accelerators.

    Attributes:
        keys: bytes of a layer's keys, or of their codes.
        outside: what the loop launches outside of CUDA graphs, by kind.
    """

    hlo: str
    loop: Loop
    memory: Any
    keys: int
    outside: Counter[str]


@cache
def answering(name: str, config: DecoderConfig, policy: kvjax.Policy, batch: int, model: int) -> Answering:
    """After prompts of 4096 tokens, up to 1024 more. One program for all tests that look at it."""
    mesh, sizes = kvjax.make_mesh(model=model, devices=accelerators(name)[:model]), {"length": 4096, "new_tokens": 1024}
    with pytest.MonkeyPatch.context() as patch:
        if policy.learned or policy.score.needs.gates or policy.score.needs.statistics:
            patch.setattr(lower, "plan_params", plan_params)
        lowered, outside = lower.lower_decode(config, policy, mesh=mesh, batch=batch, **sizes), Counter[str]()
    if mesh.devices.flat[0].platform == "gpu":
        compiled, launches = compile_listed(lowered)
        outside = outside_graphs(launches)
    else:
        compiled = lowered.compile()
    cache = kvjax.plan_cache(config, policy, dtype="bfloat16", batch=batch, **sizes)
    keys = max(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache.entries.stored[0]))
    hlo = compiled.as_text()
    return Answering(hlo, Loop.of(hlo), compiled.memory_analysis(), keys, outside)
