"""OpenAI's own clients get the tokens of `kvjax.generate`, whole and in pieces."""

import asyncio
from typing import Any

import numpy as np
import openai
import pytest

import kvjax
from kvjax.models import Decoder
from tests.serve.serving import POLICY, Serving, only, served

PROMPT = "ba ce di fo gu"
CHAT: Any = [{"role": "system", "content": "ba"}, {"role": "user", "content": [{"type": "text", "text": "ce di"}]}]


@pytest.fixture(scope="module")
def alone(shallow: Decoder, talker: Any) -> Any:
    """An answer of `generate`, as the server should give it."""

    def answer(prompt: Any, **options: Any) -> kvjax.Generation:
        return kvjax.generate(shallow, prompt, policy=POLICY, tokenizer=talker, log_probs=True, **options)

    return answer


def test_completion(serving: Serving, alone: Any) -> None:
    expected = alone(PROMPT, max_new_tokens=12)
    out = serving.client.completions.create(model="tiny", prompt=PROMPT, max_tokens=12, temperature=0, logprobs=0)
    (choice,) = out.choices
    assert choice.text == expected.text
    assert choice.finish_reason == "length"
    assert (out.usage.prompt_tokens, out.usage.completion_tokens, out.usage.total_tokens) == (6, 12, 18)
    np.testing.assert_allclose(choice.logprobs.token_logprobs, expected.log_probs[0], atol=1e-5)


@pytest.mark.long
def test_draws_follow_the_seed(serving: Serving, alone: Any) -> None:
    """Answer i of a prompt has the seed s + i, and the answer says which seed the server drew."""
    settings: Any = {"temperature": 1.5, "top_p": 0.9, "max_tokens": 10}
    out = serving.client.completions.create(model="tiny", prompt=[PROMPT, "gu"], n=2, seed=2**63 - 1, **settings)
    sampler = kvjax.Sampler(temperature=1.5, top_p=0.9)
    seeds = [2**63 - 1, -(2**63)]
    expected = [alone(p, max_new_tokens=10, sampler=sampler, seed=s).text for p in (PROMPT, "gu") for s in seeds]
    assert [choice.text for choice in out.choices] == expected
    assert [choice.index for choice in out.choices] == [0, 1, 2, 3]
    free = serving.client.completions.create(model="tiny", prompt=PROMPT, **settings)
    again = alone(PROMPT, max_new_tokens=10, sampler=sampler, seed=free.model_extra["seed"])
    assert free.choices[0].text == again.text


@pytest.mark.long
def test_extensions_reach_the_sampler(serving: Serving, alone: Any) -> None:
    extra = {"top_k": 5, "min_p": 0.05, "repetition_penalty": 1.5, "ignore_eos": True}
    out = serving.client.completions.create(
        model="tiny", prompt=[3, 1, 4], seed=5, temperature=2.0, max_tokens=20, extra_body=extra
    )
    sampler = kvjax.Sampler(temperature=2.0, top_k=5, min_p=0.05, repetition_penalty=1.5)
    expected = alone([3, 1, 4], max_new_tokens=20, sampler=sampler, seed=5, eos=())
    assert out.choices[0].text == expected.text
    assert out.usage.completion_tokens == 20


def test_chat(serving: Serving, alone: Any) -> None:
    given = [{"role": "system", "content": "ba"}, {"role": "user", "content": "ce di"}]
    expected = alone(given, max_new_tokens=512)
    out = serving.client.chat.completions.create(model="tiny", messages=CHAT, temperature=0, logprobs=True)
    (choice,) = out.choices
    assert choice.message.content == expected.text
    assert choice.finish_reason == ("length" if expected.lengths[0] == 512 else "stop")
    found = [token.logprob for token in choice.logprobs.content]
    np.testing.assert_allclose(found, expected.log_probs[0], atol=1e-5)
    assert b"".join(bytes(token.bytes) for token in choice.logprobs.content).decode() == expected.text
    developer = [{"role": "developer", "content": "ba"}, *CHAT[1:]]
    same = serving.client.chat.completions.create(model="tiny", messages=developer, temperature=0)
    assert same.choices[0].message.content == expected.text


def test_stop_strings(serving: Serving, alone: Any) -> None:
    text = alone(PROMPT, max_new_tokens=12).text
    out = serving.client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=12, temperature=0, stop=["never", text[6:8]]
    )
    assert out.choices[0].text == text[: text.index(text[6:8])]
    assert out.choices[0].finish_reason == "stop"


def test_pieces_of_a_completion(serving: Serving, alone: Any) -> None:
    expected = alone(PROMPT, max_new_tokens=12)
    events = list(
        serving.client.completions.create(
            model="tiny",
            prompt=PROMPT,
            max_tokens=12,
            temperature=0,
            logprobs=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    *pieces, last = events
    assert "".join(piece.choices[0].text for piece in pieces) == expected.text
    assert [piece.choices[0].finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert len(pieces) > 6
    found = [p for piece in pieces for p in piece.choices[0].logprobs.token_logprobs]
    np.testing.assert_allclose(found, expected.log_probs[0], atol=1e-5)
    assert "".join(text for piece in pieces for text in piece.choices[0].logprobs.tokens) == expected.text
    assert last.choices == []
    assert last.usage.completion_tokens == 12
    assert len({event.id for event in events}) == 1


def test_usage_of_each_piece(serving: Serving) -> None:
    """As clients that measure a server ask for it."""
    counted = {"stream_options": {"continuous_usage_stats": True}}
    options: Any = {"temperature": 0, "stream": True, "extra_body": counted}
    events = list(serving.client.completions.create(model="tiny", prompt=PROMPT, max_tokens=5, **options))
    counts = [event.usage.completion_tokens for event in events]
    assert counts == sorted(counts)
    assert (counts[-1], events[-1].usage.prompt_tokens) == (5, 6)
    events = list(serving.client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=5, **options))
    assert [event.usage.completion_tokens for event in events][:: len(events) - 1] == [0, 5]


def test_pieces_of_several_chats_at_once(serving: Serving, alone: Any) -> None:
    """An asynchronous client streams two answers of each of two requests: one more than there are rows."""
    sampler, given = kvjax.Sampler(temperature=1.0), [{"role": "user", "content": "ce di"}]

    async def one(client: openai.AsyncOpenAI, seed: int) -> list[str]:
        texts = ["", ""]
        stream = await client.chat.completions.create(
            model="tiny", messages=given, n=2, seed=seed, max_tokens=9, stream=True
        )
        async for event in stream:
            for choice in event.choices:
                texts[choice.index] += choice.delta.content or ""
        return texts

    async def all_of_them() -> list[list[str]]:
        async with serving.asynchronous as client:
            return await asyncio.gather(*(one(client, seed) for seed in (10, 20)))

    expected = [
        [alone(given, max_new_tokens=9, sampler=sampler, seed=seed + i).text for i in (0, 1)] for seed in (10, 20)
    ]
    assert asyncio.run(all_of_them()) == expected


@pytest.mark.slow
def test_a_stored_prefix(shallow: Decoder, talker: Any) -> None:
    """Texts and chats continue a document that is read once. Other servers refuse the field."""
    policy, document = "keydiff:budget=16", "ba ce di fo gu ce di fo ba gu " * 2
    begun = [{"role": "system", "content": document}]
    with kvjax.Engine(
        shallow, policy, rows=2, max_prompt=32, max_new_tokens=8, tokenizer=talker, prefix_memory="1GB"
    ) as engine:
        for serving in served(only(engine, policy)):
            for question in ("ce di", "gu"):
                out = serving.client.completions.create(
                    model="tiny", prompt=question, temperature=0, max_tokens=8, extra_body={"prefix": document}
                )
                read = kvjax.prefill(shallow, document, policy=policy, tokenizer=talker)
                expected = kvjax.generate(shallow, question, cache=read, max_new_tokens=8, tokenizer=talker)
                assert out.choices[0].text == expected.text
                asked: Any = [{"role": "user", "content": question}]
                chat = serving.client.chat.completions.create(
                    model="tiny", messages=asked, temperature=0, max_tokens=8, extra_body={"prefix": begun}
                )
                read = kvjax.prefill(shallow, begun, policy=policy, tokenizer=talker)
                expected = kvjax.generate(shallow, asked, cache=read, max_new_tokens=8, tokenizer=talker)
                assert chat.choices[0].message.content == expected.text
        assert (engine.stats().prefixes.hits, engine.stats().prefixes.misses) == (2, 2)


def test_a_server_without_stored_prefixes(serving: Serving) -> None:
    with pytest.raises(openai.BadRequestError, match="expected an engine with prefix_memory"):
        serving.client.completions.create(model="tiny", prompt="ba", extra_body={"prefix": "ce"})
