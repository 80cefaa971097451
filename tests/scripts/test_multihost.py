"""Two processes of `scripts.generate_multihost`, each with devices of its own, answer as one process does."""

import json
import sys

import numpy as np
import pytest

import kvjax
from kvjax.policies import parse
from tests.processes import ROOT, free_port, last_lines

MODEL = ROOT / "kvjax" / "demo_model"
PROMPTS = [
    "the code of judith is needle . the clever sea fears . the baker trusts . recall what the code of judith is :",
    "the ocean reaches the baker .",
]
NEW = 12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "model", "policy"),
    [
        (2, 2, "morphkv:budget=24,window=8"),  # each process its own row
        (1, 4, "tova:budget=16"),  # each process its own kv head, shared by its two devices
    ],
)
def test_two_processes_answer_as_one(data: int, model: int, policy: str) -> None:
    command = [sys.executable, "-m", "scripts.generate_multihost", str(MODEL), *PROMPTS]
    command += [f"--data={data}", f"--model={model}", f"--policy={policy}", f"--max-new-tokens={NEW}"]
    command += [f"--coordinator=localhost:{free_port()}", "--processes=2"]
    answers = [json.loads(line) for line in last_lines([[*command, f"--process={index}"] for index in range(2)])]

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
