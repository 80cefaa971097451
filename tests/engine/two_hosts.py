"""What each of two processes runs for test_hosts.py: `python -m tests.engine.two_hosts PROCESS PORT DATA MODEL POLICY`.

Process 0 answers requests and prints what it found as JSON. Process 1 follows.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import pytest

import kvjax
from kvjax.engine import hosts
from kvjax.evaluation.tasks.vocabulary import WORDS, tokenizer
from tests.patience import PATIENCE
from tests.tiny import decoder

SIZES = {"rows": 4, "max_prompt": 28, "max_new_tokens": 400, "chunk": 16, "steps_at_once": 5}
PROMPT = "recall what the code of anna is :"


def requests() -> list[dict[str, Any]]:
    """Arguments of `generate`, more than there are rows. One prompt takes several chunks."""
    samplers = (kvjax.Greedy(), kvjax.Sampler(temperature=0.9, top_k=9, repetition_penalty=1.3))
    prompts = [PROMPT, "the river holds the stone", [5] * 27, "the tall king finds the door", [7, 8], [9] * 17]
    return [
        {"prompt": prompt, "max_new_tokens": 3 + 4 * i, "sampler": samplers[i % 2], "seed": i, "eos": ()}
        for i, prompt in enumerate(prompts)
    ]


def main(process: str, port: str, data: str, model: str, policy: str) -> None:
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=int(process))
    params = kvjax.shard(decoder(vocab=len(WORDS)), kvjax.make_mesh(int(data), int(model)))
    hosts.BLOCK = 16  # so that several blocks of messages are sent
    memory = {"prefix_memory": "1GB", "conversation_memory": "1GB", "conversation_device_memory": "1MB"}
    with kvjax.Engine(params, policy, **SIZES, tokenizer=tokenizer(), **memory) as engine:
        if process == "1":
            with pytest.raises(RuntimeError, match=r"requests go to the engine of process 0; on process 1 call follow"):
                engine.submit([1])
            engine.follow()
        else:
            print(json.dumps(lead(engine)))


def lead(engine: kvjax.Engine) -> dict[str, Any]:
    """What a client of the engine sees."""
    with pytest.raises(RuntimeError, match="this engine takes requests"):
        engine.follow()
    handles = [engine.submit(**request) for request in requests()]
    running = engine.submit([1, 2, 3], eos=())
    for _ in zip(range(3), running.tokens(), strict=False):
        pass
    running.cancel()
    text = handles[4].result(timeout=PATIENCE).text
    assert text is not None
    stopped = engine.submit([7, 8], max_new_tokens=19, eos=(), stop=[text.split()[3]]).result(timeout=PATIENCE)
    prefixed = [engine.submit([3, 4], prefix=[8] * 20, max_new_tokens=5, eos=()) for _ in range(3)]
    begun = engine.submit([3, 1, 4], max_new_tokens=6, eos=()).result(timeout=PATIENCE)
    said = [3, 1, 4, *begun.tokens.tolist(), 5]
    later = engine.submit(said, max_new_tokens=6, eos=()).result(timeout=PATIENCE)
    return {
        "later": [later.cached_tokens, later.tokens.tolist()],
        "prefixed": [handle.result(timeout=PATIENCE).tokens.tolist() for handle in prefixed],
        "devices": [jax.local_device_count(), jax.device_count()],
        "tokens": [handle.result(timeout=PATIENCE).tokens.tolist() for handle in handles],
        "cancelled": running.result(timeout=PATIENCE).finish,
        "stopped": [stopped.finish, stopped.text, text],
        "finished": engine.stats().finished,
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
