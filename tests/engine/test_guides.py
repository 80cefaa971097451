"""Guided requests: grammars, biases, penalties and top log-probabilities, among requests without a guide."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest

import kvjax
from kvjax.decoding.grammars import Grammars
from kvjax.engine import Grammar, GrammarError, Guide
from kvjax.models import Decoder
from tests.serve.fuzzing import tokenizer as of_bytes
from tests.tiny import full_logits

pytest.importorskip("llguidance", reason="llguidance is not installed (the extra `serve`)")

WARM = kvjax.Sampler(temperature=1.0)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.mark.long
def test_answers_follow_their_grammars_in_any_company(guided: kvjax.Engine, of_258: Decoder) -> None:
    """Each is the same again, and requests without a guide get what they get alone."""
    pattern = r"(ab|cde){2,4}/[0-9]+\."
    guides = [Guide(Grammar.regex(pattern)), Guide(Grammar.json_schema(SCHEMA)), None]
    asked = [(guide, seed) for seed in range(3) for guide in guides]
    runs = []
    for order in (asked, asked[::-1]):
        handles = [guided.submit("né", sampler=WARM, seed=seed, guide=guide) for guide, seed in order]
        runs.append({(str(guide), seed): h.result() for (guide, seed), h in zip(order, handles, strict=True)})
    for one, again in zip(*map(lambda run: [run[key] for key in sorted(run)], runs), strict=True):
        np.testing.assert_array_equal(one.tokens, again.tokens)
    texts = set()
    for guide, seed in asked:
        answer = runs[0][str(guide), seed]
        if guide is guides[0]:
            assert re.fullmatch(pattern if answer.finish == "end" else r"[a-e]+(/[0-9]*)?", answer.text)
            texts.add(answer.text)
        elif guide is guides[1]:
            found = json.loads(answer.text)
            assert answer.finish == "end"
            assert found.keys() == {"a", "b"}
            assert 0 <= found["a"] <= 9
            texts.add(json.dumps(found))
        else:
            alone = kvjax.generate(of_258, "né", tokenizer=of_bytes(), max_new_tokens=48, sampler=WARM, seed=seed)
            assert answer.tokens.tolist() == alone.tokens[0, : alone.lengths[0]].tolist()
    assert len(texts) > 3


@pytest.mark.parametrize("text", ["a<s>b", "</s>"])
@pytest.mark.parametrize("grammar", [Grammar.regex, lambda text: Grammar.json_schema({"const": text})])
def test_text_with_the_name_of_a_special_token_has_ordinary_tokens(grammar: Any, text: str) -> None:
    tokenizer = of_bytes()
    special, end = tokenizer.convert_tokens_to_ids(["<s>", "</s>"])
    matcher, said = Grammars(tokenizer, 258, [end]).matcher(grammar(text), [end]), list[int]()
    complete = False
    while not complete:
        (token,) = np.flatnonzero(np.unpackbits(matcher.allowed().view(np.uint8), bitorder="little")).tolist()
        said.append(token)
        complete = matcher.take(token)
    assert not {special, end}.intersection(said)
    assert tokenizer.decode(said).strip('"') == text


def test_a_grammar_ends_the_answer_without_end_tokens(guided: kvjax.Engine) -> None:
    answer = guided.submit("a", guide=Guide(Grammar.regex("abc")), eos=()).result()
    assert (answer.text, answer.finish, len(answer.tokens)) == ("abc", "end", 3)
    more = guided.submit("a", guide=Guide(Grammar.regex("ab*")), eos=(), max_new_tokens=5).result()
    assert (more.text, more.finish) == ("abbbb", "length")  # the end token that the grammar allows is not the answer's


def test_penalties_and_biases(guided: kvjax.Engine, of_258: Decoder) -> None:
    """Against a loop over logits of the whole text."""
    guide = Guide(logit_bias={65: 3.0, 66: 2.5}, frequency_penalty=0.9, presence_penalty=0.4)
    answer = guided.submit([1, 2, 3], guide=guide, eos=(), max_new_tokens=24, log_probs=True).result()
    tokens, counts = [1, 2, 3], np.zeros(258)
    for step, token in enumerate(answer.tokens.tolist()):
        logits = full_logits(of_258, [np.array(tokens)], 32)[0][-1].astype(float)
        log_prob = logits[token] - np.log(np.exp(logits).sum())
        assert answer.log_probs is not None
        np.testing.assert_allclose(answer.log_probs[step], log_prob, atol=1e-4)
        logits[[65, 66]] += [3.0, 2.5]
        logits -= 0.9 * counts + 0.4 * (counts > 0)
        assert logits[token] > logits.max() - 1e-4, step
        tokens.append(token)
        counts[token] += 1
    plain = guided.submit([1, 2, 3], eos=(), max_new_tokens=24).result()
    assert len(set(answer.tokens.tolist())) > len(set(plain.tokens.tolist()))


def test_top_log_probs(guided: kvjax.Engine, of_258: Decoder) -> None:
    handle = guided.submit([1, 2, 3], guide=Guide(top_log_probs=4), eos=(), max_new_tokens=6)
    tokens = [1, 2, 3]
    for token in handle.tokens():
        logits = full_logits(of_258, [np.array(tokens)], 16)[0][-1].astype(float)
        order = np.argsort(-logits)[:4]
        assert [i for i, _ in token.top] == order.tolist()
        assert token.top[0][0] == token.id
        expected = logits[order] - np.log(np.exp(logits).sum())
        np.testing.assert_allclose([p for _, p in token.top], expected, atol=1e-4)
        tokens.append(token.id)
    assert len(handle.result().top) == 6


def test_scores_of_a_prompt(guided: kvjax.Engine, of_258: Decoder) -> None:
    """Against logits of the whole prompt, and the answer that follows is that of the prompt."""
    prompt = np.random.default_rng(0).integers(0, 256, 14).tolist()
    handle = guided.submit(prompt, guide=Guide(echo=True), eos=(), max_new_tokens=5, log_probs=True)
    answer = handle.result()
    assert answer.tokens[:13].tolist() == prompt[1:] == handle.echoed[1:].tolist()
    assert answer.tokens[13:].tolist() == guided.submit(prompt, eos=(), max_new_tokens=5).result().tokens.tolist()
    logits = full_logits(of_258, [np.array(prompt)], 16)[0].astype(float)
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    assert answer.log_probs is not None
    np.testing.assert_allclose(answer.log_probs[:13], expected[np.arange(13), prompt[1:]], atol=1e-4)
    with pytest.raises(ValueError, match="the prompt has the end token 257"):
        guided.submit([1, 257], guide=Guide(echo=True), max_new_tokens=4)
    with pytest.raises(kvjax.engine.TooLongError, match="its answer has 60 tokens: expected at most max_new_tokens=48"):
        guided.submit(prompt, guide=Guide(echo=True), eos=(), max_new_tokens=47)


def test_steps_without_guides_are_those_of_before(guided: kvjax.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second form of the programs runs while a row has a guide, and no longer."""
    programs = guided._loop._device._programs
    names, run = [], programs.run

    def noted(name: str, *args: Any) -> Any:
        names.append(name)
        return run(name, *args)

    monkeypatch.setattr(programs, "run", noted)
    guided.submit("a", max_new_tokens=9, eos=()).result()
    assert {name for name in names if "guided" in str(name)} == set()
    guided.submit("a", max_new_tokens=9, eos=(), guide=Guide(top_log_probs=1)).result()
    assert {"admit guided 1", "advance guided"} <= set(names)
    names.clear()
    guided.submit("a", max_new_tokens=9, eos=()).result()
    assert {name for name in names if "guided" in str(name)} == set()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"logit_bias": {258: 1.0}}, "logit_bias has the token 258: expected ids in 0 .. 257"),
        ({"grammar": Grammar.regex("(a")}, "unclosed group"),
        ({"grammar": Grammar.json_schema({"type": "foo"})}, "Invalid type: foo"),
        ({"grammar": Grammar.json_schema({"if": {}})}, "Unimplemented keys"),
    ],
)
def test_requests_that_are_refused(guided: kvjax.Engine, options: Any, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        guided.submit("a", guide=Guide(**options))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"frequency_penalty": "x"}, "frequency_penalty='x': expected a number"),
        ({"presence_penalty": float("nan")}, "presence_penalty=nan: expected a number from -1e+06"),
        ({"logit_bias": {1: float("inf")}}, "expected at most 300 numbers by token id"),
        ({"logit_bias": dict.fromkeys(range(301), 1.0)}, "expected at most 300 numbers"),
        ({"top_log_probs": 21}, "top_log_probs=21: expected an integer from 0 to 20"),
    ],
)
def test_guides_that_are_refused(options: Any, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        Guide(**options)


def test_an_answer_that_cannot_go_on(guided: kvjax.Engine) -> None:
    """It fails alone: the grammar goes on with an end token, and the answer has none."""
    broken = guided.submit("a", guide=Guide(Grammar.lark('start: "a" <[257]> "b"')), eos=())
    fine = guided.submit("a", max_new_tokens=4, eos=())
    with pytest.raises(GrammarError, match="cannot follow its grammar"):
        broken.result()
    assert len(fine.result().tokens) == 4


def test_engines_that_are_not_guided(guided: kvjax.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guided, "_grammars", None)
    with pytest.raises(ValueError, match=r"expected a Guide, and Engine\(..., guided=True\)"):
        guided.submit("a", guide=Guide(top_log_probs=1))
