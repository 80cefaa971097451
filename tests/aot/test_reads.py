"""The programs that read a prompt, compiled for one GPU: what the host launches in the middle of them."""

from __future__ import annotations

import re

import pytest

import kvjax
from benchmarks.aot import lower
from benchmarks.aot.graphs import GRAPH, LOOP, compile_listed
from kvjax.policies import PRESETS
from tests.aot.compiled import accelerators, llama, plan_params, sized
from tests.products import part

# Keyformer's noise walks over tiles of a prompt, in loops whose rounds are known only at run time.
IN_LOOPS = {"keyformer"}
LAYERS = 4  # D2O retains everything in three


@pytest.mark.aot
@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")
@pytest.mark.parametrize("name", part(PRESETS, ["h2o", "morphkv", "snapkv"], ["morphkv"]))
def test_no_loop_of_a_prompt_is_driven_by_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lower, "plan_params", plan_params)
    mesh = kvjax.make_mesh(devices=accelerators("h200:1")[:1])
    programs = lower.lower_prefill(
        llama(LAYERS, 1024, 2048, 32), sized(name), mesh=mesh, batch=1, length=512, new_tokens=16
    )
    driven = set()
    for program, lowered in programs.items():
        try:
            _, launches = compile_listed(lowered)
        except ValueError:  # a program of a single kernel has no list
            continue
        if LOOP in re.findall(r"^\d+: (k\w+)", launches, re.MULTILINE) and GRAPH in launches:
            driven.add(program)
    assert bool(driven) == (name in IN_LOOPS), driven
