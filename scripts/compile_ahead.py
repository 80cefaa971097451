"""Compiles the decode loop of a large model for accelerators that need not be here, and says what it takes and does.

    pip install -e '.[tpu,cuda13]'
    python scripts/compile_ahead.py > compile_ahead.jsonl

The model is a Llama of the 70B's shape in bfloat16, without weights: only shapes are given to the compiler. Standard
output is a JSON line a target. Bytes are a device's; collectives, and arrays of the size of a layer's keys (or of 1 MB)
that are written whole, are those of one decode step. Temporaries are beside arguments and outputs; what of the outputs
is aliased takes no memory of its own.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # what is here is not asked

import jax

import kvjax
from kvjax.ahead import lower_decode, plan_params
from kvjax.hlo import Loop
from kvjax.models import DecoderConfig, Rope
from kvjax.targets import target

MB = 1_000_000


def llama_70b(layers: int) -> DecoderConfig:
    return DecoderConfig(
        family="llama",
        vocab_size=128_256,
        hidden_size=8192,
        mlp_size=28_672,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        windows=(None,) * layers,
        rope=Rope(500_000.0),
        max_positions=131_072,
    )


def held(tree: Any) -> int:
    """Bytes of a device's share."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(tree)
        if x.sharding is not None
    )


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    config, policy, there = llama_70b(arguments.layers), kvjax.policies.parse(arguments.policy), target(name)
    mesh = kvjax.make_mesh(arguments.data, arguments.model, devices=there.devices())
    sizes = {"batch": arguments.batch, "length": arguments.length, "new_tokens": arguments.new_tokens}
    started = time.perf_counter()
    lowered = lower_decode(config, policy, mesh=mesh, **sizes)
    traced = time.perf_counter()
    compiled = lowered.compile()
    done = time.perf_counter()
    memory, loop = compiled.memory_analysis(), Loop.of(compiled.as_text() or "")
    assert memory is not None
    cache = kvjax.plan_cache(config, policy, dtype="bfloat16", mesh=mesh, **sizes)
    keys = held(cache.layers[0].keys)
    return {
        "target": name,
        "mesh": f"{arguments.data}x{arguments.model}",
        "layers": arguments.layers,
        "policy": arguments.policy,
        **sizes,
        "parameters": held(plan_params(config, "bfloat16", mesh)),
        "cache": held(cache),
        "keys_of_a_layer": keys,
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
        "aliased": memory.alias_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "program": memory.generated_code_size_in_bytes,
        "memory": there.chip.memory,
        "collectives": loop.collectives,
        "rewrites_of_keys": len(loop.rewrites(keys)),
        "rewrites_of_1_MB": len(loop.rewrites(MB)),
        "lower_seconds": round(traced - started, 1),
        "compile_seconds": round(done - traced, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("targets", nargs="*", default=["v5p:2x2x2", "h200:8"], help="such as v5p:2x2x2 or h200:8")
    parser.add_argument("--data", type=int, default=1)
    parser.add_argument("--model", type=int, default=8)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--policy", default="morphkv:budget=2048,window=32")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=8192, help="tokens of a prompt")
    parser.add_argument("--new-tokens", type=int, default=1024)
    arguments = parser.parse_args()
    for name in arguments.targets:
        print(json.dumps(measure(name, arguments)), flush=True)


if __name__ == "__main__":
    main()
