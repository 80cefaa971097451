"""Compiles programs of a large model for accelerators that need not be present, and reports their costs.

    pip install -e '.[tpu,cuda13]'
    python -m benchmarks.compile_ahead > compile_ahead.jsonl                                  # a 70B's decode loop
    python -m benchmarks.compile_ahead h200:1 v6e:2x2 --program prefill --shape 8b --model 1  # an 8B reads a prompt

The model has the shape of a Llama 3, of Qwen3 30B-A3B or of gpt-oss 20B, in bfloat16, and no weights.
The output is one JSON line per target. Bytes are per device. Collectives, and arrays of the size of a layer's keys (or
of 1 MB) that are written in full, are counted per decode step; for a pool of segments, keys are those of all layers.
Temporaries do not include arguments and outputs. Outputs that are aliased take no memory of their own.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from dataclasses import replace
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # what is here is not asked

import jax

import kvjax
from benchmarks.aot.hlo import Loop
from benchmarks.aot.lower import lower_decode, lower_prefill, plan_params
from benchmarks.aot.targets import target
from kvjax.models import DecoderConfig, Mixture, Rope, config_from_hf

MB = 1_000_000


def llama(layers: int, hidden: int, mlp: int, heads: int) -> DecoderConfig:
    return DecoderConfig("llama", 128_256, hidden, mlp, heads, 8, 128, (None,) * layers, Rope(500_000.0), 131_072)


# Llama 3 8B and 70B, Qwen3 30B-A3B, which has experts, and gpt-oss 20B, which has experts, attention sinks and windows.
SHAPES = {
    "8b": llama(32, 4096, 14_336, 32),
    "70b": llama(80, 8192, 28_672, 64),
    "30b-a3b": DecoderConfig(
        "qwen3_moe",
        vocab_size=151_936,
        hidden_size=2048,
        mlp_size=6144,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        windows=(None,) * 48,
        rope=Rope(1_000_000.0),
        max_positions=40_960,
        qk_norm=True,
        mixture=Mixture(experts=128, per_token=8, size=768),
    ),
    "gpt-oss-20b": config_from_hf(
        {
            "model_type": "gpt_oss",
            "vocab_size": 201_088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 24,
            "num_local_experts": 32,
        }
    ),
}


def held(tree: Any) -> int:
    """Bytes of a device's share."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(tree)
        if x.sharding is not None
    )


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    config, policy, there = (
        replace(SHAPES[arguments.shape], windows=SHAPES[arguments.shape].windows[: arguments.layers]),
        kvjax.policies.parse(arguments.policy),
        target(name),
    )
    devices = there.devices()[: arguments.data * arguments.model]
    mesh = kvjax.make_mesh(arguments.data, arguments.model, devices=devices)
    sizes = {"batch": arguments.batch, "length": arguments.length, "new_tokens": arguments.new_tokens}
    started = time.perf_counter()
    if arguments.program == "decode":
        programs = {"decode": lower_decode(config, policy, mesh=mesh, **sizes)}
    else:
        programs = lower_prefill(config, policy, mesh=mesh, chunk=arguments.chunk, **sizes)
    traced = time.perf_counter()
    each = [lowered.compile() for lowered in programs.values()]
    done = time.perf_counter()
    found = [memory for compiled in each if (memory := compiled.memory_analysis()) is not None]
    cache = kvjax.plan_cache(config, policy, dtype="bfloat16", mesh=mesh, **sizes)
    keys = held(cache.entries.stored[0])
    facts: dict[str, Any] = {"chunk": arguments.chunk} if arguments.chunk else {}
    if arguments.program == "decode":
        loop = Loop.of(each[0].as_text() or "")
        facts = {
            "collectives": loop.collectives,
            "rewrites_of_keys": len(loop.rewrites(keys)),
            "rewrites_of_1_MB": len(loop.rewrites(MB)),
        }
    return {
        "target": name,
        "program": arguments.program,
        "shape": arguments.shape,
        "mesh": f"{arguments.data}x{arguments.model}",
        "layers": config.num_layers,
        "policy": arguments.policy,
        **sizes,
        "parameters": held(plan_params(config, "bfloat16", mesh)),
        "cache": held(cache),
        "keys_of_a_layer": keys,
        "programs": len(programs),
        "arguments": max(memory.argument_size_in_bytes for memory in found),
        "outputs": max(memory.output_size_in_bytes for memory in found),
        "aliased": max(memory.alias_size_in_bytes for memory in found),
        "temporaries": max(memory.temp_size_in_bytes for memory in found),
        "code": sum(memory.generated_code_size_in_bytes for memory in found),
        "memory": there.chip.memory,
        **facts,
        "lower_seconds": round(traced - started, 1),
        "compile_seconds": round(done - traced, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "targets",
        nargs="*",
        default=["v5p:2x2x2", "h200:8"],
        help="such as v5p:2x2x2 or h200:8, of which the mesh takes as many as it needs",
    )
    parser.add_argument("--data", type=int, default=1)
    parser.add_argument("--model", type=int, default=8)
    parser.add_argument("--program", choices=("decode", "prefill"), default="decode")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="70b")
    parser.add_argument("--layers", type=int, help="all of the shape's by default")
    parser.add_argument("--policy", default="morphkv:budget=2048,window=32")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=8192, help="tokens of a prompt")
    parser.add_argument("--chunk", type=int, help="tokens of a prompt that are read at a time; all by default")
    parser.add_argument("--new-tokens", type=int, default=1024)
    arguments = parser.parse_args()
    for name in arguments.targets:
        print(json.dumps(measure(name, arguments)), flush=True)


if __name__ == "__main__":
    main()
