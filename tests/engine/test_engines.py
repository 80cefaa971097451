"""Several engines of one model: each answers as one alone, and they are admitted to the memory together."""

from __future__ import annotations

import threading
from typing import Any

import jax
import pytest

import kvjax
from kvjax.engine import Engines, Footprint
from kvjax.engine.memory import check_room
from kvjax.engine.plans import Plans
from kvjax.models import Decoder
from tests.patience import PATIENCE

POLICIES = {"h2o": "h2o:budget=12", "window": kvjax.policies.streaming_llm(budget=12, sinks=2), "full": "full"}
SIZES: dict[str, Any] = {"rows": 2, "max_prompt": 16, "max_new_tokens": 40}
PROMPTS = [[1, 2, 3], [7] * 16, [5, 9, 5, 9, 5]]


def check_all(params: Decoder, policies: dict[str, Any], reference: Decoder) -> None:
    """Requests to all engines at once get the tokens of `generate`."""
    with Engines(params, policies, **SIZES) as engines:
        assert list(engines) == list(policies)
        assert all(engine.params is params for engine in engines.values())
        handles = {
            name: [engine.submit(prompt, eos=(), seed=i) for i, prompt in enumerate(PROMPTS)]
            for name, engine in engines.items()
        }
        for name, policy in policies.items():
            for handle, prompt in zip(handles[name], PROMPTS, strict=True):
                alone = kvjax.generate(reference, prompt, policy=policy, max_new_tokens=40, eos=())
                assert handle.result(timeout=PATIENCE).tokens.tolist() == alone.tokens[0].tolist(), name
    with pytest.raises(kvjax.engine.EngineClosedError):
        engines["full"].submit([1])


@pytest.mark.long
def test_each_answers_as_alone(shallow: Decoder) -> None:
    check_all(shallow, POLICIES, shallow)


@pytest.mark.slow
def test_on_a_mesh(tiny: Decoder) -> None:
    """Programs of two threads, each with collectives, do not wait for each other."""
    mesh = kvjax.make_mesh(1, 2, devices=jax.devices()[:2])
    check_all(kvjax.shard(tiny, mesh), {name: POLICIES[name] for name in ("h2o", "full")}, tiny)


def test_what_does_not_fit_together_is_refused_before_anything_is_compiled(
    shallow: Decoder, compiled: list[str]
) -> None:
    policies = {"h2o": "h2o:budget=12", "full": "full"}
    with pytest.raises(ValueError, match="8,000") as told:
        Engines(shallow, policies, **SIZES, memory="8kB")
    assert "jit(advance)" not in compiled
    words = str(told.value)
    assert "rows=2 of each of 2 engines take" in words
    assert words.count(" + ") == 3
    assert words.endswith("into which 0 rows of each of 2 engines fit")


def test_weights_count_once() -> None:
    parts = [Footprint(1000, 10, 100, 5), Footprint(1000, 20, 200, 7)]
    most = 1000 + 3 * (10 + 20) + 100 + 200 + 5 + 7
    check_room(parts, 3, most, 1)
    check_room(parts, 6, most, 2)
    check_room(parts, 9, None, 1)
    with pytest.raises(ValueError, match=r"rows=3 of each of 2 engines take 1,402 .* 10 \+ 20 per row") as told:
        check_room(parts, 3, most - 1, 1)
    assert "into which 2 rows of each of 2 engines fit" in str(told.value)


@pytest.mark.long
def test_the_second_engine_counts_the_first(shallow: Decoder) -> None:
    """Also the workspace, which is known when the first has been compiled."""
    with Engines(shallow, {"h2o": "h2o:budget=12", "full": "full"}, **SIZES) as engines:
        first, second = (engine.footprint for engine in engines.values())
    least = first.total(2) + second.total(2) - first.weights
    threads = threading.active_count()
    with pytest.raises(ValueError, match="of each of 2 engines"):
        Engines(shallow, {"h2o": "h2o:budget=12", "full": "full"}, **SIZES, memory=least - 1)
    assert threading.active_count() == threads, "the first engine goes on"
    Engines(shallow, {"h2o": "h2o:budget=12", "full": "full"}, **SIZES, memory=least).close()


def test_other_engines_that_cannot_be_made(shallow: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="expected a dict of at least one policy by name"):
        Engines(shallow, {}, **SIZES)
    with pytest.raises(ValueError, match="policy=3"):
        Engines(shallow, {"a": "full", "b": 3}, **SIZES)  # type: ignore[dict-item]
    monkeypatch.setattr(Plans, "on_hosts", True)
    with pytest.raises(ValueError, match="2 policies on the devices of several processes: expected one"):
        Engines(shallow, {"a": "full", "b": "full"}, **SIZES)
