"""Logits that are not finite are an error that names the row and the position, and never a token."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import openai
import pytest
from flax import nnx

import kvjax
from kvjax.engine.refill import ReadBatch, Refill
from kvjax.inspection import record
from kvjax.models import Decoder
from kvjax.serve import Settings
from tests.patience import PATIENCE
from tests.serve.serving import KEY, only, served

NEW = 6
ROWS = [[3, 8, 5], [4, 9, 6, 2], [3, 8, 5]]  # three, which other tests have programs for


@pytest.fixture(scope="module")
def spoilt(shallow: Decoder) -> tuple[Decoder, list[list[int]], int]:
    """A decoder in which one token has no finite embedding, the answers of the sound one, and where row 1 fails."""
    answers = kvjax.generate(shallow, ROWS, max_new_tokens=NEW).tokens.tolist()
    first = set(answers[0]) | {answers[1][0]}
    step, token = next((i, token) for i, token in enumerate(answers[1]) if token not in first)
    assert token not in ROWS[0] + ROWS[1]
    params = nnx.clone(shallow)
    params.embed = nnx.Param(params.embed[...].at[token].set(np.nan))
    return params, answers, len(ROWS[1]) + step + 1


def read(pieces: Any) -> None:
    for _ in pieces:
        pass


CALLS: dict[str, Callable[[Decoder], Any]] = {
    "generate": lambda params: kvjax.generate(params, ROWS, max_new_tokens=NEW),
    "sampled": lambda params: kvjax.generate(
        params, ROWS, max_new_tokens=NEW, sampler=kvjax.Sampler(top_k=1, repetition_penalty=1.0)
    ),
    "stream": lambda params: read(kvjax.stream(params, ROWS, max_new_tokens=NEW)),
    "refill": lambda params: read(
        Refill(params).run(iter([ReadBatch.of(params, ROWS, ["a", "b", "c"], max_new_tokens=NEW)]))
    ),
}


@pytest.mark.long(first=1)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_the_row_and_the_position_are_named(spoilt: Any, call: Callable[[Decoder], Any]) -> None:
    params, _, position = spoilt
    with pytest.raises(FloatingPointError, match=f"row 1 for the token at position {position} are not finite"):
        call(params)


def test_inspect_names_the_position(spoilt: Any) -> None:
    with pytest.raises(FloatingPointError, match=f"row 0 for the token at position {spoilt[2]} "):
        record(spoilt[0], ROWS[1], policy="full", max_new_tokens=NEW)


@pytest.mark.long
def test_other_requests_of_an_engine_go_on(spoilt: Any, talker: Any) -> None:
    """The server tells the client, in an answer and in a stream."""
    params, answers, position = spoilt
    with kvjax.Engine(params, rows=2, max_prompt=16, max_new_tokens=NEW, tokenizer=talker) as engine:
        good, bad = (engine.submit(row, eos=()) for row in ROWS[:2])
        with pytest.raises(FloatingPointError, match=f"position {position} "):
            bad.result(timeout=PATIENCE)
        assert good.result(timeout=PATIENCE).tokens.tolist() == answers[0]
        for serving in served(only(engine, "full"), Settings(api_key=KEY)):
            options = {"model": "tiny", "prompt": ROWS[1], "temperature": 0, "max_tokens": NEW}
            ask = partial(serving.client.completions.create, **options, extra_body={"ignore_eos": True})
            for more in ({}, {"logprobs": 0}):
                with pytest.raises(openai.UnprocessableEntityError, match=f"position {position} "):
                    ask(**more)
            with pytest.raises(openai.APIError, match=f"position {position} "):
                read(ask(logprobs=0, stream=True))
