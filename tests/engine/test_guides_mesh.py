"""Guided requests on a mesh get the answers that they get on one device."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import kvjax
from kvjax.engine import Answer, Grammar, Guide
from tests.serve.fuzzing import tokenizer as of_bytes
from tests.tiny import decoder


@pytest.mark.slow
def test_as_on_one_device() -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed (the extra `serve`)")
    params, answers = decoder(vocab=258), list[list[Answer]]()
    options: Any = {"rows": 4, "max_prompt": 16, "max_new_tokens": 24, "chunk": 16, "guided": True}
    guides = [Guide(Grammar.regex("(ab|cd)+[0-9]"), top_log_probs=2), Guide(logit_bias={65: 2.0}), None]
    for placed in (params, kvjax.shard(params, kvjax.make_mesh(2, 2, devices=jax.devices()[:4]))):
        with kvjax.Engine(placed, tokenizer=of_bytes(), steps_at_once=2, **options) as engine:
            handles = [engine.submit("né", guide=guide, log_probs=True) for guide in guides]
            answers.append([handle.result() for handle in handles])
    for one, other in zip(*answers, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-4)
        assert [[i for i, _ in top] for top in one.top] == [[i for i, _ in top] for top in other.top]
