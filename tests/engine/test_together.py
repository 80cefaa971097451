"""Short prompts that are read together: fewer programs, and the tokens that each request gets alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
import pytest

import kvjax
from kvjax.engine.compiling import Programs
from kvjax.engine.reading import Reader
from kvjax.models import Decoder
from kvjax.reading.prompt import complete
from tests.conftest import POLICIES
from tests.engine.test_tokens import KINDS
from tests.patience import PATIENCE
from tests.products import part

SIZES: dict[str, Any] = {"rows": 6, "max_prompt": 64, "max_new_tokens": 8, "chunk": 64}
SAMPLERS = (kvjax.Greedy(repetition_penalty=1.4), kvjax.Sampler(temperature=1.5, top_p=0.8))
LENGTHS = (3, 16, 1, 9, 40, 7, 16, 2, 5, 12)  # four, a long one, four, one


@pytest.fixture(autouse=True)
def read(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Notes the lengths of prompts that are read together. A GPU's classes are few: 64 alone, and four of 16."""
    monkeypatch.setattr("kvjax.engine.planning.platform_of", lambda params: "gpu")
    lengths, prompts = list[list[int]](), Reader.prompts

    def noted(reader: Reader, some: list[np.ndarray]) -> Any:
        lengths.append([one.size for one in some])
        return prompts(reader, some)

    monkeypatch.setattr(Reader, "prompts", noted)
    return lengths


@contextmanager
def burst(engine: kvjax.Engine) -> Iterator[None]:
    """What is submitted meanwhile comes at once."""
    with engine._loop._changed:
        yield


def answers(engine: kvjax.Engine, prompts: list[list[int]], **options: Any) -> list[kvjax.engine.Answer]:
    with burst(engine):
        handles = [
            engine.submit(prompt, seed=i, sampler=SAMPLERS[i % 2], eos=(), log_probs=True, **options)
            for i, prompt in enumerate(prompts)
        ]
    return [handle.result(timeout=PATIENCE) for handle in handles]


def check_bytes(engine: kvjax.Engine) -> None:
    """The caches that reads leave are those that the footprint counts."""
    reader = engine._loop._device._reader
    left = [complete(reader.prompts([np.zeros(size, np.int32)] * count)) for count, size in engine.sizes.reads]
    most = max(read.cache.nbytes for read in left)
    assert engine.footprint.prompt == most if not engine.policy.allocates else engine.footprint.prompt > most


def check(params: Decoder, policy: str, read: list[list[int]], reference: Decoder) -> None:
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, params.config.vocab_size, n).tolist() for n in LENGTHS]
    with kvjax.Engine(params, policy, **SIZES) as engine:
        read.clear()
        found = answers(engine, prompts)
        assert read[:2] == [[*LENGTHS[:4]], [40]]
        assert [length for lengths in read for length in lengths] == [*LENGTHS]
        if params is reference:  # on one device
            check_bytes(engine)
    for i, (prompt, answer) in enumerate(zip(prompts, found, strict=True)):
        options: Any = {"policy": policy, "max_new_tokens": 8, "eos": (), "log_probs": True}
        alone = kvjax.generate(reference, prompt, seed=i, sampler=SAMPLERS[i % 2], **options)
        assert answer.tokens.tolist() == alone.tokens[0].tolist()
        assert alone.log_probs is not None
        np.testing.assert_allclose(answer.log_probs, alone.log_probs[0], atol=1e-4)


@pytest.mark.long
@pytest.mark.slow(first=1)
@pytest.mark.parametrize("policy", part([*KINDS, *POLICIES[1:]], KINDS))
def test_tokens_are_those_of_each_request_alone(policy: str, tiny: Decoder, read: list[list[int]]) -> None:
    check(tiny, policy, read, tiny)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["full", "adakv:base=h2o,base.budget=12,groups=2"])
def test_on_a_mesh(policy: str, tiny: Decoder, read: list[list[int]]) -> None:
    """Each part of the batch reads all of them."""
    params = kvjax.shard(tiny, kvjax.make_mesh(2, 2, devices=jax.devices()[:4]))
    check(params, policy, read, tiny)


@pytest.mark.long
def test_a_burst_takes_a_program_of_each_kind_per_four(shallow: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    ran, run = list[Hashable](), Programs.run

    def noted(programs: Programs, name: Any, *args: Any) -> Any:
        ran.append(name if isinstance(name, str) else name[0].__name__)
        return run(programs, name, *args)

    with kvjax.Engine(shallow, "h2o:budget=12", **SIZES | {"rows": 8}) as engine:
        monkeypatch.setattr(Programs, "run", noted)
        answers(engine, [[1, 2, 3]] * 8, max_new_tokens=1)
    counts = Counter(ran)
    assert counts.pop("advance", 0) <= 3
    assert counts == {"begun": 2, "begin": 2, "_read_layers": 2, "logits_of": 2, "admit 4": 2}


@pytest.mark.long
def test_a_later_turn_is_read_alone(shallow: Decoder, read: list[list[int]]) -> None:
    with kvjax.Engine(shallow, "h2o:budget=12", **SIZES, conversation_memory="1GB") as engine:
        (first,) = answers(engine, [[1, 2, 3]])
        later = [1, 2, 3, *first.tokens.tolist(), 4]
        read.clear()
        found = answers(engine, [[5], [6], [7], [8, 9], later, [5, 1], [6, 1], [7, 1], [8, 1]])
        assert read[0] == [1, 1, 1, 2]
        assert [answer.cached_tokens for answer in found] == [0, 0, 0, 0, 10, 0, 0, 0, 0]
        assert (engine.stats().conversations.hits, engine.stats().conversations.misses) == (1, 1 + 8)
        assert engine.stats().prompt_tokens == 3 + 5 + 12 + 8
