"""The continuous batching of transformers, for `bench_engine.py`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from transformers import ContinuousBatchingConfig, GenerationConfig

PAGE, CHUNK = 64, 512  # tokens of a page of the cache; tokens of prompts that a step reads, as kvjax's engine


def answered(
    model: Any, prompts: Sequence[list[int]], new: Sequence[int], *, rows: int, longest: int
) -> tuple[float, list[list[float]]]:
    """Answers requests, all of which are there from the beginning.

    Args:
        new: the number of tokens of each answer.
        rows: the number of requests that are decoded together.
        longest: the most tokens of a prompt and its answer. The cache has room for as many such requests as rows.

    Returns:
        The seconds until the last answer, and those until each token of each answer.

    Raises:
        RuntimeError: an answer has failed.
    """
    config = ContinuousBatchingConfig(
        page_size=PAGE,
        num_blocks=rows * (-(-longest // PAGE) + 1),
        max_batch_tokens=CHUNK + rows,
        max_requests_per_batch=rows,
        allow_block_sharing=False,
        use_cuda_graph=False,
    )
    greedy = GenerationConfig(max_new_tokens=longest, do_sample=False, eos_token_id=-1, pad_token_id=0)
    with model.continuous_batching_context_manager(greedy, continuous_batching_config=config) as manager:
        began = time.perf_counter()
        names = [
            manager.add_request(prompt, max_new_tokens=count, record_timestamps=True, eos_token_id=-1)
            for prompt, count in zip(prompts, new, strict=True)
        ]
        outputs: dict[str, Any] = {}
        for output in manager:
            outputs[output.request_id] = output
            if len(outputs) == len(names):
                break
        seconds = time.perf_counter() - began
    counts = [len(outputs[name].generated_tokens) if name in outputs else 0 for name in names]
    if counts != list(new):
        errors = {output.error for output in outputs.values()}
        raise RuntimeError(f"{sum(counts)} tokens were answered: expected {sum(new)}; {errors}")
    return seconds, [[at - began for at in outputs[name].timestamps] for name in names]
