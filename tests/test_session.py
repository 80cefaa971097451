"""What `generate`, `stream` and `prefill` refuse: in words, and before anything is compiled."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.models import Decoder
from kvjax.policies import h2o, morphkv, snapkv, streaming_llm, tova


@pytest.fixture(scope="module")
def fresh(tiny: Decoder) -> Decoder:
    """A decoder that nothing has been compiled for."""
    return Decoder(replace(tiny.config, vocab_size=60), nnx.Rngs(0))


@pytest.fixture(scope="module")
def document(fresh: Decoder) -> kvjax.KVCache:
    """Of two rows."""
    return kvjax.prefill(fresh, [[1, 2, 3], [4, 5]], policy=h2o(24))


@pytest.mark.parametrize(
    ("make", "minimum"),
    [
        (lambda: streaming_llm(4, sinks=4), 5),
        (lambda: streaming_llm(5, sinks=4, every=2), 6),
        (lambda: h2o(8, recent=8), 9),
        (lambda: h2o(1, recent=0.5), 2),
        (lambda: tova(0), 1),
        (lambda: snapkv(32, window=32), 33),
        (lambda: morphkv(32, window=32), 33),
        (lambda: morphkv(39, window=32, every=8), 40),
    ],
)
def test_budget_too_small(compiled: list[str], make: Callable[[], kvjax.Policy], minimum: int) -> None:
    with pytest.raises(
        ValueError, match=rf"budget of \d+ entries is smaller than .* accepted is a budget of {minimum}"
    ):
        make()
    assert compiled == []


BAD_PROMPTS = {
    "nothing": ([], "empty prompt; accepted is at least one row"),
    "empty array": (np.zeros(0, np.int32), "empty prompt"),
    "no rows": (np.zeros((0, 4), np.int32), "empty prompt"),
    "empty row": ([[1], []], "row 1 of the prompt is empty; accepted is at least one token"),
    "empty rows of an array": (np.zeros((2, 0), np.int32), "row 0 of the prompt is empty"),
    "beyond the vocabulary": ([[1], [2, 60]], "row 1 of the prompt holds the id 60; accepted are 0 .. 59"),
    "below zero": ([1, -1], "row 0 of the prompt holds the id -1; accepted are 0 .. 59"),
    "floats": ([1.0, 2.0], "row 0 of the prompt is float64 .* accepted are integers"),
    "float array": (jnp.ones((1, 3)), "row 0 of the prompt is float32 .* accepted are integers"),
    "booleans": (np.ones(3, bool), "row 0 of the prompt is bool .* accepted are integers"),
    "three axes": (np.zeros((1, 2, 3), np.int32), r"row 0 of the prompt is int32 of shape \(2, 3\)"),
    "lists of lists of lists": ([[[1], [2, 3]]], "row 0 of the prompt is object"),
    "ids and rows": ([1, [2, 3]], "row 0 of the prompt is object"),
    "text": ("a text", "needs tokenizer="),
    "texts": (["a text"], "needs tokenizer="),
    "a dictionary": ({"input_ids": [1]}, "a prompt of type dict; accepted are a string"),
    "a number": (7, "a prompt of type int; accepted are a string"),
}


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS.values(), ids=BAD_PROMPTS.keys())
@pytest.mark.parametrize("call", [kvjax.generate, kvjax.prefill, kvjax.stream])
def test_prompts(fresh: Decoder, compiled: list[str], call: Callable[..., Any], prompt: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(fresh, prompt)
    assert compiled == []


BAD_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "policy as text": ({"policy": "h2o:budget=9"}, r"kvjax.policies.parse\('h2o:budget=9'\)"),
    "preset not called": ({"policy": h2o}, "policy=.* accepted is a Policy or None"),
    "cache of another kind": ({"cache": (1, 2)}, r"cache=\(1, 2\); accepted is a KVCache or None"),
    "sampler as text": ({"sampler": "greedy"}, r"sampler='greedy'; accepted are kvjax.Greedy\(\)"),
    "sampler not made": ({"sampler": kvjax.Greedy}, "sampler=.* accepted are"),
    "no tokens": ({"max_new_tokens": 0}, "max_new_tokens=0; accepted is an integer >= 1"),
    "half a token": ({"max_new_tokens": 0.5}, "max_new_tokens=0.5"),
    "a truth": ({"max_new_tokens": True}, "max_new_tokens=True"),
    "too many seeds": ({"seed": [1, 2, 3]}, r"seed=\[1, 2, 3\] for a batch of 2; accepted are one integer, or one for"),
    "seed is no integer": ({"seed": 0.5}, "seed=0.5 for a batch of 2"),
    "seed is no integer in a row": ({"seed": [1, None]}, r"seed=\[1, None\]"),
    "no seed": ({"seed": None}, "seed=None"),
    "negative end": ({"eos": -1}, "eos=-1; accepted are a token id >= 0, several, or a list of them for each row"),
    "end as text": ({"eos": "."}, r"eos='\.'; accepted"),
    "end is no integer": ({"eos": [3, 0.5]}, r"eos=\[3, 0.5\]; accepted"),
    "ends of some rows": ({"eos": [[3], 4]}, r"eos=\[\[3\], 4\]; accepted"),
    "ends of too many rows": (
        {"eos": [[3], [4], [5]]},
        "eos has 3 rows for a batch of 2; accepted are ids, or ids for",
    ),
    "chunks of nothing": ({"chunk": 0}, "chunk=0; accepted is a number of tokens >= 1"),
    "half a chunk": ({"chunk": 0.5}, "chunk=0.5; accepted"),
    "compress by chunk without chunks": ({"compress": "chunk"}, "compress='chunk' needs chunk="),
    "compress sometimes": ({"compress": "often"}, "compress='often'; accepted are 'auto', 'never', 'end', 'chunk'"),
}


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS.values(), ids=BAD_OPTIONS.keys())
@pytest.mark.parametrize("call", [kvjax.generate, kvjax.stream])
def test_options(
    fresh: Decoder, compiled: list[str], call: Callable[..., Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        call(fresh, [[1, 2], [3]], **options)
    assert compiled == []


@pytest.mark.parametrize("options", [{"chunk": 0}, {"compress": "chunk"}, {"policy": "full"}])
def test_options_of_prefill(fresh: Decoder, compiled: list[str], options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"accepted|needs"):
        kvjax.prefill(fresh, [1], **options)
    assert compiled == []


def test_stop_strings(fresh: Decoder, tokenizer: Any, compiled: list[str]) -> None:
    with pytest.raises(ValueError, match="need tokenizer="):
        kvjax.stream(fresh, [1], stop="a")
    for stop in (["a", ""], [3]):
        with pytest.raises(ValueError, match=re.escape(f"stop={stop!r}; accepted are strings")):
            kvjax.stream(fresh, [1], stop=stop, tokenizer=tokenizer)
    assert compiled == []


def test_caches(fresh: Decoder, tiny: Decoder, document: kvjax.KVCache, compiled: list[str]) -> None:
    wider = Decoder(replace(fresh.config, head_dim=12), nnx.Rngs(0))
    unfinished = replace(document, filled=False)
    compiled.clear()
    for params, prompt, options, message in (
        (fresh, [[1], [2]], {"policy": h2o(25)}, "made by Policy.* and cannot be extended with Policy"),
        (
            wider,
            [[1], [2]],
            {},
            r"the cache has \(layers, kv heads, head size\) \(2, 2, 8\); the model has \(2, 2, 12\)",
        ),
        (fresh, [1, 2], {}, "a prompt of 1 rows for a cache of 2; accepted are as many"),
        (fresh, [[1], [2], [3]], {}, "a prompt of 3 rows for a cache of 2"),
        (fresh, None, {}, "no pending token to continue from; accepted is a prompt of a token or more"),
        (fresh, None, {"cache": None}, "no prompt and no cache to continue; accepted is one of them or both"),
    ):
        with pytest.raises(ValueError, match=message):
            kvjax.generate(params, prompt, **{"cache": document} | options)
    with pytest.raises(ValueError, match="no pending token"):
        kvjax.generate(fresh, None, cache=unfinished)
    assert compiled == []


def test_positions_beyond_the_models(tiny: Decoder) -> None:
    params = Decoder(replace(tiny.config, max_positions=20), nnx.Rngs(0))
    with pytest.warns(UserWarning, match=r"positions up to 21 .* trained for 20 \(base 10,000\)") as caught:
        answer = kvjax.generate(params, list(range(16)), max_new_tokens=5)
    assert caught[0].filename == __file__  # it points at the caller
    assert answer.lengths.tolist() == [5]
    with pytest.warns(UserWarning, match="positions up to 24"):
        kvjax.generate(params, None, cache=answer.cache, max_new_tokens=3)


def test_control(fresh: Decoder, compiled: list[str]) -> None:
    """The tests above would see it if something were compiled."""
    kvjax.generate(fresh, [[1, 2], [3]], max_new_tokens=1, sampler=kvjax.Sampler(), seed=[1, 2], eos=[[3], [4, 5]])
    assert {"jit(read)", "jit(decode)"} <= set(compiled)
