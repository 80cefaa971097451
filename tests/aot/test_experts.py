"""Mixtures of experts on accelerators: a step reads experts where they are. Shapes of Qwen3 30B-A3B and gpt-oss 20B."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import pytest

import kvjax
from benchmarks.aot.graphs import compile_listed, outside_graphs
from benchmarks.aot.hlo import Loop
from benchmarks.aot.lower import lower_decode, lower_prefill
from benchmarks.aot.targets import target
from kvjax.models import DecoderConfig, Mixture, Rope, config_from_hf
from kvjax.policies import parse

pytestmark = [
    pytest.mark.aot,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache"),  # of devices that are not here
]
QWEN = DecoderConfig(
    "qwen3_moe",
    151_936,
    2048,
    6144,
    32,
    4,
    128,
    (None,) * 48,
    Rope(1e6),
    40_960,
    qk_norm=True,
    mixture=Mixture(128, 8, 768),
)
MATRIX = 2048 * 768 * 2  # bytes of one of the three matrices of an expert
SNAPKV = "snapkv:budget=1024,window=32"
GPT_OSS = config_from_hf(
    {
        "model_type": "gpt_oss",
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 2,  # one has a window
        "num_local_experts": 32,
    }
)


def mesh_of(name: str) -> jax.sharding.Mesh:
    there = target(name)
    try:
        return kvjax.make_mesh(model=there.count, devices=there.devices())
    except ImportError as error:
        pytest.skip(str(error))


def compiled_step(name: str, config: DecoderConfig, policy: str, mesh: jax.sharding.Mesh, batch: int) -> Any:
    """A decode loop. On one GPU the whole loop is a CUDA graph."""
    lowered = lower_decode(config, parse(policy), mesh=mesh, batch=batch, length=4096, new_tokens=1024)
    if name != "h200:1":
        return lowered.compile()
    compiled, launches = compile_listed(lowered)
    assert not outside_graphs(launches)
    return compiled


@pytest.mark.parametrize(
    ("name", "batch", "layers"),
    [
        ("h200:1", 8, 1),
        ("v5e:2x4", 8, 1),
        pytest.param("h200:1", 1, 2, marks=pytest.mark.exhaustive),
        pytest.param("h200:1", 64, 2, marks=pytest.mark.exhaustive),  # more assignments than experts
        pytest.param("h200:8", 8, 1, marks=pytest.mark.exhaustive),
        pytest.param("h200:1", 8, 48, marks=pytest.mark.exhaustive),
        pytest.param("v5e:2x4", 8, 48, marks=pytest.mark.exhaustive),
    ],
)
def test_no_matrix_of_an_expert_is_copied_in_a_step(name: str, batch: int, layers: int) -> None:
    """Devices exchange what they do for an MLP."""
    config, mesh = replace(QWEN, windows=(None,) * layers), mesh_of(name)
    compiled = compiled_step(name, config, SNAPKV, mesh, batch)
    loop, memory = Loop.of(compiled.as_text()), compiled.memory_analysis()
    assert loop.collectives == (
        Counter({"all-reduce": 2 * layers + 1, "all-gather": 1}) if mesh.size > 1 else Counter()
    )
    assert loop.rewrites(MATRIX) == []
    logits = batch * config.vocab_size * 4 if mesh.size > 1 else 0  # each device gathers those of all others
    assert memory.temp_size_in_bytes < logits + 0.015 * memory.argument_size_in_bytes
    taken = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    assert taken + memory.temp_size_in_bytes < target(name).chip.memory


@pytest.mark.parametrize(
    "name",
    ["h200:1", pytest.param("v5e:2x4", marks=pytest.mark.exhaustive)],  # a TPU's compiler takes a minute
)
def test_a_prompt_goes_to_its_experts_only(name: str) -> None:
    """Beside weights and cache: what the experts of 4,096 tokens take and give. All experts take 16 times that."""
    config = replace(QWEN, windows=(None,))
    programs = lower_prefill(config, parse("full"), mesh=mesh_of(name), batch=1, length=4096, new_tokens=64)
    compiled = programs["_read_layers 0"].compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2.5 * 4096 * 8 * 2048 * 2
    assert ("grouped_product_kernel" if name == "h200:1" else "ragged-dot") in compiled.as_text()


@pytest.mark.parametrize("name", ["h200:1", pytest.param("v5e:2x4", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("policy", ["full", SNAPKV])
def test_a_step_of_gpt_oss_reads_experts_and_keys_where_they_are(name: str, policy: str) -> None:
    """With sinks, biases and a window. A TPU turns around the table of embeddings, once per call."""
    mesh = mesh_of(name)
    compiled = compiled_step(name, GPT_OSS, policy, mesh, batch=8)
    loop, memory = Loop.of(compiled.as_text()), compiled.memory_analysis()
    keys = 8 * 8 * 1024 * 64 * 2 // mesh.size  # bytes of the keys of 1,024 tokens
    assert loop.rewrites(keys) == []
    embeddings = 201_088 * 2880 * 2 // mesh.size if mesh.size > 1 else 0
    assert memory.temp_size_in_bytes < embeddings + 0.015 * memory.argument_size_in_bytes
