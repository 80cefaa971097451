"""Runs the checks and benchmarks of a GPU in stages, each of which takes less than ten minutes on an H100.

    python scripts/measure_gpu.py correctness decode --out results     # some stages
    python scripts/measure_gpu.py --out results                        # all that are not finished there
    python scripts/measure_gpu.py --out results --small                # a rehearsal on any machine

A stage's output is written to OUT/STAGE.jsonl (or .log) as it comes. A stage that ended is not run again while
OUT/STAGE.done exists; one that was cut off begins anew. The environment needs kvjax with a JAX for GPUs, and for the
correctness stage pytest with pytest-xdist, hypothesis and transformers. `peers` needs PEER_PYTHON, an interpreter with
a torch for GPUs, transformers and kvpress.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Stage:
    """One command.

    Attributes:
        command: after the interpreter, from the root of the checkout.
        small: further arguments of a rehearsal.
        environment: variables that are set for it.
        suffix: of the output's file.
    """

    command: tuple[str, ...]
    small: tuple[str, ...] = ("--small",)
    environment: dict[str, str] = field(default_factory=dict)
    suffix: str = "jsonl"


TESTS = (
    "test_triton",
    "test_mosaic_gpu",
    "test_cudnn",
    "test_policies",
    "test_prompt_attention",
    "test_slot_attention",
    "test_top_tokens",
)
STAGES = {
    "correctness": Stage(
        ("-m", "pytest", "-q", "-n", "auto", "--durations=5", *(f"tests/pallas_kernels/{name}.py" for name in TESTS)),
        ("-k", "refused", "-n", "2"),
        {
            "JAX_PLATFORMS": "",  # tests run on a CPU unless this is set
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "0",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # the workers share the GPU
        },
        "log",
    ),
    "decode": Stage(("scripts/bench_decode.py", "--case", "kernels", "roofline", "morphkv")),
    "kernels": Stage(("scripts/bench_kernels.py",)),
    "prefill": Stage(("scripts/bench_decode.py", "--case", "prefill", "kvcrush")),
    "tuning": Stage(("scripts/tune_kernels.py",)),
    "policies": Stage(("scripts/bench_decode.py", "--case", "dynamickv", "batch", "flat", "--repeats", "3")),
    "transformers": Stage(("scripts/bench_transformers.py",), ("--help",)),
    "peers": Stage(
        ("scripts/bench_gpu.py", "--repeats", "3", "--case", "full", "snapkv", "--peer-python", "{peer}"), ("--help",)
    ),
}


def run(name: str, out: Path, *, small: bool, seconds: float) -> bool:
    """Runs a stage to its end, or for `seconds`. Returns whether it succeeded."""
    stage, started = STAGES[name], time.monotonic()
    command = [part.format(peer=os.environ.get("PEER_PYTHON", sys.executable)) for part in stage.command]
    command = [sys.executable, *command, *(stage.small if small else ())]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"} | stage.environment
    log, errors = out / f"{name}.{stage.suffix}", out / f"{name}.err"
    with log.open("w") as output, errors.open("w") as error:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=error)
        try:
            code: int | str = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = f"stopped after {seconds:.0f} s"
    print(f"{name}: {time.monotonic() - started:.0f} s, exit {code}; {log}", flush=True)
    if code == 0:
        (out / f"{name}.done").touch()
        return True
    print("".join(errors.read_text().splitlines(keepends=True)[-20:]), flush=True)
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", nargs="*", choices=[*STAGES, []], metavar="STAGE", help=", ".join(STAGES))
    parser.add_argument("--out", type=Path, required=True, help="the folder of the results; made if absent")
    parser.add_argument("--small", action="store_true", help="small sizes, on any machine")
    parser.add_argument("--limit", type=float, default=600, help="seconds of all stages together")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    end, failed = time.monotonic() + arguments.limit, []
    for name in arguments.stage or STAGES:
        if (arguments.out / f"{name}.done").exists():
            print(f"{name}: done before")
        elif not run(name, arguments.out, small=arguments.small, seconds=max(1, end - time.monotonic())):
            failed.append(name)
    sys.exit(f"did not succeed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
