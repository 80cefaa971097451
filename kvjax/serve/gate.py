"""Checks every request before it reaches an endpoint: host, key, length, and whether the server still accepts."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError, closing
from .settings import Settings

OPEN = ("/", "/health")  # paths that need no key


class Gate:
    """Refuses requests that must not pass. It is ASGI middleware.

    Attributes:
        app: what it guards.
        settings: the limits.
        is_closing: whether the server shuts down.
    """

    def __init__(self, app: ASGIApp, settings: Settings, is_closing: Callable[[], bool]) -> None:
        self.app, self.settings, self.is_closing = app, settings, is_closing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            self._check(scope)
            receive = _bounded(receive, self.settings)
        except ApiError as error:
            await error.response(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        settings, headers = self.settings, Headers(scope=scope)
        if settings.hosts is not None and _name(headers.get("host", "")) not in settings.hosts:
            expected = ", ".join(settings.hosts)
            raise ApiError(421, f"this host name is not answered: expected {expected}", code="unknown_host")
        if settings.api_key is not None and scope["path"] not in OPEN:
            given = headers.get("authorization", "")
            scheme, _, key = given.partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(key.encode(), settings.api_key.encode()):
                fault = "the API key is wrong" if given else "there is no API key"
                raise ApiError(401, f"{fault}: expected the header Authorization: Bearer KEY", code="invalid_api_key")
        if self.is_closing() and scope["method"] == "POST":
            raise closing()
        if scope["method"] == "POST" and _media(headers) != "application/json":
            raise ApiError(415, "the content type is not application/json")
        length = headers.get("content-length", "0")
        if not (length.isascii() and length.isdigit() and len(length) < 20 and int(length) <= settings.max_body):
            raise _too_long(settings)


def _name(host: str) -> str:
    """The name in a Host header, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if ":" in host else host


def _media(headers: Headers) -> str:
    """The content type, without its parameters, in lower case."""
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def _too_long(settings: Settings) -> ApiError:
    return ApiError(413, f"the request is too long: expected at most {settings.max_body:,} bytes")


def _bounded(receive: Receive, settings: Settings) -> Receive:
    """Receives a body of limited length in limited time. Later calls wait for the end of the connection."""
    size, complete, until = 0, False, time.monotonic() + settings.body_timeout

    async def bounded() -> Message:
        nonlocal size, complete
        if complete:
            return await receive()
        try:
            message = await asyncio.wait_for(receive(), max(0.0, until - time.monotonic()))
        except TimeoutError:
            raise ApiError(
                408, f"the request took more than {settings.body_timeout:g} seconds to arrive", code="timeout"
            ) from None
        size += len(message.get("body", b""))
        if size > settings.max_body:
            raise _too_long(settings)
        complete = not message.get("more_body", False)
        return message

    return bounded
