"""Arbitrary arguments of presets, parts and public functions: each call returns, or raises what is documented."""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import policies
from kvjax.decoding import sampling
from kvjax.methods import registry
from tests.tiny import decoder

SNAPKV = policies.snapkv(64)
ODD: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        3,
        2**31,
        10**30,
        -(10**30),
        0.0,
        0.5,
        1.0,
        -0.5,
        float("nan"),
        float("inf"),
        1e-300,
    ),
    *("", "max", "mean", "full", "x", "\ud800", "a" * 5000, "-" * 5000, b"x", complex(1, 2), object(), print, range(3)),
    *([], [1], [[1], []], [None], (), (1, 2), (0.5,) * 8, ((0.5, 0.5), (0.1, 0.2)), {}, {"a": 1}, {"role": "user"}),
    *(
        np.int64(3),
        np.float32(0.5),
        np.array(3),
        np.array([1, 2]),
        np.array([[1.5]]),
        np.array(["a"]),
        np.zeros((0, 3)),
    ),
    *(
        SNAPKV,
        SNAPKV.score,
        SNAPKV.budget,
        SNAPKV.select,
        policies.PRESETS,
        Path("/dev/null/nowhere"),
        jnp.ones(2),
        decoder(),
    ),
)
CALLS = 40  # of each preset and part
FEW = 16  # of each argument of a public function


class AcceptedError(Exception):
    """The arguments were accepted, and the model would run now."""


def refused(call: Callable[..., Any], options: Mapping[str, Any]) -> str | None:
    """The message of a documented error; None if there is none. Other errors are not caught."""
    try:
        call(**options)
    except (ValueError, OSError, NotImplementedError) as error:
        return str(error)
    except AcceptedError:
        pass
    return None


def draws(call: Callable[..., Any], given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Arguments of which one to three are odd; those without a default are in `given`, or odd as well."""
    parameters, rng = inspect.signature(call).parameters, random.Random(0)
    names = [name for name, parameter in parameters.items() if parameter.kind is not parameter.VAR_KEYWORD]
    needed = [name for name in names if parameters[name].default is inspect.Parameter.empty]
    for _ in range(CALLS if names else 0):
        odd = rng.sample(names, min(len(names), rng.randint(1, 3)))
        yield {name: given[name] for name in needed if name in given} | {
            name: rng.choice(ODD) for name in dict.fromkeys([*odd, *(name for name in needed if name not in given)])
        }


Call = tuple[Callable[..., Any], dict[str, Any]]
PARTS = [name for name, part in registry.parts().items() if not inspect.isabstract(part)]
TEXTS = [value for value in ODD if isinstance(value, str)]


def calls_of_preset(name: str) -> Iterator[Call]:
    for options in draws(policies.PRESETS[name], {"budget": 64}):
        yield policies.PRESETS[name], options


def calls_of_part(name: str) -> Iterator[Call]:
    given = {"base": SNAPKV.score, "budget": SNAPKV.budget, "entries": 4, "share": 0.5}
    for options in draws(registry.parts()[name], given):
        yield registry.parts()[name], options


def calls_of_text(text: str) -> Iterator[Call]:
    for preset in policies.PRESETS:
        for form in (text, *(f"{preset}:{end}" for end in (text, f"budget={text}", f"base={text}", f"{text}=1"))):
            yield policies.parse, {"description": form}
    for form in (text, f"top_k={text}", f"greedy,{text}=1"):
        yield sampling.parse, {"text": form}


@pytest.mark.parametrize("name", policies.PRESETS)
def test_presets(name: str) -> None:
    found = [refused(*call) for call in calls_of_preset(name)]
    assert name == "full" or any(found)


@pytest.mark.parametrize("name", PARTS)
def test_parts(name: str) -> None:
    for call in calls_of_part(name):
        refused(*call)


@pytest.mark.parametrize("text", TEXTS)
def test_texts(text: str) -> None:
    for call in calls_of_text(text):
        refused(*call)


FUNCTIONS = (
    *(
        "generate",
        "prefill",
        "stream",
        "begin_each",
        "prefill_each",
        "extend",
        "empty_cache",
        "with_room",
        "plan_cache",
    ),
    *("make_mesh", "shard", "load", "restore", "save", "save_hf", "save_cache", "restore_cache", "Sampler", "Greedy"),
    "Engine",
)


def functions(folder: Path) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Public functions with arguments that are accepted."""
    params, rows = decoder(), [[1, 2, 3]]
    cache = kvjax.prefill(params, rows, policy=SNAPKV)
    asked = {"params": params, "prompt": rows}
    return {
        "generate": (kvjax.generate, asked),
        "prefill": (kvjax.prefill, asked),
        "stream": (kvjax.stream, asked),
        "begin_each": (kvjax.begin_each, asked | {"policies": [SNAPKV]}),
        "prefill_each": (lambda **options: list(kvjax.prefill_each(**options)), asked | {"policies": [SNAPKV]}),
        "extend": (kvjax.extend, {"params": params, "cache": cache, "tokens": rows}),
        "empty_cache": (kvjax.empty_cache, {"params": params, "policy": SNAPKV, "prompt_lengths": np.array([3])}),
        "with_room": (kvjax.with_room, {"cache": cache, "room": 3}),
        "plan_cache": (
            kvjax.plan_cache,
            {"config": params.config, "policy": SNAPKV, "batch": 1, "length": 3, "new_tokens": 3, "dtype": "float32"},
        ),
        "make_mesh": (kvjax.make_mesh, {}),
        "shard": (kvjax.shard, {"params": params, "mesh": kvjax.make_mesh()}),
        "load": (kvjax.load, {"path_or_hub_id": folder / "nowhere"}),
        "restore": (kvjax.restore, {"path": folder / "nowhere"}),
        "save": (kvjax.save, {"params": params, "path": folder / "model"}),
        "save_hf": (kvjax.save_hf, {"params": params, "path": folder / "model_hf"}),
        "save_cache": (kvjax.save_cache, {"path": folder / "cache", "cache": cache, "params": params}),
        "restore_cache": (kvjax.restore_cache, {"path": folder / "nowhere", "params": params}),
        "Sampler": (kvjax.Sampler, {}),
        "Greedy": (kvjax.Greedy, {}),
        "Engine": (kvjax.Engine, {"params": params, "rows": 2, "max_prompt": 16, "max_new_tokens": 4}),
    }


def calls_of_function(name: str, folder: Path) -> Iterator[Call]:
    """Each argument in turn is odd, and all others are accepted."""
    call, given = functions(folder)[name]
    rng = random.Random(name)
    for argument in inspect.signature(getattr(kvjax, name)).parameters:
        for value in rng.sample(ODD, FEW):
            if argument not in ("progress", "clock", "overwrite") and not (argument == "params" and value is decoder()):
                yield call, given | {argument: value}


@contextmanager
def without_programs(folder: Path) -> Iterator[None]:
    """A request that is accepted ends with AcceptedError. The working directory is `folder`, and no hub is asked."""

    def run(*_: Any, **__: Any) -> Any:
        raise AcceptedError

    with pytest.MonkeyPatch.context() as patch:
        for module in ("generate", "stream"):
            patch.setattr(sys.modules[f"kvjax.{module}"], "read_request", run)
        for program in ("read", "read_to_end"):
            patch.setattr(sys.modules["kvjax.prefill_each"], program, run)
        for program in ("read_prompt", "jitted_step"):
            patch.setattr(sys.modules["kvjax.extend"], program, run)
        patch.setattr(sys.modules["kvjax.engine.engine"], "Device", run)
        patch.chdir(folder)
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


@pytest.mark.slow(first=3)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_public_functions(name: str, tmp_path: Path) -> None:
    calls = calls_of_function(name, tmp_path)
    call = next(calls)  # the cache of the given arguments is made
    with without_programs(tmp_path):
        messages = [refused(*call) for call in (call, *calls)]
    assert all(message is None or len(message) < 1500 for message in messages)
    assert any(messages)
    assert jax.config.jax_enable_x64 is False
