"""Arbitrary arguments of an engine's methods: each call returns, or raises what is documented."""

from __future__ import annotations

import inspect
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.engine import Engines, Grammar, GrammarError, Guide
from tests.patience import PATIENCE
from tests.request.test_odd_arguments import ODD, refused
from tests.tiny import decoder

SIZES: Any = {"rows": 2, "max_prompt": 16, "max_new_tokens": 3, "chunk": 16}
MORE = (*ODD, [np.array(3)], [jnp.int32(3)], (np.int64(3),), jnp.array([1, 2]), [[1, 2], [3]], np.uint8(3), 10**400)


@pytest.mark.long
@pytest.mark.parametrize("name", [*inspect.signature(kvjax.Engine.submit).parameters][1:])
def test_submit(guided: kvjax.Engine, name: str) -> None:
    def ask(**given: Any) -> None:
        prompt = given.pop("prompt", [1, 2])
        guided.submit(prompt, **given).result(timeout=PATIENCE)

    messages = [refused(ask, {name: value}) for value in MORE]
    assert any(messages)
    assert all(message is None or len(message) < 1500 for message in messages)
    assert guided.stats().rows_busy == guided.stats().queue == 0


@pytest.mark.long
@pytest.mark.parametrize("name", inspect.signature(Guide).parameters)
def test_guides(guided: kvjax.Engine, name: str) -> None:
    def ask(value: Any) -> None:
        guided.submit([1, 2], guide=Guide(**{name: value})).result(timeout=PATIENCE)

    assert any([refused(ask, {"value": value}) for value in MORE])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda engine: engine.submit([1], guide="json"), r"guide='json': expected a Guide"),
        (lambda engine: Guide(grammar="a+"), r"grammar='a\+': expected a Grammar, or None"),
        (lambda engine: Guide(echo="no"), "echo='no': expected True or False"),
        (lambda engine: Guide(presence_penalty=10**400), "presence_penalty=.*: expected a number from -1e"),
        (lambda engine: Guide(logit_bias={1: 10**400}), "logit_bias=.*: expected at most 300 numbers"),
        (lambda engine: engine.submit([1], shown_tokens="<s>"), "shown_tokens='<s>': expected a list of special"),
        (lambda engine: engine.submit([1], shown_tokens=None), "shown_tokens=None: expected a list of special"),
        (
            lambda engine: engine.submit_all([[1], [2]], [0]),
            r"seeds=\[0\]: expected a list of prompts, and one of a se",
        ),
        (lambda engine: engine.submit_all("ab", [0, 0]), "prompts='ab' and .*: expected a list of prompts, and one"),
        (lambda engine: engine.submit_all([[1]], 0), "seeds=0: expected a list of prompts, and one of a seed per"),
        (lambda engine: engine.submit([1]).result("soon"), "timeout='soon': expected a number of seconds, or None"),
    ],
)
def test_what_is_expected(engine: kvjax.Engine, call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(engine)


def test_numbers_of_numpy_and_jax(engine: kvjax.Engine) -> None:
    def tokens(prompt: Any, **options: Any) -> list[int]:
        return engine.submit(prompt, **options).result(timeout=np.float32(PATIENCE)).tokens.tolist()

    expected = tokens([1, 2], eos=[3], seed=7)
    for ends in ([np.array(3)], [jnp.int32(3)], np.array([3]), jnp.array(3), np.int64(3)):
        assert tokens((np.int64(1), np.int64(2)), eos=ends, seed=np.uint8(7)) == expected
    assert [
        handle.result(timeout=float("inf")).tokens.tolist() for handle in engine.submit_all([[1, 2]], np.array([7]))
    ]


@pytest.mark.parametrize("given", [3, None, b"a", "\ud800", ["a"]])
def test_grammars(given: Any) -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed (the extra `serve`)")
    for make in (Grammar.regex, Grammar.lark, Grammar.json_schema):
        with pytest.raises(GrammarError, match=r"expected a string in UTF-8|expected a dict"):
            make(given)


@pytest.mark.parametrize("schema", [{"a": object()}, {"enum": [np.int64(3)]}, {"const": "\ud800"}, {"const": np.nan}])
def test_schemas_that_are_no_json(schema: dict[str, Any]) -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed (the extra `serve`)")
    with pytest.raises(GrammarError, match="expected JSON; "):
        Grammar.json_schema(schema)


@pytest.mark.parametrize("policies", [["full"], "full", 3, {}])
def test_policies_without_names(policies: Any) -> None:
    with pytest.raises(ValueError, match=r"policies=.*: expected a dict of at least one policy by name"):
        Engines(decoder(), policies, **SIZES)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"guided": "no"}, "guided='no': expected True or False"),
        ({"beside": [3]}, r"beside=\[3\]: expected a list of the footprints of other engines"),
        ({"prefix_memory": 100}, r"prefix_memory=100: expected at least [\d,]+ bytes, which one prefix takes, or None"),
    ],
)
def test_engines(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kvjax.Engine(decoder(), "h2o:budget=12", **SIZES, **options)
