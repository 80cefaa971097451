"""Answers and pieces of answers in OpenAI's form."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvjax.decoding.spelling import Spelled, Spelling
from kvjax.engine import Answer

from .asking import Asked

_REASONS = {None: None, "end": "stop", "stop": "stop", "length": "length"}


class Piece(NamedTuple):
    """A piece of an answer.

    Attributes:
        text: the text that is certain since the last piece.
        tokens: the number of tokens since then.
        spelled: the tokens whose text is certain since then, if the request asks for log-probabilities.
    """

    text: str
    tokens: int
    spelled: Sequence[Spelled]


@dataclass(frozen=True)
class Form(ABC):
    """The form in which an endpoint writes answers.

    Attributes:
        model: the name of the model.
        tokenizer: that of the engine.
    """

    model: str
    tokenizer: Any

    @abstractmethod
    def whole(self, asked: Asked, answers: Sequence[Answer]) -> dict[str, Any]:
        """The document of a request that does not stream."""

    def opening(self, asked: Asked) -> list[dict[str, Any]]:
        """The documents before the first piece of a stream."""
        return []

    @abstractmethod
    def piece(self, asked: Asked, index: int, piece: Piece, finish: str | None) -> dict[str, Any]:
        """The document of a piece; `finish` is the engine's reason, with the last piece of an answer."""

    def _document(self, asked: Asked, kind: str, name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"{kind}-{asked.id}",
            "object": name,
            "created": asked.created,
            "model": self.model,
            "choices": choices,
            "seed": asked.seed,
        }

    def spelling(self, asked: Asked) -> Spelling | None:
        """Spells the tokens of one answer, if the request asks for log-probabilities."""
        return Spelling(self.tokenizer) if asked.log_probs else None

    def _all(self, asked: Asked, answer: Answer) -> Piece:
        spelled, spelling, text = [], self.spelling(asked), answer.text or ""
        if spelling is not None and answer.log_probs is not None:
            spelled = spelling.add(zip(answer.tokens.tolist(), answer.log_probs.tolist(), strict=True), text, last=True)
        return Piece(text, len(answer.tokens), spelled)


def _counted(answers: Sequence[Answer]) -> int:
    return sum(len(answer.tokens) for answer in answers)


@dataclass(frozen=True)
class Completions(Form):
    """The form of `/v1/completions`."""

    def whole(self, asked: Asked, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = [self._choice(asked, i, self._all(asked, a), a.finish) for i, a in enumerate(answers)]
        return self._document(asked, "cmpl", "text_completion", choices) | {"usage": asked.usage(_counted(answers))}

    def piece(self, asked: Asked, index: int, piece: Piece, finish: str | None) -> dict[str, Any]:
        return self._document(asked, "cmpl", "text_completion", [self._choice(asked, index, piece, finish)])

    def _choice(self, asked: Asked, index: int, piece: Piece, finish: str | None) -> dict[str, Any]:
        log_probs = None
        if asked.log_probs:
            log_probs = {
                "tokens": [token.text for token in piece.spelled],
                "token_logprobs": [token.log_prob for token in piece.spelled],
                "top_logprobs": None,
                "text_offset": None,
            }
        return {"index": index, "text": piece.text, "logprobs": log_probs, "finish_reason": _REASONS[finish]}


@dataclass(frozen=True)
class Chats(Form):
    """The form of `/v1/chat/completions`."""

    def whole(self, asked: Asked, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = [
            {
                "index": i,
                "message": {"role": "assistant", "content": answer.text, "refusal": None},
                "logprobs": self._log_probs(asked, self._all(asked, answer)),
                "finish_reason": _REASONS[answer.finish],
            }
            for i, answer in enumerate(answers)
        ]
        return self._document(asked, "chatcmpl", "chat.completion", choices) | {"usage": asked.usage(_counted(answers))}

    def opening(self, asked: Asked) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [self._chunk(asked, i, delta, None, None) for i in range(len(asked.handles))]

    def piece(self, asked: Asked, index: int, piece: Piece, finish: str | None) -> dict[str, Any]:
        delta = {"content": piece.text} if piece.text else {}
        return self._chunk(asked, index, delta, self._log_probs(asked, piece), finish)

    def _chunk(
        self, asked: Asked, index: int, delta: dict[str, Any], log_probs: dict[str, Any] | None, finish: str | None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": log_probs, "finish_reason": _REASONS[finish]}
        return self._document(asked, "chatcmpl", "chat.completion.chunk", [choice])

    def _log_probs(self, asked: Asked, piece: Piece) -> dict[str, Any] | None:
        if not asked.log_probs:
            return None
        content = [
            {"token": token.text, "bytes": list(token.data), "logprob": token.log_prob, "top_logprobs": []}
            for token in piece.spelled
        ]
        return {"content": content, "refusal": None}
