"""Runs the checks and benchmarks of a GPU in stages, each of which takes less than ten minutes on an H100.

    python -m benchmarks.measure_gpu correctness roofline --out results     # some stages
    python -m benchmarks.measure_gpu --out results                          # all that are not finished there
    python -m benchmarks.measure_gpu --out results --small                  # a rehearsal on any machine

A stage appends its output to OUT/STAGE.jsonl (or .log) as it comes. A stage that ended is not run again while
OUT/STAGE.done exists; one that was cut off begins anew, and what it wrote stays. The stages share a compilation cache
beside OUT, so that a second try compiles less. The environment needs kvjax with a JAX for GPUs, and for the
stages `correctness` and `mosaic_gpu` pytest with pytest-xdist, hypothesis and transformers. `transformers` and `peers`
need PEER_PYTHON, an interpreter with a torch for GPUs, transformers and kvpress.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LEAST = 30  # seconds that must be left for a stage to begin
GPU = "import jax; assert jax.devices()[0].platform == 'gpu', f'JAX has a {jax.devices()[0].platform} here'"
PEER = "import kvpress, torch, transformers; assert torch.cuda.is_available(), 'torch has no GPU here'"


@dataclass(frozen=True)
class Stage:
    """One command.

    Attributes:
        command: after the interpreter, from the root of the checkout. "{peer}" is PEER_PYTHON, and "{out}" the file of
            the output.
        small: further arguments of a rehearsal.
        environment: variables that are set for it.
        suffix: of the output's file.
        python: the interpreter, "{python}" for this one or "{peer}".
    """

    command: tuple[str, ...]
    small: tuple[str, ...] = ("--small",)
    environment: dict[str, str] = field(default_factory=dict)
    suffix: str = "jsonl"
    python: str = "{python}"

    @property
    def compares(self) -> bool:
        """Returns whether the stage needs PEER_PYTHON."""
        return any("{peer}" in part for part in (self.python, *self.command))


def tests(*names: str) -> Stage:
    """Tests of kernels, run natively. Each result is printed as it comes, and a test that hangs prints its stack."""
    files = [f"tests/pallas_kernels/test_{name}.py" for name in names]
    options = ("-v", "--tb=short", "-n", "auto", "--durations=5", "-o", "faulthandler_timeout=120")
    environment = {
        "JAX_PLATFORMS": "",  # tests run on a CPU unless this is set
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "0",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # the workers share the GPU
    }
    return Stage(("-m", "pytest", *options, *files), ("-k", "refused", "-n", "2"), environment, "log")


def decode(*arguments: str, **environment: str) -> Stage:
    return Stage(("-m", "benchmarks.bench_decode", *arguments), environment=environment)


STAGES = {
    "correctness": tests(
        "triton",
        "cudnn",
        "policies",
        "prompt_attention",
        "slot_attention",
        "segment_attention",
        "window_scores",
        "top_tokens",
        "grouped_product",
    ),
    "roofline": decode("--case", "roofline"),
    "morphkv": decode("--case", "morphkv", "--layers", "8", "--repeats", "3"),
    # Without CUDA graphs, CUPTI sees each kernel of a loop.
    "launches": decode("--case", "kernels", "--layers", "8", XLA_FLAGS="--xla_gpu_enable_command_buffer="),
    "kernels": Stage(("-m", "benchmarks.bench_kernels", "--choice", "default")),
    "prompts": decode("--case", "prompt", "--layers", "8", "--repeats", "3"),
    "memory": decode("--case", "prefill", "kvcrush"),
    "tuning": Stage(("-m", "benchmarks.tune_kernels", "--most", "12", "--resume", "{out}")),
    "dynamickv": decode("--case", "dynamickv"),
    "batch": decode("--case", "batch"),
    "flat": decode("--case", "flat", "--repeats", "3"),
    "transformers": Stage(
        (
            "-m",
            "benchmarks.bench_transformers",
        ),
        python="{peer}",
    ),
    "peers": Stage(
        ("-m", "benchmarks.bench_gpu", "--repeats", "3", "--case", "full", "snapkv", "--peer-python", "{peer}"),
        ("--small", "--batch", "1", "--prompt", "512", "--new", "32"),
    ),
    # These run only if they are chosen. No GPU has run them yet, so they come last: one may end the process or hang.
    "mosaic_gpu": tests("mosaic_gpu"),
    "mosaic_kernels": Stage(("-m", "benchmarks.bench_kernels", "--choice", "mosaic_gpu")),
}


def run(name: str, out: Path, *, small: bool, seconds: float) -> bool:
    """Runs a stage to its end, or for `seconds`. Returns whether it succeeded."""
    stage, started = STAGES[name], time.monotonic()
    log, errors = out.resolve() / f"{name}.{stage.suffix}", out.resolve() / f"{name}.err"
    names = {"python": sys.executable, "peer": os.environ.get("PEER_PYTHON", ""), "out": log}
    command = [part.format(**names) for part in (stage.python, *stage.command)]
    command += stage.small if small else ()
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(out.resolve().with_name(f"{out.name}_compiled")))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    environment |= {"PYTHONUNBUFFERED": "1", "JAX_COMPILATION_CACHE_DIR": cache} | stage.environment
    with log.open("a") as output, errors.open("a") as error:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=error, start_new_session=True
        )
        try:
            code: int | str = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # what the command started holds the GPU, too
            process.wait()
            code = f"stopped after {seconds:.0f} s"
    print(f"{name}: {time.monotonic() - started:.0f} s, exit {code}; {log}", flush=True)
    if code == 0:
        (out / f"{name}.done").touch()
        return True
    print("".join(errors.read_text().splitlines(keepends=True)[-20:]), flush=True)
    return False


def lacking(names: list[str], *, small: bool) -> str | None:
    """Lists what the stages need and this machine does not have, found out in processes of their own."""
    peer = os.environ.get("PEER_PYTHON")
    compared = [name for name in names if STAGES[name].compares]
    if compared and not peer:
        needed = "expected an interpreter with torch, transformers and kvpress"
        return f"{', '.join(compared)}: PEER_PYTHON is not set; {needed}"
    checks = [] if small else [(sys.executable, GPU), *([(peer, PEER)] if compared and peer else [])]
    for python, check in checks:
        found = subprocess.run([python, "-c", check], capture_output=True, text=True, check=False)
        if found.returncode:
            return f"{python}: {found.stderr.strip().splitlines()[-1]}"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", nargs="*", choices=[*STAGES, []], metavar="STAGE", help=", ".join(STAGES))
    parser.add_argument("--out", type=Path, required=True, help="the folder of the results; made if absent")
    parser.add_argument("--small", action="store_true", help="small sizes, on any machine")
    parser.add_argument("--limit", type=float, default=600, help="seconds of a stage")
    parser.add_argument("--total", type=float, default=float("inf"), help="seconds of all stages together")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    end, failed, names = time.monotonic() + arguments.total, [], []
    for name in arguments.stage or STAGES:
        if (arguments.out / f"{name}.done").exists():
            print(f"{name}: done before")
        elif not arguments.stage and STAGES[name].compares and "PEER_PYTHON" not in os.environ:
            print(f"{name}: left out; it needs PEER_PYTHON")
        else:
            names.append(name)
    if names and (lack := lacking(names, small=arguments.small)):
        sys.exit(lack)
    for name in names:
        left = end - time.monotonic()
        if left < LEAST:
            print(f"{name}: not begun, {left:.0f} s are left")
            failed.append(name)
        elif not run(name, arguments.out, small=arguments.small, seconds=min(arguments.limit, left)):
            failed.append(name)
    sys.exit(f"did not succeed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
