"""A server continues conversations: the usage and the metrics say so, and a request may refuse it."""

from __future__ import annotations

from functools import partial
from typing import Any

import openai
import pytest

import kvjax
from kvjax.models import Decoder
from tests.serve.serving import POLICY, SIZES, Serving, metrics, only, served

ASK: Any = {"model": "tiny", "temperature": 0, "max_tokens": 6}


def asked(serving: Serving, prompt: list[int], **extra: Any) -> tuple[str, int]:
    """The answer to a prompt, and the number of its tokens that a stored cache had seen."""
    out = serving.client.completions.create(**ASK, prompt=prompt, extra_body={"ignore_eos": True, **extra})
    return out.choices[0].text, out.usage.prompt_tokens_details.cached_tokens


@pytest.mark.long
def test_later_turns(shallow: Decoder, talker: Any) -> None:
    begun = kvjax.generate(shallow, [3, 1, 4], policy=POLICY, max_new_tokens=6, eos=(), tokenizer=talker)
    said = [3, 1, 4, *begun.tokens[0].tolist(), 5, 9]
    later = kvjax.generate(shallow, [5, 9], cache=begun.cache, max_new_tokens=6, eos=(), tokenizer=talker)
    whole = kvjax.generate(shallow, said, policy=POLICY, max_new_tokens=6, eos=(), tokenizer=talker)
    with kvjax.Engine(shallow, POLICY, **SIZES, tokenizer=talker, conversation_memory="1MB") as engine:
        for serving in served(only(engine, POLICY)):
            ask = partial(asked, serving)
            assert ask([3, 1, 4]) == (begun.text, 0)
            assert ask(said, cache_prompt=False) == (whole.text, 0)
            assert ask(said) == (later.text, 8)
            options: Any = {"ignore_eos": True, "stream_options": {"include_usage": True}}
            *_, last = serving.client.completions.create(**ASK, prompt=said, stream=True, extra_body=options)
            assert last.usage.prompt_tokens_details.cached_tokens == 8
            longer = [*said, *later.tokens[0].tolist(), *[7] * 10]
            assert len(longer) > SIZES["max_prompt"]
            assert ask(longer)[1] == len(said) + 5
            with pytest.raises(openai.BadRequestError) as told:
                ask(longer, cache_prompt=False)
            assert (told.value.code, told.value.param) == ("context_length_exceeded", "prompt")
            lines = metrics(serving)
    assert 'kvjax_conversation_hits_total{model_name="tiny"} 3.0' in lines
    assert 'kvjax_conversation_misses_total{model_name="tiny"} 1.0' in lines
    cached = 8 + 8 + len(said) + 5
    assert f'kvjax_cached_tokens_total{{model_name="tiny"}} {cached}.0' in lines
    assert f'vllm:prefix_cache_hits_total{{model_name="tiny"}} {cached}.0' in lines
