"""A second process compiles nothing: it finds all programs of the first in the persistent cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE

CODE = """
import json, sys
from collections import Counter

import jax

import kvjax
from kvjax.policies import parse
from tests.tiny import decoder

POLICIES = ["full", "snapkv:budget=0.5,window=4", "morphkv:budget=16,window=4", "adakv:base=snapkv,base.window=4",
            "quantize:policy=h2o,policy.budget=12"]
counts = Counter()
jax.monitoring.register_event_listener(lambda event, **_: counts.update([event.rpartition("/")[2]]))
params = decoder(windows=(None,) * 8)
for text in POLICIES:
    kvjax.generate(params, [list(range(1, 30)), [3, 1, 2]], policy=parse(text), max_new_tokens=12)
json.dump([counts["cache_hits"], counts["cache_misses"]], sys.stdout)
"""


@pytest.mark.slow
def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    """The two processes hash texts in different ways, which must not be a part of a program."""

    def run(seed: str) -> tuple[int, int]:
        settings = {
            "PYTHONHASHSEED": seed,
            "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        command = [sys.executable, "-W", "ignore", "-c", CODE]
        done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, done.stderr
        hits, misses = json.loads(done.stdout)
        return hits, misses

    hits, misses = run("1")
    again, none = run("2")
    assert misses > 20
    assert again == hits + misses
    assert none == 0
