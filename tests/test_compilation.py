"""Compilation: prompts of a bucket of lengths share programs, and longer answers need no new ones."""

import gc
from collections import Counter
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

import jax
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.cache import bucket
from kvjax.kv_cache import KVCache
from kvjax.models import Decoder
from kvjax.policies import parse
from kvjax.reading.layers import step
from tests.products import part
from tests.tiny import decoder

RNG = np.random.default_rng(2)
READING = ("jit(begin)", "jit(_read_layers)", "jit(logits_of)")
EVERY_FOURTH = "morphkv:budget=16,window=4,every=4"
VOCABULARIES = count(50)


def smaller(tiny: Decoder) -> Decoder:
    """A decoder of one layer that nothing has been compiled for: each has a vocabulary of another size."""
    config = replace(tiny.config, windows=(None,), hidden_size=16, mlp_size=16, vocab_size=next(VOCABULARIES))
    return Decoder(replace(config, max_positions=100_000), nnx.Rngs(0))


@pytest.mark.slow
@pytest.mark.parametrize("text", ["full", "snapkv:budget=0.5,window=4"])
def test_prompts_of_all_lengths_share_programs(tiny: Decoder, compiled: list[str], text: str) -> None:
    """The number of slots follows from the prompt here; with a fixed budget all prompts share one decode program."""
    params = smaller(tiny)
    kvjax.generate(params, [1], policy=parse(text), max_new_tokens=4)
    once = Counter(compiled)  # the small programs around the two, of which every one is needed
    lengths = list(range(1, 48))
    for length in lengths:
        kvjax.generate(params, RNG.integers(0, 50, length), policy=parse(text), max_new_tokens=4)
    programs, buckets = Counter(compiled), {bucket(length) for length in lengths}
    assert len(lengths) == 47
    assert len(buckets) == 4
    assert {name: programs[name] for name in READING} == dict.fromkeys(READING, len(buckets))
    assert programs["jit(decode)"] == len(buckets)
    large = (*READING, "jit(decode)")
    assert {name: n for name, n in programs.items() if name not in large} == {
        name: n for name, n in once.items() if name not in large
    }


@pytest.mark.long
def test_fixed_budget_decodes_all_prompts_with_one_program(tiny: Decoder, compiled: list[str]) -> None:
    params = smaller(tiny)
    for length in (3, 20, 40):
        kvjax.generate(params, RNG.integers(0, 50, length), policy=parse("h2o:budget=8"), max_new_tokens=4)
    assert Counter(compiled)["jit(_read_layers)"] == 3
    assert Counter(compiled)["jit(decode)"] == 1


@pytest.mark.slow
def test_equal_policies_and_samplers_share_programs(tiny: Decoder, compiled: list[str]) -> None:
    params = smaller(tiny)

    def answer(budget: int, temperature: float) -> None:
        policy, sampler = kvjax.policies.morphkv(budget, window=4), kvjax.Sampler(temperature=temperature)
        kvjax.generate(params, list(range(20)), policy=policy, sampler=sampler, max_new_tokens=4)

    answer(8, 0.5)
    assert compiled
    compiled.clear()
    answer(8, 0.5)
    assert compiled == []
    answer(8, 0.6)
    assert compiled == ["jit(decode)"]
    compiled.clear()
    answer(9, 0.5)
    assert Counter(compiled) == dict.fromkeys(("jit(_unfilled)", "jit(_read_layers)", "jit(decode)"), 1)


@pytest.mark.slow
def test_one_program_makes_an_empty_cache(tiny: Decoder, compiled: list[str]) -> None:
    """Arrays that are made one by one take milliseconds in every request, and a program for each shape in the first."""
    params, policy = smaller(tiny), parse("morphkv:budget=0.5,window=5")
    first, second = (jax.device_put(np.array([n, 7], np.int32)) for n in (20, 40))
    compiled.clear()
    cache = KVCache.empty(params.config, policy, first, 20, np.float32)
    assert compiled == ["jit(_unfilled)"]
    other = KVCache.empty(params.config, policy, second, 40, np.float32)
    assert compiled == ["jit(_unfilled)"]
    assert [layer.capacity.tolist() for layer in (cache.entries[0], other.entries[0])] == [
        [[n] * params.config.num_kv_heads for n in row] for row in ([10, 6], [20, 6])
    ]


@pytest.mark.slow
def test_limits_of_tokens_share_programs(tiny: Decoder, compiled: list[str]) -> None:
    params = smaller(tiny)
    kvjax.generate(params, list(range(20)), max_new_tokens=1)
    compiled.clear()
    for limit in (2, 30, 64):
        kvjax.generate(params, list(range(20)), max_new_tokens=limit)
    assert compiled == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    part(["streaming_llm:budget=16", "h2o:budget=16", "tova:budget=16", EVERY_FOURTH], ["h2o:budget=16", EVERY_FOURTH]),
)
def test_ten_thousand_tokens_need_nothing_new(tiny: Decoder, compiled: list[str], text: str) -> None:
    """After warm-up nothing is compiled, and the arrays on the device keep their number and their bytes."""
    params = smaller(tiny)
    answer = kvjax.generate(params, list(range(20)), policy=parse(text), max_new_tokens=512)
    answer = kvjax.generate(params, None, cache=answer.cache, max_new_tokens=512)
    compiled.clear()
    before = alive()
    for _ in range(20):
        answer = kvjax.generate(params, None, cache=answer.cache, max_new_tokens=512)
    assert compiled == []
    assert alive() == before
    assert answer.cache.length.tolist() == [20 + 22 * 512 - 1]


@pytest.mark.slow
def test_two_thousand_streamed_tokens_need_nothing_new(tiny: Decoder, compiled: list[str]) -> None:
    params = smaller(tiny)
    policy = parse("morphkv:budget=16,window=4")
    pieces = kvjax.stream(params, list(range(20)), policy=policy, max_new_tokens=2010)
    for _ in range(10):
        next(pieces)
    compiled.clear()
    before = alive()
    for _ in range(1999):
        next(pieces)
    assert compiled == []
    assert alive() == before
    assert next(pieces).cache is not None


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a CPU's products of a single row")
def test_a_deep_model_is_simplified_as_often_as_a_shallow_one(tmp_path: Path) -> None:
    """XLA simplifies a program until nothing changes, or 25 times. A change may not wander from layer to layer."""

    def rounds(layers: int) -> int:
        """How often XLA simplifies the decode step of a single row."""
        params, folder = decoder(windows=(None,) * layers), tmp_path / str(layers)
        cache = kvjax.prefill(params, [1, 2, 3])
        given = params, cache, np.array([4], np.int32), np.array([True])
        options = {"xla_dump_to": str(folder), "xla_dump_hlo_pass_re": ".*"}

        def fresh(*given: Any) -> Any:
            return step(*given)

        fresh.__name__ = f"step_{uuid4().hex}"  # a name that no cache on disk has
        jax.jit(fresh).lower(*given).compile(compiler_options=options)
        return len(list(folder.glob("*.simplification.after_pipeline-start.*")))

    assert 2 <= rounds(10) <= rounds(2) + 1


def alive() -> tuple[int, int]:
    """The number of arrays on the device, and their bytes."""
    gc.collect()
    arrays = jax.live_arrays()
    return len(arrays), sum(array.nbytes for array in arrays)
