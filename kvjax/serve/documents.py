"""Answers and pieces of answers in OpenAI's form."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvjax.engine import Answer, Token

from .asking import Asked

_REASONS = {None: None, "end": "stop", "stop": "stop", "length": "length"}
Piece = tuple[str, list[Token]]
"""Text that is certain, and the tokens since the last piece."""


@dataclass(frozen=True)
class Form(ABC):
    """How an endpoint writes answers.

    Attributes:
        model: the name of the model.
        tokenizer: spells tokens.
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

    def _spelled(self, token: int) -> str:
        return self.tokenizer.decode([token])


def _tokens(answer: Answer) -> list[Token]:
    log_probs = [None] * len(answer.tokens) if answer.log_probs is None else answer.log_probs.tolist()
    return [Token(int(t), None, p) for t, p in zip(answer.tokens, log_probs, strict=True)]


def _counted(answers: Sequence[Answer]) -> int:
    return sum(len(answer.tokens) for answer in answers)


@dataclass(frozen=True)
class Completions(Form):
    """The form of `/v1/completions`."""

    def whole(self, asked: Asked, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = [self._choice(asked, i, (a.text or "", _tokens(a)), a.finish) for i, a in enumerate(answers)]
        return self._document(asked, "cmpl", "text_completion", choices) | {"usage": asked.usage(_counted(answers))}

    def piece(self, asked: Asked, index: int, piece: Piece, finish: str | None) -> dict[str, Any]:
        return self._document(asked, "cmpl", "text_completion", [self._choice(asked, index, piece, finish)])

    def _choice(self, asked: Asked, index: int, piece: Piece, finish: str | None) -> dict[str, Any]:
        text, tokens = piece
        log_probs = None
        if asked.request.log_probs:
            log_probs = {
                "tokens": [self._spelled(token.id) for token in tokens],
                "token_logprobs": [token.log_prob for token in tokens],
                "top_logprobs": None,
                "text_offset": None,
            }
        return {"index": index, "text": text, "logprobs": log_probs, "finish_reason": _REASONS[finish]}


@dataclass(frozen=True)
class Chats(Form):
    """The form of `/v1/chat/completions`."""

    def whole(self, asked: Asked, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = [
            {
                "index": i,
                "message": {"role": "assistant", "content": answer.text, "refusal": None},
                "logprobs": self._log_probs(asked, _tokens(answer)),
                "finish_reason": _REASONS[answer.finish],
            }
            for i, answer in enumerate(answers)
        ]
        return self._document(asked, "chatcmpl", "chat.completion", choices) | {"usage": asked.usage(_counted(answers))}

    def opening(self, asked: Asked) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [self._chunk(asked, i, delta, None, None) for i in range(len(asked.handles))]

    def piece(self, asked: Asked, index: int, piece: Piece, finish: str | None) -> dict[str, Any]:
        text, tokens = piece
        delta = {"content": text} if text else {}
        return self._chunk(asked, index, delta, self._log_probs(asked, tokens), finish)

    def _chunk(
        self, asked: Asked, index: int, delta: dict[str, Any], log_probs: dict[str, Any] | None, finish: str | None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": log_probs, "finish_reason": _REASONS[finish]}
        return self._document(asked, "chatcmpl", "chat.completion.chunk", [choice])

    def _log_probs(self, asked: Asked, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if not asked.request.log_probs:
            return None
        found = [(self._spelled(token.id), token.log_prob) for token in tokens]
        content = [{"token": x, "bytes": list(x.encode()), "logprob": p, "top_logprobs": []} for x, p in found]
        return {"content": content, "refusal": None}
