"""All programs are compiled before the first request, and none later."""

from __future__ import annotations

import numpy as np
import pytest

import kvjax
from kvjax.models import Decoder
from tests.engine.traffic import MAX_NEW, MAX_PROMPT, MIXED, Asked, run


@pytest.mark.slow
def test_500_random_requests_compile_nothing(shallow: Decoder, compiled: list[str]) -> None:
    rng = np.random.default_rng(0)
    asked = [Asked.at_random(rng, shallow.config.vocab_size, MIXED) for _ in range(500)]
    with kvjax.Engine(
        shallow, "h2o:budget=12", rows=8, max_prompt=MAX_PROMPT, max_new_tokens=MAX_NEW, chunk=16, max_end_tokens=32
    ) as engine:
        # A class is read at once, and one in two chunks: the layer of each. All share an empty cache, the first hidden
        # states and the logits. Beside them are `idle`, `admit` and `advance`.
        assert engine.warm_up.programs == 3 + 3 + 3
        assert "jit(advance)" in compiled  # it is noted; what other engines share, JAX finds compiled
        assert engine.warm_up.seconds > 0
        compiled.clear()
        answers = [handle.result(timeout=120) for handle in run(engine, asked, rng)]
        stats = engine.stats()
    assert compiled == []
    assert stats.requests == len(answers) == sum(stats.finished.values()) == 500
    assert stats.tokens >= sum(len(answer.tokens) for answer in answers)
