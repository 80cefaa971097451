"""What strangers pass: each is one clear error before anything is compiled, or it works."""

from __future__ import annotations

import json
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

import kvjax
from kvjax.models import Decoder, UnsupportedModelError, config_from_hf
from tests.checkpoint.folders import decoder as small
from tests.tiny import VOCAB, decoder

LARGE = 99999999999999999999


def cases(tokenizer: Any) -> dict[str, tuple[Callable[[], Any], str]]:
    params = decoder()
    document = kvjax.empty_cache(params, kvjax.policies.full(), np.array([1]))
    mixed: Any = ["ba", 3]
    number: Any = [3]
    text: Any = "full"
    deep = decoder(windows=(None, None))
    deep_document = kvjax.empty_cache(deep, kvjax.policies.full(), np.array([1]))
    slow = types.SimpleNamespace(eos_token_id=None, decode=str)
    return {
        "what load returns, not unpacked": (
            lambda: kvjax.generate((params, tokenizer), [1]),
            "params is a tuple: expected the decoder alone, as in params, tokenizer = kvjax.load",
        ),
        "a model of shapes": (
            lambda: kvjax.generate(jax.eval_shape(lambda: params), [1]),
            "params has shapes in place of arrays: expected a Decoder of arrays",
        ),
        "no model": (lambda: kvjax.stream(None, [1]), "params is of type NoneType: expected a Decoder"),
        "no model to extend with": (lambda: kvjax.extend(3, document, [[1]]), "params is of type int"),
        "an id beyond the vocabulary": (
            lambda: kvjax.extend(params, document, [[99999]]),
            rf"tokens=\[\[99999\]\]: expected integers in 0 .. {VOCAB - 1}",
        ),
        "a negative id": (lambda: kvjax.extend(params, document, np.array([[-1]])), "expected integers in 0 .. "),
        "a cache of a model of more layers": (
            lambda: kvjax.extend(params, deep_document, [[1]]),
            r"the cache has \(layers, kv heads, head size\) \(2, 2, 8\): the model needs \(1, 2, 8\)",
        ),
        "a cache of a model of fewer layers": (
            lambda: kvjax.extend(deep, document, [[1]]),
            r"the cache has \(layers, kv heads, head size\) \(1, 2, 8\): the model needs \(2, 2, 8\)",
        ),
        "another model's cache to save": (
            lambda: kvjax.save_cache("nowhere", document, deep),
            r"the cache has \(layers, kv heads, head size\) \(1, 2, 8\): the model needs \(2, 2, 8\)",
        ),
        "a text for a Policy": (
            lambda: kvjax.empty_cache(params, text, np.array([1])),
            "policy='full': expected a Policy, which kvjax.policies.parse makes of a text",
        ),
        "a text for a Policy that is checked": (
            lambda: kvjax.extend(params, document, [[1]], policy=text),
            "policy='full': expected a Policy, which kvjax.policies.parse makes of a text",
        ),
        "no text of a policy": (
            lambda: kvjax.policies.parse(number),
            "description is of type list: expected a text",
        ),
        "a dtype of integers": (
            lambda: kvjax.plan_cache(
                params.config, kvjax.policies.full(), batch=1, length=1, new_tokens=1, dtype="int32"
            ),
            "dtype='int32': expected one of float32, bfloat16, float16",
        ),
        "no integers": (lambda: kvjax.extend(params, document, [[0.5]]), r"tokens=\[\[0.5\]\]: expected integers"),
        "a huge budget": (lambda: kvjax.policies.h2o(LARGE), "expected an integer < 2"),
        "a huge budget as text": (lambda: kvjax.policies.parse(f"h2o:budget={LARGE}"), "expected an integer < 2"),
        "a huge length": (
            lambda: kvjax.plan_cache(
                params.config, kvjax.policies.full(), batch=1, length=LARGE, new_tokens=1, dtype="float32"
            ),
            f"length={LARGE}: expected an integer in 1 .. 2147483647",
        ),
        "a huge end token": (lambda: kvjax.generate(params, [1], eos=2**40), "eos=1099511627776: expected a token id"),
        "a huge seed": (lambda: kvjax.generate(params, [1], seed=LARGE), "expected an integer of 64 bits"),
        "an integer that Python does not print": (
            lambda: kvjax.policies.snapkv(budget=10**5000),
            "budget=a value of type int: expected an integer < 2",
        ),
        "an integer that is no float": (
            lambda: kvjax.Sampler(top_p=10**400),
            r"top_p=10+\.\.\. \(401 characters\): expected",
        ),
        "a choice of a novel": (
            lambda: kvjax.policies.snapkv(pool="x" * 100_000),
            r"^snapkv: pool='x{199}\.\.\. \(100,002 characters\): expected 'max' or 'avg' or 'none'$",
        ),
        "an option of a novel": (lambda: kvjax.policies.parse(f"h2o:{'x' * 10**5}=1"), "100,002 characters"),
        "a path of a novel": (lambda: kvjax.load("x" * 5000), "expected a path of at most 4096 characters"),
        "a list as a policy": (lambda: kvjax.generate(params, [1], policy=[1] * 9999), r"policy=\[1.*\.\.\. \("),
        "nested signs in a policy": (lambda: kvjax.policies.parse("h2o:budget=" + "-" * 100_000), "is not a number"),
        "nested parentheses": (
            lambda: kvjax.policies.parse("Policy(" * 10_000),
            "describes no policy of this version",
        ),
        "half of a character": (
            lambda: kvjax.generate(params, "ba\ud800", tokenizer=tokenizer),
            "the prompt has the lone surrogate 0xd800 at 2: expected text in UTF-8",
        ),
        "text and a number": (
            lambda: kvjax.generate(params, mixed, tokenizer=tokenizer),
            "row 1 of the prompt is 3 beside rows of text: expected a string",
        ),
        "no stop": (lambda: kvjax.stream(params, [1], stop=None), "stop=None: expected strings"),
        "a stop that is no text": (lambda: kvjax.stream(params, [1], stop=number), r"stop=\[3\]: expected strings"),
        "a slow tokenizer": (
            lambda: kvjax.stream(params, [1], tokenizer=slow),
            "tokenizer is a SimpleNamespace without backend_tokenizer: expected a fast tokenizer",
        ),
        "no folder": (lambda: kvjax.load(None), "path_or_hub_id is of type NoneType: expected a path"),
    }


NAMES = list(cases(None))


@pytest.mark.parametrize("name", NAMES)
def test_one_clear_error_before_anything_is_compiled(
    name: str, tokenizer: PreTrainedTokenizerFast, compiled: list[str]
) -> None:
    call, message = cases(tokenizer)[name]
    compiled.clear()
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert compiled == []
    assert len(str(caught.value)) < 1000


def test_numbers_of_numpy_are_numbers() -> None:
    policies = kvjax.policies
    assert policies.morphkv(np.int64(64), window=np.int32(8)) == policies.morphkv(64, window=8)
    assert repr(policies.snapkv(np.float64(0.5))) == repr(policies.snapkv(0.5))
    with pytest.raises(ValueError, match="budget"):
        policies.h2o(np.bool_(True))


def test_a_model_of_a_billion_layers(tmp_path: Path) -> None:
    kvjax.save_hf(small(), tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text()) | {"num_hidden_layers": 10**9}
    with pytest.raises(UnsupportedModelError, match="num_hidden_layers=1000000000 is not supported; accepted: a pos"):
        config_from_hf(config)


@pytest.mark.slow
def test_a_stream_that_is_left_continues(tiny: Decoder) -> None:
    """Its cache has what it yielded, the last tokens pending, so that the answer goes on as if it had not stopped."""
    rows, options = [[5, 6, 7, 8], [9]], {"policy": "morphkv:budget=24,window=4", "eos": ()}
    expected = kvjax.generate(tiny, rows, max_new_tokens=9, **options).tokens
    stream = kvjax.stream(tiny, rows, max_new_tokens=9, **options)
    found = [next(stream).tokens for _ in range(4)]
    assert stream.cache is None
    stream.close()
    assert list(stream) == []
    later = kvjax.generate(tiny, None, cache=stream.cache, max_new_tokens=5, eos=())
    np.testing.assert_array_equal(np.concatenate([np.stack(found, axis=1), later.tokens], axis=1), expected)


@pytest.mark.slow
def test_a_stream_to_its_end_and_one_that_never_began(tiny: Decoder) -> None:
    stream = kvjax.stream(tiny, [1, 2], max_new_tokens=2, eos=())
    *_, last = stream
    assert stream.cache is last.cache
    unused = kvjax.stream(tiny, [1, 2], max_new_tokens=2)
    unused.close()
    assert unused.cache is None


TINY, HUGE = 1e-300, 1e300


@pytest.mark.parametrize(
    "sampler",
    [
        kvjax.Sampler(temperature=TINY),
        kvjax.Sampler(temperature=1e-39),
        kvjax.Sampler(temperature=HUGE),
        kvjax.Sampler(top_p=1e-39),
        kvjax.Sampler(top_p=TINY),
        kvjax.Sampler(min_p=TINY),
        kvjax.Sampler(min_p=1),
        kvjax.Sampler(temperature=TINY, top_k=1, top_p=TINY, min_p=1, repetition_penalty=HUGE),
        *(kvjax.Sampler(repetition_penalty=penalty) for penalty in (TINY, 1e-39, 1e-38, HUGE)),
        *(kvjax.Greedy(repetition_penalty=penalty) for penalty in (TINY, 1e-38, HUGE)),
    ],
)
def test_samplers_keep_a_token_at_any_setting(sampler: kvjax.SamplingMethod) -> None:
    logits = jnp.array([[3.0, -2.0, 0.0, 5.0], [1.0, 1.0, 1.0, 1.0], [-1e30, -9.0, 1e30, 0.0]], jnp.float32)
    seen = np.array([[1, 1, 0, 0], [1, 1, 1, 1], [0, 1, 1, 1]], bool)
    if isinstance(sampler, kvjax.Sampler):
        filtered = np.asarray(sampler.filtered(logits, seen))
        assert not np.isnan(filtered).any()
        assert (filtered.max(axis=-1) == 0).all()
    tokens = sampler(logits, jax.random.split(jax.random.key(0), 3), seen)
    assert ((tokens >= 0) & (tokens < 4)).all()
    if sampler.repetition_penalty is None and sampler.temperature <= 1 and sampler.top_p is not None:
        assert tokens[0] == 3
