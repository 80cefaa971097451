"""Two processes of `scripts/generate_multihost.py`, each with devices of its own, answer as one process does."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kvjax
from kvjax.policies import parse

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "kvjax" / "demo_model"
PROMPTS = [
    "the code of judith is needle . the clever sea fears . the baker trusts . recall what the code of judith is :",
    "the ocean reaches the baker .",
]
NEW = 12


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "model", "policy"),
    [
        (2, 2, "morphkv:budget=24,window=8"),  # each process its own row
        (1, 4, "tova:budget=16"),  # each process its own kv head, shared by its two devices
    ],
)
def test_two_processes_answer_as_one(data: int, model: int, policy: str) -> None:
    environment = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"}
    command: list[str | Path] = [sys.executable, ROOT / "scripts" / "generate_multihost.py", MODEL, *PROMPTS]
    command += [f"--data={data}", f"--model={model}", f"--policy={policy}", f"--max-new-tokens={NEW}"]
    command += [f"--coordinator=localhost:{free_port()}", "--processes=2"]
    started = [
        subprocess.Popen(
            [*command, f"--process={index}"],
            cwd=ROOT,
            env=os.environ | environment | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        finished = [process.communicate(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], "\n".join(stderr for _, stderr in finished)
    answers = [json.loads(stdout.splitlines()[-1]) for stdout, _ in finished]

    params, tokenizer = kvjax.load(MODEL)
    expected = kvjax.generate(
        params, PROMPTS, policy=parse(policy), max_new_tokens=NEW, tokenizer=tokenizer, log_probs=True
    )
    for index, answer in enumerate(answers):
        assert (answer["process"], answer["local_devices"], answer["devices"]) == (index, 2, 4)
        assert answer["tokens"] == expected.tokens.tolist()
        assert answer["lengths"] == expected.lengths.tolist()
        assert answer["text"] == expected.text
        np.testing.assert_allclose(answer["log_probs"], expected.log_probs, atol=2e-4, rtol=0)
