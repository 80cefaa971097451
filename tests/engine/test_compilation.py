"""All programs are compiled before the first request, and none later."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvjax
from kvjax.engine.reading import Reader
from kvjax.models import Decoder
from tests.engine.traffic import MAX_NEW, MAX_PROMPT, MIXED, Asked, run
from tests.patience import PATIENCE


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
        answers = [handle.result(timeout=PATIENCE) for handle in run(engine, asked, rng)]
        stats = engine.stats()
    assert compiled == []
    assert stats.requests == len(answers) == sum(stats.finished.values()) == 500
    assert stats.tokens >= sum(len(answer.tokens) for answer in answers)


@pytest.mark.long
def test_a_gpu_runs_the_prompts_of_each_class_before_the_first_request(
    shallow: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It loads a program when it runs first. Short prompts share a class there, and several are read together."""
    for module in ("device", "planning"):
        monkeypatch.setattr(f"kvjax.engine.{module}.platform_of", lambda params: "gpu")
    lengths, prompts = [], Reader.prompts

    def noted(reader: Reader, some: list[np.ndarray]) -> Any:
        if reader.run.__name__ == "call":
            lengths.append([one.size for one in some])
        return prompts(reader, some)

    monkeypatch.setattr(Reader, "prompts", noted)
    with kvjax.Engine(shallow, "h2o:budget=12", rows=4, max_prompt=400, max_new_tokens=4, chunk=192) as engine:
        assert lengths == [[1], [128], [192], [32] * 4]
        assert engine.sizes.classes == [128, 192, 384, 576]
        answer = engine.submit([1, 2, 3]).result()
    alone = kvjax.generate(shallow, [1, 2, 3], policy="h2o:budget=12", max_new_tokens=4)
    np.testing.assert_array_equal(answer.tokens, alone.tokens[0])
