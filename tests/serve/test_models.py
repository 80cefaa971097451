"""Several policies on one server: each answers as a server of its own, under its own name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import openai
import pytest

import kvjax
from kvjax.engine import Engines
from kvjax.models import Decoder
from kvjax.serve import Model, Models, models_of, named_policies
from tests.serve.serving import POLICY, SIZES, Serving, metrics, only, send, served

POLICIES = {"morphkv": POLICY, "window": "streaming_llm:budget=6,sinks=1"}
ASK: Any = {"temperature": 0, "max_tokens": 6, "extra_body": {"ignore_eos": True}}
PROMPT = [3, 1, 4] * 5


@dataclass
class Named:
    """A stand-in for an engine."""

    tokenizer: Any = "any"


@pytest.fixture(scope="module")
def several(shallow: Decoder, talker: Any) -> Iterator[Serving]:
    with Engines(shallow, POLICIES, **SIZES, tokenizer=talker, conversation_memory="1MB") as engines:
        yield from served(models_of("tiny", POLICIES, engines))


def asked(serving: Serving, model: str, prompt: list[int] = PROMPT) -> Any:
    return serving.client.completions.create(model=model, prompt=prompt, **ASK)


@pytest.mark.long
def test_each_policy_answers(several: Serving, shallow: Decoder, talker: Any) -> None:
    """The plain name is the first one's, and the answer has the name in full."""
    texts = []
    for name, policy in POLICIES.items():
        alone = kvjax.generate(shallow, PROMPT, policy=policy, max_new_tokens=6, eos=(), tokenizer=talker)
        out = asked(several, f"tiny@{name}")
        assert (out.choices[0].text, out.model) == (alone.text, f"tiny@{name}")
        texts.append(alone.text)
        chat: Any = {"messages": [{"role": "user", "content": "ba"}], "max_tokens": 2}
        for event in several.client.chat.completions.create(model=f"tiny@{name}", **chat, stream=True):
            assert event.model == f"tiny@{name}"
    assert texts[0] != texts[1], "the policies are too much alike for this test"
    plain = asked(several, "tiny")
    assert (plain.choices[0].text, plain.model) == (texts[0], "tiny@morphkv")


@pytest.mark.long
def test_the_list(several: Serving) -> None:
    listed = several.client.models.list().data
    expected = [(f"tiny@{name}", policy) for name, policy in POLICIES.items()]
    assert [(one.id, (one.model_extra or {})["policy"]) for one in listed] == expected
    assert several.client.models.retrieve("tiny@window").id == "tiny@window"
    assert several.client.models.retrieve("tiny").id == "tiny@morphkv"
    for name, policy in POLICIES.items():
        stats = send(several, f"/stats?model=tiny@{name}")[1]
        assert (stats["model"], stats["policy"]) == (f"tiny@{name}", policy)
    assert send(several, "/stats")[1]["model"] == "tiny@morphkv"
    assert send(several, "/tokenize", {"prompt": "ba"})[0] == 200


def test_unknown_names(several: Serving) -> None:
    for name in ("tiny@full", "tiny@", "window", "TINY"):
        with pytest.raises(openai.NotFoundError, match="expected 'tiny@morphkv' or 'tiny' or 'tiny@window'") as told:
            asked(several, name)
        assert (told.value.code, told.value.param) == ("model_not_found", "model")
        assert send(several, f"/stats?model={name}")[0] == 404
        assert send(several, f"/v1/models/{name}")[0] == 404


def test_metrics(several: Serving) -> None:
    def tokens() -> list[float]:
        lines = metrics(several)
        return [
            float(next(line for line in lines if line.startswith(f'{name}{{model_name="tiny@{policy}"')).split()[-1])
            for policy in POLICIES
            for name in ("kvjax_tokens_total", "vllm:generation_tokens_total", "kvjax_request_seconds_count")
        ]

    before = tokens()
    asked(several, "tiny@window")
    assert [after - one for one, after in zip(before, tokens(), strict=True)] == [0, 0, 0, 6, 6, 1]


def test_conversations_are_those_of_one_policy(several: Serving, shallow: Decoder) -> None:
    begun = [9, 8, 7]
    said = kvjax.generate(shallow, begun, policy=POLICIES["morphkv"], max_new_tokens=6, eos=()).tokens[0].tolist()
    asked(several, "tiny@morphkv", begun)
    cached = [
        asked(several, name, [*begun, *said, 5, 9]).usage.prompt_tokens_details.cached_tokens
        for name in ("tiny@window", "tiny@morphkv")
    ]
    assert cached == [0, 8]


def test_names_of_policies() -> None:
    assert named_policies(["full"]) == {"full": "full"}
    assert named_policies(["h2o:budget=1", "a=h2o:budget=1", "b=full", "adakv:base=h2o,base.budget=2"]) == {
        "h2o": "h2o:budget=1",
        "a": "h2o:budget=1",
        "b": "full",
        "adakv": "adakv:base=h2o,base.budget=2",
    }
    with pytest.raises(
        ValueError, match="have the name h2o: expected another for one of them, as in --policy h2o2=h2o"
    ):
        named_policies(["h2o:budget=1", "h2o:budget=2"])
    for wrong in ("=full", "a b=full", "", "a/b=full", "x" * 65 + "=full"):
        with pytest.raises(ValueError, match="expected at most 64 letters"):
            named_policies([wrong])


def test_names_of_models() -> None:
    engine: Any = Named()
    (alone,) = models_of("m", {"h2o": "h2o:budget=1"}, {"h2o": engine})
    assert (alone.id, alone.names) == ("m", ["m", "m@h2o"])
    first, second = models_of("m", {"a": "full", "b": "full"}, {"a": engine, "b": engine})
    assert (first.names, second.names) == (["m@a", "m"], ["m@b"])
    with pytest.raises(ValueError, match="two models have the name 'm'"):
        Models([first, Model("m", "full", engine)])
    with pytest.raises(ValueError, match="there is no model"):
        Models([])
    with pytest.raises(ValueError, match="the engine has no tokenizer"):
        only(Named(None))
