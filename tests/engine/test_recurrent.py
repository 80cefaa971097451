"""Engines of a hybrid model and of one with latents: rows come and go, and a stored prefix has its text's states."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import kvjax
from kvjax.models import Decoder
from tests.engine.traffic import GREEDY, Asked
from tests.patience import PATIENCE
from tests.tiny import VOCAB, hybrid, latents

RNG = np.random.default_rng(5)
SIZES = {"rows": 2, "max_prompt": 28, "max_new_tokens": 12, "chunk": 16, "max_end_tokens": 32}


models = pytest.mark.parametrize("model", [hybrid, latents])


@pytest.mark.long
@models
@pytest.mark.parametrize("policy", ["h2o:budget=12", pytest.param("full", marks=pytest.mark.slow)])
def test_answers_are_those_of_generate(model: Callable[[], Decoder], policy: str) -> None:
    asked = [Asked.at_random(RNG, VOCAB, GREEDY) for _ in range(7)]
    with kvjax.Engine(model(), policy, **SIZES) as engine:
        handles = [one.submit(engine) for one in asked]
        answers = [handle.result(timeout=PATIENCE) for handle in handles]
    for one, answer in zip(asked, answers, strict=True):
        alone = one.alone(model(), policy)
        assert answer.tokens.tolist() == alone.tokens[0, : alone.lengths[0]].tolist()
        assert alone.log_probs is not None
        np.testing.assert_allclose(answer.log_probs, alone.log_probs[0, : alone.lengths[0]], atol=1e-4)


@pytest.mark.long
@models
def test_a_prefix_that_serves_twice(model: Callable[[], Decoder]) -> None:
    document, questions = RNG.integers(0, VOCAB, 28).tolist(), [[3, 4, 5], [3, 4, 5], [7]]
    with kvjax.Engine(model(), "h2o:budget=12", **SIZES, prefix_memory="1MB") as engine:
        handles = [engine.submit(question, prefix=document, max_new_tokens=9) for question in questions]
        answers = [handle.result(timeout=PATIENCE).tokens.tolist() for handle in handles]
        found = engine.stats().prefixes
    assert (found.misses, found.hits) == (1, 2)
    cache = kvjax.prefill(model(), document, policy="h2o:budget=12")
    for question, answer in zip(questions, answers, strict=True):
        alone = kvjax.generate(model(), question, cache=cache, max_new_tokens=9)
        assert answer == alone.tokens[0].tolist()
