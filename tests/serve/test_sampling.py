"""Biases, penalties, end tokens and the most probable tokens, as OpenAI's client asks for them."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvjax import Greedy, Sampler
from kvjax.serve.schema import Completion
from tests.serve.serving import CHAT, GOOD, Serving, send

GREEDY: Any = {"model": "tiny", "temperature": 0, "max_tokens": 8}
PROMPT = "ba ce di fo gu"


def test_biases_and_penalties(serving: Serving) -> None:
    create = serving.client.completions.create
    usual = create(**GREEDY, prompt=PROMPT).choices[0].text
    assert create(**GREEDY, prompt=PROMPT, logit_bias={"5": 0}, presence_penalty=0).choices[0].text == usual
    assert create(**GREEDY, prompt=PROMPT, logit_bias={"5": 100}).choices[0].text == _name(serving, 5) * 8
    spread = create(**GREEDY, prompt=PROMPT, frequency_penalty=2, presence_penalty=2).choices[0].text
    assert len({spread[i : i + 2] for i in range(0, 16, 2)}) > len({usual[i : i + 2] for i in range(0, 16, 2)})


def _name(serving: Serving, token: int) -> str:
    return serving.engine.tokenizer.convert_ids_to_tokens(token)


def test_stop_token_ids(serving: Serving) -> None:
    body = GOOD | {"temperature": 0, "max_tokens": 8}
    usual = serving.engine.submit("ba", max_new_tokens=8).result().tokens.tolist()
    third = next(i for i in range(2, 8) if usual[i] not in usual[:i])
    others = [token for token in range(90) if token not in usual][:15]
    choice = send(serving, "/v1/completions", body | {"stop_token_ids": [usual[third], *others]})[1]["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["text"] == "".join(_name(serving, token) for token in usual[: third + 1])


def test_what_is_no_limit_leaves_the_default() -> None:
    """Clients of vLLM send all of them."""
    wanted = Completion(**GOOD, top_p=1, top_k=-1, min_p=0)
    assert wanted.sampler(Greedy()) == Greedy()
    assert wanted.sampler(Sampler(top_k=5)) == Sampler()


def test_the_most_probable_tokens(serving: Serving) -> None:
    """Each token of a greedy answer is the first of them, whole and in pieces, for both endpoints."""
    out = serving.client.completions.create(**GREEDY, prompt=PROMPT, logprobs=3).choices[0].logprobs
    assert [max(top, key=top.get) for top in out.top_logprobs] == out.tokens
    assert [max(top.values()) for top in out.top_logprobs] == out.token_logprobs
    assert {len(top) for top in out.top_logprobs} == {3}
    hot = serving.client.completions.create(**GREEDY | {"temperature": 50, "seed": 1}, prompt=PROMPT, logprobs=2)
    for token, top in zip(hot.choices[0].logprobs.tokens, hot.choices[0].logprobs.top_logprobs, strict=True):
        assert token in top
    asked: Any = CHAT | {"temperature": 0, "max_tokens": 6, "logprobs": True, "top_logprobs": 2}
    content = serving.client.chat.completions.create(**asked).choices[0].logprobs.content
    events = serving.client.chat.completions.create(**asked, stream=True)
    pieces = [token for event in events if event.choices[0].logprobs for token in event.choices[0].logprobs.content]
    for tokens in (content, pieces):
        assert len(tokens) == 6
        for token in tokens:
            assert token.top_logprobs[0].token == token.token
            assert np.isclose(token.top_logprobs[0].logprob, token.logprob)
            assert token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob
