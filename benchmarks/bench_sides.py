"""One side of `bench_cpu.py`: a process that loads a model once, and measures what it is asked on standard input.

    python -m benchmarks.bench_sides kvjax|peer FOLDER PLATFORM DTYPE

The peer is transformers, with kvpress's SnapKV. Its environment needs no kvjax.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SHARE = 0.25  # of the prompt, which SnapKV and MorphKV keep
WINDOW = 32

Measure = Callable[[dict[str, Any]], dict[str, float]]


def kvjax_side(folder: Path, platform: str, dtype: str) -> Measure:
    import jax
    import numpy as np

    import kvjax

    if jax.devices()[0].platform != platform:
        raise SystemExit(f"JAX has a {jax.devices()[0].platform} here: expected a {platform}")
    params, _ = kvjax.load(folder, dtype=dtype)
    prompts = np.load(folder / "prompts.npy").astype(np.int32)

    def measure(request: dict[str, Any]) -> dict[str, float]:
        out = kvjax.generate(
            params,
            prompts[: request["batch"], : request["prompt"]],
            policy=kvjax.policies.parse(request["policy"]),
            max_new_tokens=request["new"],
        )
        return {
            "prefill_seconds": out.stats.prefill_seconds,
            "decode_tokens_per_second": out.stats.decode_tokens_per_second,
        }

    return measure


def peer_side(folder: Path, platform: str, dtype: str) -> Measure:
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.generation.streamers import BaseStreamer
    from transformers.utils.logging import disable_progress_bar

    class Clock(BaseStreamer):
        """Notes when each token arrives."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, value: torch.Tensor) -> None:
            self.times.append(time.perf_counter())

        def end(self) -> None:
            pass

    disable_progress_bar()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    device = torch.device("cuda" if platform == "gpu" else "cpu")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval().to(device)
    prompts = torch.from_numpy(np.load(folder / "prompts.npy")).to(device)

    @torch.inference_mode()
    def measure(request: dict[str, Any]) -> dict[str, float]:
        prompt, new, clock = prompts[: request["batch"], : request["prompt"]], request["new"], Clock()
        press: contextlib.AbstractContextManager = contextlib.nullcontext()
        if request["name"] == "snapkv":
            import kvpress

            press = kvpress.SnapKVPress(1 - SHARE, window_size=WINDOW)(model)
        with press:
            out = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                min_new_tokens=new,
                max_new_tokens=new,
                streamer=clock,
                return_dict_in_generate=True,
            )
        expected = new - 1 + (request["budget"] if request["name"] == "snapkv" else request["prompt"])
        held = out.past_key_values.layers[0].keys.shape[2]
        if held != expected:
            raise RuntimeError(f"the peer's cache holds {held} tokens, not {expected}: nothing comparable was measured")
        start, first, *_, last = clock.times  # the streamer is handed the prompt before it is read
        return {
            "prefill_seconds": first - start,
            "decode_tokens_per_second": request["batch"] * (new - 1) / (last - first),
        }

    return measure


SIDES = {"kvjax": kvjax_side, "peer": peer_side}


def serve(side: str, folder: Path, platform: str, dtype: str) -> None:
    """Answers each line of standard input, a request in JSON, with a measurement in JSON."""
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries may print
    measure = SIDES[side](folder, platform, dtype)
    for line in sys.stdin:
        start = time.perf_counter()
        result = measure(json.loads(line))
        print(json.dumps(result | {"wall_seconds": time.perf_counter() - start}), file=answers, flush=True)


if __name__ == "__main__":
    side, folder, platform, dtype = sys.argv[1:]
    serve(side, Path(folder), platform, dtype)
