"""The steps of an answer are compiled in a thread while the prompt is read: once, and for the call that follows."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.models import Decoder
from kvjax.runtime import clock
from kvjax.runtime.clock import Clock
from kvjax.runtime.progress import watched
from tests.products import part
from tests.tiny import decoder

PROMPT = list(range(1, 30))
VOCABULARIES = count(150)
POLICIES = [
    "full",
    "snapkv:budget=0.5,window=4",
    "morphkv:budget=16,window=4",
    "adakv:base=snapkv,base.window=4",
    "quantize:policy=h2o,policy.budget=12",
    "kvzip:budget=0.5,score.instruction='',score.starting='',score.suffix='',score.chunk=16",
]


@pytest.fixture
def steps() -> Iterator[list[tuple[str, bool]]]:
    """Programs of steps that XLA compiles from here on, and whether a thread does it."""
    names: list[tuple[str, bool]] = []

    def listen(event: str, _: float, **facts: str | int) -> None:
        name = str(facts.get("fun_name"))
        if event == "/jax/core/compile/backend_compile_duration" and name in ("jit(decode)", "jit(advance)"):
            names.append((name, threading.current_thread() is not threading.main_thread()))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


def fresh() -> Decoder:
    """A decoder of one layer that nothing has been compiled for: each has a vocabulary of another size."""
    config = replace(decoder().config, hidden_size=16, mlp_size=16, vocab_size=next(VOCABULARIES))
    return Decoder(config, nnx.Rngs(0))


@pytest.mark.parametrize("policy", part(POLICIES, POLICIES[:3]))
def test_a_first_call_compiles_the_loop_in_a_thread(policy: str, steps: list[tuple[str, bool]]) -> None:
    params = fresh()
    told: list[str] = []
    with watched(lambda doing: told.append(doing.what)):
        first = kvjax.generate(params, PROMPT, policy=policy, max_new_tokens=9)
    assert steps == [("jit(decode)", True)]
    assert told[-2:] == ["compiling the answer's steps", "running"]
    threads = threading.active_count()
    again = kvjax.generate(params, PROMPT, policy=policy, max_new_tokens=9)
    assert len(steps) == 1
    assert threading.active_count() == threads
    np.testing.assert_array_equal(again.tokens, first.tokens)
    turn = kvjax.generate(params, PROMPT[:3], cache=first.cache, max_new_tokens=9)
    assert steps[1:] in ([], [("jit(decode)", True)])  # the cache may have grown
    assert turn.cache.length[0] == len(PROMPT) + 9 + 3 + 8


def test_a_stream_compiles_its_step_in_a_thread(steps: list[tuple[str, bool]]) -> None:
    params = fresh()
    pieces = list(kvjax.stream(params, PROMPT, policy="h2o:budget=16", max_new_tokens=5))
    assert steps == [("jit(advance)", True)]
    expected = kvjax.generate(params, PROMPT, policy="h2o:budget=16", max_new_tokens=5)
    assert [int(piece.tokens[0]) for piece in pieces] == expected.tokens[0].tolist()


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("snapkv:budget=0.5,window=4", {"chunk": 8}),  # the cache may have fewer entries than slots by then
        ("adakv:base=h2o,base.budget=24", {}),  # pools that evict are as long as their longest segment
    ],
)
def test_shapes_that_the_prompt_decides_are_not_foreseen(
    policy: str, options: dict[str, Any], steps: list[tuple[str, bool]]
) -> None:
    kvjax.generate(fresh(), PROMPT, policy=policy, max_new_tokens=3, **options)
    assert [name for name, _ in steps] == ["jit(decode)"]


def test_parameters_with_a_device_of_their_own(steps: list[tuple[str, bool]]) -> None:
    params = jax.device_put(fresh(), jax.local_devices()[0])
    kvjax.generate(params, PROMPT, max_new_tokens=3)
    assert steps == [("jit(decode)", False)]


def test_an_error_of_the_thread_is_left_to_the_call(
    steps: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Any) -> None:
        raise RuntimeError("no compiler")

    params = fresh()
    with monkeypatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", refuse)
        found = kvjax.generate(params, PROMPT, max_new_tokens=3)
    assert steps == [("jit(decode)", False)]
    np.testing.assert_array_equal(kvjax.generate(params, PROMPT, max_new_tokens=3).tokens, found.tokens)


def test_waiting_for_the_compiler_is_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 3.5, 4.0, 4.25])
    monkeypatch.setattr(clock.time, "perf_counter", lambda: next(times))
    measured = Clock()
    measured.run("compile", lambda: None)
    measured.run("decode", lambda: None)
    assert measured.seconds == {"compile": 2.5, "decode": 0.25}
