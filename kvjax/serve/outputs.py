"""Responses and their events in OpenAI's form. The items of an answer are its reasoning, its message and its calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .asking import Asked
from .dividing import Call
from .documents import Documents, Form, Stream, spelled
from .errors import ApiError
from .pieces import Piece


@dataclass(frozen=True)
class Outputs(Form):
    """The form of `/v1/responses`."""

    def whole(self, asked: Asked, answers: Sequence[Piece]) -> dict[str, Any]:
        (answer,) = answers
        items = Items(asked)
        said = answer.said
        if said.reasoning:
            items.open("reasoning")["content"][0]["text"] = said.reasoning
        if said.content or not (said.reasoning or said.calls):
            items.open("message")["content"][0] |= {"text": said.content, "logprobs": _spelled(asked, answer)}
        for name, arguments in said.calls:
            assert name is not None, "the first piece of an answer goes on with a call"
            items.call(name, arguments)
        return self.document(asked, items, answer.finish, answer.tokens)

    def stream(self, asked: Asked) -> Stream:
        return Streamed(self, asked)

    def document(self, asked: Asked, items: Items, finish: str | None, tokens: int) -> dict[str, Any]:
        """The response.

        Args:
            items: of the answer until now.
            finish: why the answer has ended; None while it goes on.
            tokens: their number until now.
        """
        status = {None: "in_progress", "length": "incomplete"}.get(finish, "completed")
        statuses = ["completed"] * (len(items.all) - 1) + [status]  # an answer ends in its last item
        return {
            "id": f"resp_{asked.id}",
            "object": "response",
            "created_at": asked.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.model,
            "output": [item | {"status": one} for item, one in zip(items.all, statuses, strict=False)],
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "seed": asked.seed,
            "usage": None if finish is None else _usage(asked, tokens),
            **asked.repeated,
        }


def _usage(asked: Asked, tokens: int) -> dict[str, Any]:
    """The usage in the words of responses. Reasoning is not counted apart."""
    usage = asked.usage(tokens)
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
        "output_tokens": tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }


def _spelled(asked: Asked, piece: Piece) -> Documents:
    return spelled(asked, piece) if asked.log_probs else []


class Items:
    """The items of an answer, in their order.

    Attributes:
        all: the items.
    """

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self.all: Documents = []

    def open(self, kind: str) -> dict[str, Any]:
        """Adds an item without text: "reasoning" or "message"."""
        part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        item: dict[str, Any] = {"summary": []}
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item = {"role": "assistant"}
        return self._add(kind, "rs" if kind == "reasoning" else "msg", item | {"content": [part]})

    def call(self, name: str, arguments: str) -> dict[str, Any]:
        """Adds a call."""
        named = {"call_id": self._asked.reading.call_id(), "name": name, "arguments": arguments}
        return self._add("function_call", "fc", named)

    def _add(self, kind: str, prefix: str, item: dict[str, Any]) -> dict[str, Any]:
        self.all.append({"id": f"{prefix}_{self._asked.id}_{len(self.all)}", "type": kind, **item})
        return self.all[-1]


class Streamed(Stream):
    """The events of a response. Each has its number."""

    def __init__(self, form: Outputs, asked: Asked) -> None:
        self._form, self._asked, self._items = form, asked, Items(asked)
        self._open: dict[str, Any] | None = None  # the item whose text goes on
        self._tokens, self._count = 0, 0
        self._spelled: Documents = []  # tokens that belong to text to come
        self._finish: str | None = None

    def opening(self) -> Documents:
        return [self._state("created"), self._state("in_progress")]

    def add(self, index: int, piece: Piece) -> Documents:
        self._tokens += piece.tokens
        said, calls = piece.said, piece.said.calls
        self._spelled += _spelled(self._asked, piece)
        events: Documents = []
        if calls and calls[0].name is None:  # the rest of a call, which may end before the text begins
            events, calls = self._call(calls[0]), calls[1:]
        if said.reasoning:
            events += self._text("reasoning", said.reasoning)
        if said.content:
            events += self._text("message", said.content)
        for call in calls:
            events += self._call(call)
        self._finish = piece.finish
        return events

    def closing(self) -> Documents:
        events: Documents = [] if self._items.all else self._begin("message")
        status = "incomplete" if self._finish == "length" else "completed"
        return [*events, *self._close(status), self._state(status)]

    def failed(self, error: ApiError) -> dict[str, Any]:
        told = {"code": error.code, "message": error.message, "param": error.param}
        return self._event("error", **told)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._count += 1
        return {"type": kind, "sequence_number": self._count - 1, **fields}

    def _state(self, status: str) -> dict[str, Any]:
        """The event of the response as it is."""
        document = self._form.document(self._asked, self._items, self._finish, self._tokens)
        return self._event(f"response.{status}", response=document)

    def _of(self, kind: str, **fields: Any) -> dict[str, Any]:
        """An event of the last item."""
        return self._event(f"response.{kind}", output_index=len(self._items.all) - 1, **fields)

    def _begin(self, kind: str) -> Documents:
        """Closes the item whose text goes on, and opens another."""
        closed = self._close("completed")
        item = self._open = self._items.open(kind)
        part = {"item_id": item["id"], "content_index": 0, "part": dict(item["content"][0])}
        added = item | {"content": [], "status": "in_progress"}
        return [
            *closed,
            self._of("output_item.added", item=added),
            self._of("content_part.added", **part),
        ]

    def _take_spelled(self, part: dict[str, Any]) -> dict[str, Any]:
        """Puts the tokens that are spelled into a part of a message, and returns them for its event."""
        if "logprobs" not in part:
            return {}
        found, self._spelled = self._spelled, []
        part["logprobs"] = part["logprobs"] + found
        return {"logprobs": found}

    def _text(self, kind: str, text: str) -> Documents:
        """Some more text of the reasoning or of the message."""
        goes_on = self._open is not None and self._open["type"] == kind
        events = [] if goes_on else self._begin(kind)
        item = self._open
        assert item is not None
        part = item["content"][0]
        part["text"] += text
        delta = {"item_id": item["id"], "content_index": 0, "delta": text, **self._take_spelled(part)}
        return [*events, self._of(f"{part['type']}.delta", **delta)]

    def _close(self, status: str) -> Documents:
        """Ends the item whose text goes on, if there is one."""
        item, self._open = self._open, None
        if item is None:
            return []
        if item["type"] == "function_call":
            named = {name: item[name] for name in ("name", "arguments")}
            return [
                self._of("function_call_arguments.done", item_id=item["id"], **named),
                self._of("output_item.done", item=item | {"status": status}),
            ]
        part = item["content"][0]
        self._take_spelled(part)
        at = {"item_id": item["id"], "content_index": 0}
        text = {name: value for name, value in part.items() if name in ("text", "logprobs")}
        return [
            self._of(f"{part['type']}.done", **at, **text),
            self._of("content_part.done", **at, part=part),
            self._of("output_item.done", item=item | {"status": status}),
        ]

    def _call(self, call: Call) -> Documents:
        """A call, or more of the arguments of the last one."""
        events: Documents = []
        if call.name is not None:
            events = self._close("completed")
            self._open = self._items.call(call.name, "")
            events.append(self._of("output_item.added", item=self._open | {"status": "in_progress"}))
        item = self._open
        assert item is not None
        item["arguments"] += call.arguments
        return [*events, self._of("function_call_arguments.delta", item_id=item["id"], delta=call.arguments)]
