"""Measures the host memory that loading and saving take beyond the parameters, with 8 CPU devices. Linux only.

    python -m benchmarks.bench_load > bench_load.jsonl

The script writes a random checkpoint (2 GB, bfloat16, one file per layer) to a temporary folder. Each measurement runs
in a new process, and this process samples its `RssAnon` in /proc/PID/status: the memory of the process without pages of
mapped files, which the kernel can drop at any time. `beyond` is the highest sample during the work, minus the memory
before it and minus the parameters' bytes. A slice that several CPU devices hold counts once. Standard output is JSON
lines, with sizes in bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MESHES = ("1x8", "2x4", "8x1", "none")
LAYERS = 14
HF = {
    "model_type": "llama",
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


def make(folder: Path, layers: int) -> None:
    """Writes the checkpoint. It holds at most one layer in memory."""
    import jax.numpy as jnp
    import numpy as np
    from safetensors.numpy import save_file

    from kvjax.checkpoint.parameters import Blank
    from kvjax.models import config_from_hf, family, hf_shapes

    hf = HF | {"num_hidden_layers": layers}
    config = config_from_hf(hf)
    rng = np.random.default_rng(0)
    files: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in hf_shapes(family("llama").weights(config), Blank.of(config).shapes).items():
        number = name.split(".")[2] if ".layers." in name else "x"
        files.setdefault(f"model-{number}.safetensors", {})[name] = shape
    for file, shapes in files.items():
        tensors = {name: rng.random(shape, np.float32).astype(jnp.bfloat16) for name, shape in shapes.items()}
        save_file(tensors, folder / file)
    placed = {name: file for file, shapes in files.items() for name in shapes}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    (folder / "config.json").write_text(json.dumps(hf))


def work(action: str, source: str, mesh_text: str, out: str) -> None:
    """Runs one measured action in this process. It prints `begin` before the action, and its facts as JSON after it."""
    import jax
    import jax.numpy as jnp

    import kvjax
    from kvjax.checkpoint import plan_conversion

    jnp.zeros(()).block_until_ready()
    mesh = None
    if mesh_text != "none":
        data, model = map(int, mesh_text.split("x"))
        mesh = kvjax.make_mesh(data, model)
    if action.startswith("convert"):
        plan = plan_conversion(source, out, action.removeprefix("convert to "), overwrite=True)  # type: ignore[arg-type]
        print("begin", flush=True)
        started = time.perf_counter()
        plan.run()
        facts = {
            "seconds": time.perf_counter() - started,
            "parameters": plan.parameter_bytes,
            "planned": plan.peak_bytes,
        }
        print(json.dumps(facts), flush=True)
        return
    read = kvjax.restore if action == "restore" else kvjax.load
    if action in ("load", "restore"):
        print("begin", flush=True)
        started = time.perf_counter()
        params, _ = read(source, mesh=mesh)
    else:
        params, _ = read(source, mesh=mesh)
        print("begin", flush=True)
        started = time.perf_counter()
        (kvjax.save if action == "save" else kvjax.save_hf)(params, out)
    seconds = time.perf_counter() - started
    leaves = jax.tree.leaves(params)
    shards = [shard.data for leaf in leaves for shard in leaf.addressable_shards]
    held = {shard.unsafe_buffer_pointer(): shard.nbytes for shard in shards}
    facts = {
        "seconds": seconds,
        "parameters": sum(leaf.nbytes for leaf in leaves),
        "held": sum(held.values()),
        "largest_slice": max(held.values()),
        "largest_tensor": max(leaf.nbytes for leaf in leaves),
    }
    print(json.dumps(facts), flush=True)


def measure(action: str, source: Path, mesh: str, out: Path) -> dict[str, Any]:
    """Runs `work` in a new process, and returns its facts with its peak memory."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    command = [sys.executable, __file__, "--work", action, str(source), mesh, str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        if process.stdout.readline() != "begin\n":
            raise SystemExit(f"{' '.join(command)} failed")
        base = peak = _anonymous(process.pid)
        os.set_blocking(process.stdout.fileno(), False)
        while not (line := process.stdout.readline()):
            peak = max(peak, _anonymous(process.pid))
            time.sleep(0.002)
    facts = json.loads(line)
    new = 0 if action.startswith("save") else facts.get("held", facts["parameters"])
    return {"action": action, "mesh": mesh, "peak": peak, "beyond": peak - base - new, **facts}


def _anonymous(pid: int) -> int:
    """Returns the `RssAnon` of a process in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return 0  # the process has ended


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--layers", type=int, default=LAYERS, help="the number of layers of the checkpoint (default: %(default)s)"
    )
    parser.add_argument("--folder", type=Path, help="the parent of the temporary folder")
    parser.add_argument("--work", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(*arguments.work)
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary:
        source, saved, written = (Path(temporary) / name for name in ("source", "saved", "written"))
        source.mkdir()
        make(source, arguments.layers)
        for mesh in MESHES:
            print(json.dumps(measure("load", source, mesh, written)), flush=True)
        print(json.dumps(measure("save_hf", source, "1x8", written)), flush=True)
        print(json.dumps(measure("save", source, "1x8", saved)), flush=True)
        for mesh in ("1x8", "2x4", "none"):
            print(json.dumps(measure("restore", saved, mesh, written)), flush=True)
        for to, read in (("hf", saved), ("orbax", source)):
            print(json.dumps(measure(f"convert to {to}", read, "none", written)), flush=True)


if __name__ == "__main__":
    main()
