"""The arguments that `generate`, `stream` and `prefill` refuse, before anything is compiled."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.models import Decoder
from kvjax.policies import h2o, morphkv, snapkv, streaming_llm
from kvjax.request.request import AnswerOptions, Request


@pytest.fixture(scope="module")
def fresh(shallow: Decoder) -> Decoder:
    """A decoder that nothing has been compiled for."""
    return Decoder(replace(shallow.config, vocab_size=60, mlp_size=shallow.config.mlp_size + 8), nnx.Rngs(0))


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
        (lambda: snapkv(32, window=32), 33),
        (lambda: morphkv(32, window=32), 33),
        (lambda: morphkv(39, window=32, every=8), 40),
    ],
)
def test_budget_too_small(compiled: list[str], make: Callable[[], kvjax.Policy], minimum: int) -> None:
    with pytest.raises(ValueError, match=rf": a budget of \d+ entries: expected {minimum} or more, which is "):
        make()
    assert compiled == []


BAD_PROMPTS = {
    "nothing": ([], "the prompt is empty: expected at least one row"),
    "empty array": (np.zeros(0, np.int32), "the prompt is empty"),
    "no rows": (np.zeros((0, 4), np.int32), "the prompt is empty"),
    "empty row": ([[1], []], "row 1 of the prompt is empty: expected at least one token"),
    "empty rows of an array": (np.zeros((2, 0), np.int32), "row 0 of the prompt is empty"),
    "beyond the vocabulary": ([[1], [2, 60]], "row 1 of the prompt contains the id 60: expected ids in 0 .. 59"),
    "below zero": ([1, -1], "the prompt contains the id -1: expected ids in 0 .. 59"),
    "floats": ([1.0, 2.0], "the prompt is float64 .* expected integers"),
    "float array": (jnp.ones((1, 3)), "row 0 of the prompt is float32 .* expected integers"),
    "booleans": (np.ones(3, bool), "the prompt is bool .* expected integers"),
    "a truth value among integers": ([[1, 2], [3, True]], "row 1 of the prompt is object .* expected integers"),
    "three axes": (np.zeros((1, 2, 3), np.int32), r"row 0 of the prompt is int32 of shape \(2, 3\)"),
    "lists of lists of lists": ([[[1], [2, 3]]], "row 0 of the prompt is object"),
    "ids and rows": ([1, [2, 3]], "the prompt is object"),
    "text": ("a text", "expected tokenizer="),
    "texts": (["a text"], "expected tokenizer="),
    "a dictionary": ({"role": "user"}, "the prompt is of type dict with the keys"),
    "a number": (7, "the prompt is of type int: expected a string"),
    "a number of NumPy": (np.int32(7), "the prompt is of type int32: expected a string"),
}


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS.values(), ids=BAD_PROMPTS.keys())
@pytest.mark.parametrize("call", [kvjax.generate, kvjax.prefill, kvjax.stream])
def test_prompts(fresh: Decoder, compiled: list[str], call: Callable[..., Any], prompt: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(fresh, prompt)
    assert compiled == []


BAD_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown policy": ({"policy": "lru:budget=9"}, "unknown policy 'lru'"),
    "policy of another kind": ({"policy": 9}, "policy=9: expected a Policy, a text such as"),
    "preset not called": ({"policy": h2o}, "policy=.* expected a Policy, a text such as"),
    "cache of another kind": ({"cache": (1, 2)}, r"cache=\(1, 2\): expected a KVCache or None"),
    "sampler as text": ({"sampler": "greedy"}, r"sampler='greedy': expected kvjax.Greedy\(\)"),
    "sampler not made": ({"sampler": kvjax.Greedy}, "sampler=.* expected kvjax.Greedy"),
    "no tokens": ({"max_new_tokens": 0}, "max_new_tokens=0: expected an integer in 1 .. 2147483647"),
    "half a token": ({"max_new_tokens": 0.5}, "max_new_tokens=0.5"),
    "a truth": ({"max_new_tokens": True}, "max_new_tokens=True"),
    "more tokens than positions": ({"max_new_tokens": 10**20}, "max_new_tokens=100000000000000000000: expected"),
    "too many seeds": (
        {"seed": [1, 2, 3]},
        r"seed=\[1, 2, 3\]: expected an integer of 64 bits or a JAX key, or for each of 2 rows",
    ),
    "seed is no integer": ({"seed": 0.5}, "seed=0.5: expected an integer"),
    "seed is no integer in a row": ({"seed": [1, None]}, r"seed=\[1, None\]"),
    "no seed": ({"seed": None}, "seed=None"),
    "seed as text": ({"seed": "12"}, "seed='12'"),
    "too many keys": ({"seed": jax.random.split(jax.random.key(0), 3)}, r"dtype key<fry> and shape \(3,\): expected"),
    "keys of two axes": ({"seed": jax.random.split(jax.random.key(0), (2, 2))}, r"shape \(2, 2\): expected an integer"),
    "legacy keys of too many rows": ({"seed": jnp.zeros((3, 2), jnp.uint32)}, r"dtype uint32 and shape \(3, 2\)"),
    "half a legacy key": ({"seed": jnp.zeros(1, jnp.uint32)}, r"dtype uint32 and shape \(1,\)"),
    "a number on a device": ({"seed": jnp.uint32(3)}, r"dtype uint32 and shape \(\): expected an integer"),
    "an array of signed integers": ({"seed": jnp.zeros(2, jnp.int32)}, r"dtype int32 and shape \(2,\): expected"),
    "large seed": ({"seed": 2**63}, "seed=9223372036854775808: expected an integer of 64 bits"),
    "large seeds": ({"seed": [1, -(2**63) - 1]}, "expected an integer of 64 bits"),
    "array of seeds that are no integers": ({"seed": np.ones(2)}, r"seed=array\(\[1., 1.\]\)"),
    "negative end": (
        {"eos": -1},
        "eos=-1: expected a token id in 0 .. 59, a list of ids, or a list of ids per row",
    ),
    "large end": ({"eos": 2**40}, "eos=1099511627776: expected"),
    "end beyond the vocabulary": ({"eos": [[3], [60]]}, r"eos=\[\[3\], \[60\]\]: expected a token id in 0 .. 59"),
    "end as text": ({"eos": "."}, r"eos='\.': expected"),
    "ends as bytes": ({"eos": b"ab"}, "eos=b'ab': expected"),
    "ends as a dictionary": ({"eos": {3: 4}}, "eos={3: 4}: expected"),
    "seeds as bytes": ({"seed": b"ab"}, "seed=b'ab': expected an integer"),
    "seeds without an order": ({"seed": {5, 3}}, "seed={.*}: expected an integer"),
    "end is no integer": ({"eos": [3, 0.5]}, r"eos=\[3, 0.5\]: expected"),
    "ends of some rows": ({"eos": [[3], 4]}, r"eos=\[\[3\], 4\]: expected"),
    "ends of too many rows": (
        {"eos": [[3], [4], [5]]},
        "eos has 3 rows: expected 2, the size of the batch",
    ),
    "chunks of nothing": ({"chunk": 0}, "chunk=0: expected a number of tokens >= 1"),
    "half a chunk": ({"chunk": 0.5}, "chunk=0.5: expected"),
    "compress by chunk without chunks": ({"compress": "chunk"}, "compress='chunk' needs chunk="),
    "a second allocation": (
        {"policy": "dynamickv:budget=24,window=4", "compress": "chunk", "chunk": 16},
        "compress='chunk' would allocate the budget to layers and heads more than once: expected 'auto' or 'never'",
    ),
    "compress sometimes": ({"compress": "often"}, "compress='often': expected one of 'auto', 'never', 'end', 'chunk'"),
}


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS.values(), ids=BAD_OPTIONS.keys())
@pytest.mark.parametrize("call", [kvjax.generate, kvjax.stream])
def test_options(
    fresh: Decoder, compiled: list[str], call: Callable[..., Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        call(fresh, [[1, 2], [3]], **options)
    assert compiled == []


def test_log_probs(fresh: Decoder, compiled: list[str]) -> None:
    """A text would count as True."""
    for value in ("no", 1, None):
        with pytest.raises(ValueError, match=f"log_probs={value!r}: expected True or False"):
            kvjax.generate(fresh, [1], log_probs=value)
    assert compiled == []


@pytest.mark.parametrize("options", [{"chunk": 0}, {"compress": "chunk"}, {"policy": 3}, {"cache": 3}, {"clock": 3}])
def test_options_of_prefill(fresh: Decoder, compiled: list[str], options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"expected|accepted|needs"):
        kvjax.prefill(fresh, [1], **options)
    assert compiled == []


def test_stop_strings(fresh: Decoder, tokenizer: Any, compiled: list[str]) -> None:
    with pytest.raises(ValueError, match="expected tokenizer="):
        kvjax.stream(fresh, [1], stop="a")
    for stop in (["a", ""], [3]):
        with pytest.raises(ValueError, match=re.escape(f"stop={stop!r}: expected strings")):
            kvjax.stream(fresh, [1], stop=stop, tokenizer=tokenizer)
    assert compiled == []


def test_chat_messages(fresh: Decoder, tokenizer: Any, compiled: list[str]) -> None:
    """tests/request/test_prompts.py has the other faults of messages."""
    for call in (kvjax.generate, kvjax.prefill, kvjax.stream):
        with pytest.raises(ValueError, match="no chat template"):
            call(fresh, [{"role": "user", "content": "ba"}], tokenizer=tokenizer)
        with pytest.raises(ValueError, match="message 0 of the prompt is"):
            call(fresh, [{"role": "user"}], tokenizer=tokenizer)
    assert compiled == []


@pytest.mark.long
def test_caches(fresh: Decoder, document: kvjax.KVCache, compiled: list[str]) -> None:
    wider = Decoder(replace(fresh.config, head_dim=12), nnx.Rngs(0))
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), fresh)
    unfinished = replace(document, filled=False)
    compiled.clear()
    for params, prompt, options, message in (
        (fresh, [[1], [2]], {"policy": h2o(25)}, "made by Policy.* and cannot be extended with Policy"),
        (
            wider,
            [[1], [2]],
            {},
            r"the cache has \(layers, kv heads, head size\) \(1, 2, 8\): the model needs \(1, 2, 12\)",
        ),
        (half, [[1], [2]], {}, "the cache has keys and values of float32: the model needs bfloat16"),
        (fresh, [1, 2], {}, "the prompt has 1 row: expected 2, the number of rows of the cache"),
        (fresh, [[1], [2], [3]], {}, "the prompt has 3 rows: expected 2"),
        (fresh, None, {}, "no pending token: expected a prompt of at least one token"),
        (fresh, None, {"cache": None}, "prompt=None and cache=None: expected a prompt, a cache to continue, or both"),
    ):
        with pytest.raises(ValueError, match=message):
            kvjax.generate(params, prompt, **{"cache": document} | options)
    with pytest.raises(ValueError, match="no pending token"):
        kvjax.generate(fresh, None, cache=unfinished)
    assert compiled == []


@pytest.mark.long
def test_positions_beyond_the_models(shallow: Decoder) -> None:
    params = Decoder(replace(shallow.config, max_positions=20), nnx.Rngs(0))
    with pytest.warns(UserWarning, match=r"reaches position 21 .* trained for 20 \(base 10,000\)") as caught:
        answer = kvjax.generate(params, list(range(16)), max_new_tokens=5)
    assert caught[0].filename == __file__  # it points at the caller
    assert answer.lengths.tolist() == [5]
    with pytest.warns(UserWarning, match="reaches position 24"):
        kvjax.generate(params, None, cache=answer.cache, max_new_tokens=3)


def test_a_prompt_that_is_replayed_does_not_go_on(fresh: Decoder) -> None:
    """Which a stream says at the call, before anything is read."""
    begun = kvjax.empty_cache(fresh, kvjax.policies.kvcompose(8), np.array([3]))
    kvjax.stream(fresh, [1], cache=begun)
    with pytest.raises(ValueError, match="the policy replays the prompt: expected a prompt that is read in one call"):
        kvjax.stream(fresh, [1], cache=replace(begun, length=begun.length + 3))


def test_text_begins_in_an_empty_cache(shallow: Decoder, tokenizer: Any) -> None:
    cache = kvjax.empty_cache(shallow, kvjax.policies.full(), np.array([3]))
    requests = [Request.of(shallow, "ba ce", tokenizer=tokenizer, cache=given) for given in (None, cache)]
    assert requests[0].batch.lengths.tolist() == [3]
    np.testing.assert_array_equal(*(request.batch.tokens for request in requests))


def test_numbers_of_numpy_are_as_large_as_those_of_python(shallow: Decoder) -> None:
    request = Request.of(shallow, [1], chunk=np.uint8(16), answer=AnswerOptions(np.int8(127)))
    assert (request.limit + 1, request.room, -request.chunk) == (128, 128, -16)


def test_control(fresh: Decoder, compiled: list[str]) -> None:
    """The tests above would see it if something were compiled."""
    kvjax.generate(fresh, [[1, 2], [3]], max_new_tokens=1, sampler=kvjax.Sampler(), seed=[1, 2], eos=[[3], [4, 5]])
    assert {"jit(_read_layers)", "jit(decode)"} <= set(compiled)
