"""lm-evaluation-harness generates with the server as with any API of OpenAI's form."""

from __future__ import annotations

from typing import Any

import pytest

import kvjax
from kvjax.models import Decoder
from tests.serve.serving import KEY, POLICY, Serving

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed (the extra `lm-eval`)")

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

pytestmark = [pytest.mark.slow, pytest.mark.parity]
PROMPTS = ("ba ce di", "fo gu", "ce ce ce")


def generated(model: Any, prompts: list[Any]) -> list[str]:
    """What the harness gets for tasks that generate until a string."""
    arguments = [(prompt, {"until": ["zu"], "max_gen_toks": 9, "temperature": 0.0}) for prompt in prompts]
    return model.generate_until([Instance("generate_until", {}, given, i) for i, given in enumerate(arguments)])


def test_completions(serving: Serving, shallow: Decoder, talker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    model = LocalCompletionsAPI(
        model="tiny",
        base_url=f"{serving.url}/v1/completions",
        tokenizer_backend=None,
        tokenized_requests=False,
        num_concurrent=2,
        max_retries=1,
    )
    expected = kvjax.generate(shallow, list(PROMPTS), policy=POLICY, tokenizer=talker, max_new_tokens=9).text
    assert generated(model, list(PROMPTS)) == [text.partition("zu")[0] for text in expected]


def test_chats(serving: Serving, shallow: Decoder, talker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    model = LocalChatCompletion(
        model="tiny", base_url=f"{serving.url}/v1/chat/completions", num_concurrent=1, max_retries=1
    )
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    expected = kvjax.generate(shallow, chats, policy=POLICY, tokenizer=talker, max_new_tokens=9).text
    given = [model.apply_chat_template(chat) for chat in chats]
    assert generated(model, given) == [text.partition("zu")[0] for text in expected]
