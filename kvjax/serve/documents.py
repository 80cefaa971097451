"""Answers and pieces of answers in OpenAI's form."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvjax.decoding.spelling import alone

from .asking import Asked
from .dividing import Said
from .errors import ApiError
from .pieces import Piece
from .schema import StreamOptions

Documents = list[dict[str, Any]]


@dataclass(frozen=True)
class Form(ABC):
    """The form in which an endpoint writes answers.

    Attributes:
        model: the name of the model.
    """

    model: str

    @abstractmethod
    def whole(self, asked: Asked, answers: Sequence[Piece]) -> dict[str, Any]:
        """The document of a request that does not stream."""

    @abstractmethod
    def stream(self, asked: Asked) -> Stream:
        """Returns the writer of the documents of a request that streams."""


class Stream(ABC):
    """Writes the documents of one stream, in the order of its events."""

    ends: ClassVar[bytes] = b""  # the last event

    @abstractmethod
    def opening(self) -> Documents:
        """The documents before the first piece."""

    @abstractmethod
    def add(self, index: int, piece: Piece) -> Documents:
        """The documents of a piece of answer `index`."""

    @abstractmethod
    def closing(self) -> Documents:
        """The documents after the last piece."""

    @abstractmethod
    def failed(self, error: ApiError) -> dict[str, Any]:
        """The document of an error, after which the stream ends."""


class ChoiceForm(Form):
    """The form of answers that are choices."""

    @abstractmethod
    def piece(self, asked: Asked, index: int, piece: Piece) -> dict[str, Any]:
        """The document of a piece."""

    def opening(self, asked: Asked) -> Documents:
        """The documents before the first piece of a stream."""
        return []

    def stream(self, asked: Asked) -> Stream:
        return Chunks(self, asked)

    def _document(self, asked: Asked, kind: str, name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"{kind}-{asked.id}",
            "object": name,
            "created": asked.created,
            "model": self.model,
            "choices": choices,
            "seed": asked.seed,
        }


class Chunks(Stream):
    """A stream of choices, one document per piece. The usage comes with them or after them, as the client asks."""

    ends = b"data: [DONE]\n\n"

    def __init__(self, form: ChoiceForm, asked: Asked) -> None:
        self._form, self._asked = form, asked
        self._options, self._tokens = asked.stream or StreamOptions(), 0

    def opening(self) -> Documents:
        return [self._with_usage(document) for document in self._form.opening(self._asked)]

    def add(self, index: int, piece: Piece) -> Documents:
        self._tokens += piece.tokens
        return [self._with_usage(self._form.piece(self._asked, index, piece))]

    def closing(self) -> Documents:
        last = self._form.piece(self._asked, 0, Piece(Said(), 0, ())) | {"choices": []}
        return [last | self._usage] if self._options.include_usage else []

    def failed(self, error: ApiError) -> dict[str, Any]:
        return error.document

    def _with_usage(self, document: dict[str, Any]) -> dict[str, Any]:
        return document | (self._usage if self._options.continuous_usage_stats else {})

    @property
    def _usage(self) -> dict[str, Any]:
        return {"usage": self._asked.usage(self._tokens)}


def _counted(answers: Sequence[Piece]) -> int:
    return sum(answer.tokens for answer in answers)


@dataclass(frozen=True)
class Completions(ChoiceForm):
    """The form of `/v1/completions`."""

    def whole(self, asked: Asked, answers: Sequence[Piece]) -> dict[str, Any]:
        choices = [self._choice(asked, i, answer) for i, answer in enumerate(answers)]
        return self._document(asked, "cmpl", "text_completion", choices) | {"usage": asked.usage(_counted(answers))}

    def piece(self, asked: Asked, index: int, piece: Piece) -> dict[str, Any]:
        return self._document(asked, "cmpl", "text_completion", [self._choice(asked, index, piece)])

    def _choice(self, asked: Asked, index: int, piece: Piece) -> dict[str, Any]:
        log_probs = None
        if asked.log_probs:
            log_probs = {
                "tokens": [token.text for token in piece.spelled],
                "token_logprobs": [token.log_prob for token in piece.spelled],
                "top_logprobs": self._top(asked, piece) if asked.top else None,
                "text_offset": [*piece.offsets],
            }
        return {"index": index, "text": piece.said.content, "logprobs": log_probs, "finish_reason": piece.finish}

    @staticmethod
    def _top(asked: Asked, piece: Piece) -> list[dict[str, float | None] | None]:
        """The most probable tokens by text, and each token itself. Of equal texts the most probable one counts."""
        found: list[dict[str, float | None] | None] = []
        for token, top in zip(piece.spelled, piece.top, strict=True):
            if token.log_prob is None:  # the first of a prompt
                found.append(None)
                continue
            named: dict[str, float | None] = {alone(asked.tokenizer, i): log_prob for i, log_prob in reversed(top)}
            found.append(named | ({} if token.text in named else {token.text: token.log_prob}))
        return found


@dataclass(frozen=True)
class Chats(ChoiceForm):
    """The form of `/v1/chat/completions`."""

    def whole(self, asked: Asked, answers: Sequence[Piece]) -> dict[str, Any]:
        choices = [
            {
                "index": i,
                "message": self._message(asked, answer.said),
                "logprobs": self._log_probs(asked, answer),
                "finish_reason": answer.finish,
            }
            for i, answer in enumerate(answers)
        ]
        return self._document(asked, "chatcmpl", "chat.completion", choices) | {"usage": asked.usage(_counted(answers))}

    def opening(self, asked: Asked) -> Documents:
        delta = {"role": "assistant", "content": ""}
        return [self._chunk(asked, i, delta, None, None) for i in range(len(asked.handles))]

    def piece(self, asked: Asked, index: int, piece: Piece) -> dict[str, Any]:
        said, delta = piece.said, dict[str, Any]()
        if said.content:
            delta["content"] = said.content
        if said.reasoning:
            delta["reasoning_content"] = said.reasoning
        if said.calls:
            first = piece.calls_before - (said.calls[0].name is None)
            delta["tool_calls"] = [{"index": i} | call for i, call in enumerate(self._calls(asked, said), first)]
        return self._chunk(asked, index, delta, self._log_probs(asked, piece), piece.finish)

    def _message(self, asked: Asked, said: Said) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": said.content, "refusal": None}
        if said.reasoning:
            message["reasoning_content"] = said.reasoning
        if said.calls:
            message |= {"content": said.content or None, "tool_calls": self._calls(asked, said)}
        return message

    @staticmethod
    def _calls(asked: Asked, said: Said) -> list[dict[str, Any]]:
        """The calls, of which one without a name is more of the arguments of the call before."""
        return [
            {"function": {"arguments": call.arguments}}
            if call.name is None
            else {
                "id": asked.reading.call_id(),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in said.calls
        ]

    def _chunk(
        self, asked: Asked, index: int, delta: dict[str, Any], log_probs: dict[str, Any] | None, finish: str | None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": log_probs, "finish_reason": finish}
        return self._document(asked, "chatcmpl", "chat.completion.chunk", [choice])

    def _log_probs(self, asked: Asked, piece: Piece) -> dict[str, Any] | None:
        return {"content": spelled(asked, piece), "refusal": None} if asked.log_probs else None


def spelled(asked: Asked, piece: Piece) -> Documents:
    """The tokens of a piece with their log-probabilities, and the most probable tokens in the place of each."""

    def other(text: str, log_prob: float) -> dict[str, Any]:
        return {"token": text, "bytes": list(text.encode()), "logprob": log_prob}

    return [
        {
            "token": token.text,
            "bytes": list(token.data),
            "logprob": token.log_prob,
            "top_logprobs": [other(alone(asked.tokenizer, i), log_prob) for i, log_prob in top],
        }
        for token, top in zip(piece.spelled, piece.top, strict=True)
    ]
