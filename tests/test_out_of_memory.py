"""What no device can hold is refused with the bytes that it needs and those that there are."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import pytest

import kvjax
from kvjax.models import Decoder
from kvjax.runtime import memory
from kvjax.runtime.modes import own_modes
from tests.cli.commands import kv

HUGE = 2**31 - 1
WHOLE = f"h2o:budget={HUGE}"


@pytest.mark.parametrize(
    "call",
    [
        lambda params: kvjax.generate(params, [1, 2], policy=WHOLE),
        lambda params: kvjax.generate(params, [1, 2], max_new_tokens=HUGE),
        lambda params: kvjax.generate(params, [1, 2] * 50, policy=WHOLE, chunk=16),
        lambda params: kvjax.prefill(params, [1, 2], policy=WHOLE),
        lambda params: kvjax.prefill(params, [1, 2], policy=f"dynamickv:budget={HUGE}"),
        lambda params: kvjax.prefill(params, [1, 2], policy=f"adakv:base=snapkv,base.budget={HUGE}"),
        lambda params: list(kvjax.prefill_each(params, [1, 2], policies=[f"dynamickv:budget={HUGE}"])),
        lambda params: kvjax.with_room(kvjax.prefill(params, [1, 2]), HUGE),
        lambda params: list(kvjax.stream(params, [1, 2], policy=WHOLE)),
    ],
)
def test_caches(call: Callable[[Decoder], Any], shallow: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "host_memory", lambda: 10**9)
    with pytest.raises(MemoryError, match=r"the cache takes [\d,]{14,} bytes per device, which has 1,000,000,000: "):
        call(shallow)


def test_the_bytes_are_those_of_the_cache(shallow: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that exactly fits is made, and one byte less refuses it."""
    held = kvjax.with_room(kvjax.prefill(shallow, [1, 2]), 5000)
    assert held.nbytes == sum(x.nbytes for x in jax.tree.leaves(held.entries))
    start = kvjax.prefill(shallow, [1, 2])
    monkeypatch.setattr(memory, "host_memory", lambda: held.nbytes)
    assert kvjax.with_room(start, 5000).nbytes == held.nbytes
    monkeypatch.setattr(memory, "host_memory", lambda: held.nbytes - 1)
    with pytest.raises(MemoryError, match=f"{held.nbytes:,} bytes per device, which has {held.nbytes - 1:,}"):
        kvjax.with_room(start, 5000)


def test_an_engine(shallow: Decoder) -> None:
    with pytest.raises(ValueError, match=r"rows=100000000 take [\d,]+ bytes per device.*memory=[\d,]+, into which"):
        kvjax.Engine(shallow, rows=100_000_000, max_prompt=64, max_new_tokens=16)


def test_unknown_memory(shallow: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runtime's own error then says the bytes."""
    monkeypatch.setattr(memory, "host_memory", lambda: None)
    with pytest.raises(MemoryError, match=r"Out of memory allocating \d+ bytes: expected a smaller"):
        kvjax.generate(shallow, [1, 2], policy=WHOLE)


def test_other_errors_of_the_runtime_stay() -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), own_modes():
        raise jax.errors.JaxRuntimeError("INTERNAL: no")


def test_commands() -> None:
    for command in (
        ("generate", "demo", "the", "--policy", WHOLE),
        ("serve", "demo", "--rows", 100_000_000, "--port", 0),
    ):
        status, _, stderr = kv(*command)
        assert (status, stderr.count("kvjax: error: ")) == (2, 1)
        assert re.search(r"[\d,]{12,} bytes per device", stderr), stderr
