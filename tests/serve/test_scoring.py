"""Prompts that are scored: `echo` with log-probabilities, and the places of tokens in the text."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest

from kvjax.engine import Answer
from kvjax.evaluation.tasks import vocabulary
from kvjax.serve.dialects import Reading
from kvjax.serve.pieces import Piece, Pieces
from tests.decoding.test_spelling import FACE, byte_level, sentencepiece
from tests.serve.serving import Serving

GREEDY: Any = {"model": "tiny", "temperature": 0}
PROMPTS = [[99, 0, 6], [99, 3, 4, 5, 6]]


def test_scores_of_prompts(serving: Serving) -> None:
    """Each prompt comes back before its answer, with the log-probabilities that its tokens have as answers."""
    create = serving.client.completions.create
    out = create(**GREEDY, max_tokens=1, prompt=PROMPTS, echo=True, logprobs=1)
    assert (out.usage.prompt_tokens, out.usage.completion_tokens) == (8, 2)
    names = serving.engine.tokenizer.convert_ids_to_tokens
    for prompt, choice in zip(PROMPTS, out.choices, strict=True):
        scored = choice.logprobs
        assert scored.tokens[: len(prompt)] == names(prompt)
        assert choice.text == "<s>" + "".join(scored.tokens[1:])
        assert [choice.text[at:].startswith(token) for at, token in zip(scored.text_offset, scored.tokens, strict=True)]
        assert scored.token_logprobs[0] is None
        assert scored.top_logprobs[0] is None
        assert len(scored.token_logprobs) == len(scored.top_logprobs) == len(prompt) + 1
        for n in range(1, len(prompt)):
            top = {"max_tokens": 1, "logprobs": 20, "logit_bias": {str(prompt[n]): 100}}
            one = create(**GREEDY | top, prompt=prompt[:n]).choices[0].logprobs
            assert np.isclose(one.token_logprobs[0], scored.token_logprobs[n], atol=1e-4)


def test_scores_of_prompts_alone(serving: Serving) -> None:
    """`max_tokens=0` is the same without an answer, also for a prompt of one token."""
    asked: Any = {**GREEDY, "prompt": [*PROMPTS, [5]], "echo": True, "logprobs": 1}
    create = serving.client.completions.create
    alone, more = create(**asked, max_tokens=0), create(**asked, max_tokens=1)
    assert (alone.usage.prompt_tokens, alone.usage.completion_tokens) == (9, 0)
    for one, other in zip(alone.choices, more.choices, strict=True):
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert getattr(one.logprobs, name) == getattr(other.logprobs, name)[:-1]
        assert one.text == "".join(one.logprobs.tokens)
        assert one.finish_reason == "length"


def test_places_of_tokens(serving: Serving) -> None:
    """Whole and in pieces."""
    asked: Any = {**GREEDY, "prompt": "ba ce di", "max_tokens": 6, "logprobs": 0}
    whole = serving.client.completions.create(**asked).choices[0].logprobs
    found = [part.choices[0].logprobs for part in serving.client.completions.create(**asked, stream=True)]
    assert [at for part in found for at in part.text_offset] == whole.text_offset
    assert whole.text_offset == [sum(map(len, whole.tokens[:i])) for i in range(6)]


WORDS = vocabulary.tokenizer()
BYTES, PIECES = byte_level(), sentencepiece()
FACES = BYTES.encode(f"{FACE}ab{FACE}", add_special_tokens=False)


@pytest.mark.parametrize(
    ("tokenizer", "ids", "text", "offsets"),
    [
        (WORDS, WORDS.encode("the king finds the door", add_special_tokens=False), None, [0, 3, 8, 14, 18]),
        (PIECES, PIECES.convert_tokens_to_ids(["▁Hello", "▁world", "true"]), "Hello worldtrue", [0, 5, 11]),
        (PIECES, PIECES.convert_tokens_to_ids(["▁", "<0xC3>", "<0xA9>", "true"]), "étrue", [0, 0, 0, 1]),
        (BYTES, FACES, f"{FACE}ab{FACE}", None),
    ],
    ids=["words", "sentencepiece", "sentencepiece bytes", "bytes"],
)
def test_the_text_of_a_scored_prompt(
    tokenizer: Any, ids: list[int], text: str | None, offsets: list[int] | None
) -> None:
    """It is that of all tokens, wherever the prompt ends, also if the first one is a space or part of a character."""
    for prompt in range(1, len(ids)):
        piece = scored(tokenizer, ids, prompt)
        assert piece.said.content == (text or tokenizer.decode(ids))
        assert b"".join(one.data for one in piece.spelled) == piece.said.content.encode()
        assert offsets is None or piece.offsets == offsets
        assert (piece.tokens, [one.log_prob for one in piece.spelled]) == (
            len(ids) - prompt,
            [None, *[0.0] * (len(ids) - 1)],
        )
        alone = scored(tokenizer, ids[: prompt + 1], prompt, only_prompt=True)
        assert (alone.said.content, alone.tokens) == (tokenizer.decode(ids[:prompt]), 0)


def scored(tokenizer: Any, ids: list[int], prompt: int, *, only_prompt: bool = False) -> Piece:
    """A prompt of so many of these tokens, and the others as its answer."""
    handle: Any = types.SimpleNamespace(echoed=np.array(ids[:prompt], np.int32), shown=frozenset())
    rest = np.array(ids[1:], np.int32)
    answer = Answer(rest, tokenizer.decode(rest), np.zeros(rest.size, np.float32), "length", 1, ((),) * rest.size)
    return Pieces(tokenizer, handle, Reading(), log_probs=True, only_prompt=only_prompt).whole(answer)
