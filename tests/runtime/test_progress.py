"""`watched`: what a call of `generate` tells, which programs it counts, and that its answer stays the same."""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np
import pytest

import kvjax
from kvjax.models import Decoder
from kvjax.runtime.progress import Doing, tell, watched
from tests.tiny import decoder

PROMPTS = [list(range(1, 20)), list(range(3, 14))]
CASES: dict[str, dict[str, Any]] = {
    "snapkv:budget=6,window=2": {},
    "kvzip:budget=0.5,sinks=2,score.chunk=10,score.instruction='',score.starting='',score.suffix=''": {},
    "dynamickv:budget=8,window=2": {"chunk": 8},
}


@pytest.fixture(scope="module")
def params() -> Decoder:
    return decoder()


@pytest.mark.long
@pytest.mark.parametrize("policy", CASES)
def test_each_program_is_counted_once(params: Decoder, policy: str) -> None:
    """As many programs are compiled as were announced before the first one; the answer is that of other callers."""
    options = {"policy": policy, "max_new_tokens": 9, "eos": ()} | CASES[policy]
    expected = kvjax.generate(params, PROMPTS, **options)
    jax.clear_caches()
    told: list[Doing] = []
    with watched(told.append, closely=True):
        out = kvjax.generate(params, PROMPTS, **options)
    np.testing.assert_array_equal(out.tokens, expected.tokens)
    assert out.cache.nbytes == expected.cache.nbytes
    counts = [re.match(r"compiling (\d+) of (\d+) programs: \w+", one.what) for one in told]
    numbers = list(dict.fromkeys((int(found[1]), int(found[2])) for found in counts if found))
    assert numbers == [(i, len(numbers)) for i in range(1, len(numbers) + 1)]
    reading = [(one.done, one.total) for one in told if one.what == "reading the prompt"]
    assert list(dict.fromkeys(reading)) == [(i, reading[0][1]) for i in range(reading[0][1] or 0)]
    decoded = [one.done for one in told if one.what == "decoding"]
    assert (decoded[0], decoded[-1]) == (1, 9)
    assert decoded == sorted(decoded)


@pytest.mark.long
@pytest.mark.parametrize("policy", ["dynamickv:budget=8,window=2", "adakv:base=h2o,base.budget=8"])
@pytest.mark.parametrize("chunk", [None, 4])
def test_a_turn_of_a_dialogue_is_watched_too(params: Decoder, policy: str, chunk: int | None) -> None:
    told: list[Doing] = []
    first = kvjax.generate(params, PROMPTS, policy=policy, max_new_tokens=5, eos=())
    turn = {"cache": first.cache, "max_new_tokens": 5, "eos": (), "chunk": chunk}
    expected = kvjax.generate(params, PROMPTS, **turn)
    with watched(told.append, closely=True):
        out = kvjax.generate(params, PROMPTS, **turn)
    np.testing.assert_array_equal(out.tokens, expected.tokens)
    reading = [(one.done, one.total) for one in told if one.what == "reading the prompt"]
    assert list(dict.fromkeys(reading)) == [(i, reading[0][1]) for i in range(reading[0][1] or 0)]


def test_a_compiled_program_is_not_told_and_nobody_hears_what_follows(params: Decoder) -> None:
    told: list[Doing] = []
    for _ in range(2):
        told.clear()
        with watched(told.append, closely=True):
            kvjax.generate(params, PROMPTS, max_new_tokens=3, stop=())
    assert {one.what for one in told} == {"reading the prompt", "decoding"}
    told.clear()
    tell("anything")
    kvjax.generate(params, PROMPTS, max_new_tokens=3)
    assert not told


def test_compiling_ends_where_nothing_else_is_told() -> None:
    told: list[Doing] = []
    with watched(told.append):
        jax.jit(lambda x: x + told.count(None))(1.0)
    assert told[0].what.startswith("compiling")
    assert told[-1].what == "running"


@pytest.mark.long
def test_an_engine_tells_how_many_programs_it_compiles(params: Decoder) -> None:
    told: list[Doing] = []
    with watched(told.append), kvjax.Engine(params, "full", rows=1, max_prompt=16, max_new_tokens=4) as engine:
        programs = engine.warm_up.programs
    counted = [one for one in told if one.what == "compiling"]
    assert counted == [Doing("compiling", i, programs, "programs") for i in range(programs + 1)]
