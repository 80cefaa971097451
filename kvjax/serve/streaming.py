"""Answers as server-sent events, while they come."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from kvjax.engine import Finish, Handle, Token

from .asking import Asked, check_finished, ending_is_told, freed
from .documents import Form, Stream
from .errors import ApiError, mistake
from .pieces import Piece, Pieces

Event = tuple[int, Piece | None, Finish | None]


class Events(StreamingResponse):
    """The events of a request. Its rows are free when the last one has been sent, or the client is gone."""

    def __init__(self, form: Form, asked: Asked, timeout: float) -> None:
        stream = _events(form.stream(asked), asked, timeout)
        super().__init__(stream, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._asked = asked

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Not in the generator, which never begins if the client leaves while the head of the answer is sent.
        with freed(self._asked), suppress(ClientDisconnect):
            await super().__call__(scope, receive, send)


async def _events(stream: Stream, asked: Asked, timeout: float) -> AsyncIterator[bytes]:
    """The events of a request. An error after the first one is an event of its own, after which the stream ends."""
    try:
        for document in stream.opening():
            yield _event(document)
        async for index, piece in _merged(asked, timeout):
            for document in stream.add(index, piece):
                yield _event(document)
        for document in stream.closing():
            yield _event(document)
        if stream.ends:
            yield stream.ends
    except ApiError as error:
        yield _event(stream.failed(error))
    except Exception as error:
        yield _event(stream.failed(mistake("a stream", error)))


async def _merged(asked: Asked, timeout: float) -> AsyncIterator[tuple[int, Piece]]:
    """The pieces of all answers of a request, as they come.

    Raises:
        ApiError: 408 after `timeout` seconds, 503 if the server ends the answers.
    """
    queue: asyncio.Queue[Event | BaseException] = asyncio.Queue()
    followed = enumerate(zip(asked.handles, asked.pieces(), strict=True))
    tasks = [asyncio.create_task(_follow(i, handle, pieces, queue)) for i, (handle, pieces) in followed]
    until, left = time.monotonic() + timeout, len(tasks)
    try:
        while left:
            try:
                event = await asyncio.wait_for(queue.get(), max(0.0, until - time.monotonic()))
            except TimeoutError:
                raise ApiError(408, f"the answer took more than {timeout:g} seconds", code="timeout") from None
            with ending_is_told():
                if isinstance(event, BaseException):
                    raise event
            index, piece, finish = event
            check_finished(finish)
            left -= finish is not None
            if piece is not None:
                yield index, piece
    finally:
        for task in tasks:
            task.cancel()


async def _follow(index: int, handle: Handle, pieces: Pieces, queue: asyncio.Queue[Event | BaseException]) -> None:
    """Puts the pieces of one answer into a queue. A piece is sent when something is certain."""
    tokens: list[Token] = []
    try:
        async for token in handle:
            tokens.append(token)
            if token.text and (piece := pieces.add(tokens, token.text, None)) is not None:
                queue.put_nowait((index, piece, None))
            if token.text:
                tokens.clear()
        finish = (await handle).finish
        queue.put_nowait((index, None if finish == "cancelled" else pieces.add(tokens, "", finish), finish))
    except Exception as error:
        queue.put_nowait(error)


def _event(document: dict[str, Any]) -> bytes:
    named = f"event: {document['type']}\n" if "type" in document else ""
    return f"{named}data: {json.dumps(document, ensure_ascii=False)}\n\n".encode()
