"""Errors in OpenAI's form. No answer contains a path or a stack trace."""

from __future__ import annotations

import logging
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvjax.checks import cut, shown
from kvjax.engine import EngineClosedError

logger = logging.getLogger(__name__)


class ApiError(Exception):
    """An error that a client is told.

    Attributes:
        status: the HTTP status.
        message: what was wrong and what is accepted.
        param: the field of the request.
        code: a name for programs.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def document(self) -> dict[str, Any]:
        """The error as OpenAI's clients read it."""
        kind = "requests" if self.status == 429 else "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> Response:
        """The error as an answer."""
        headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}, 503: {"Retry-After": "5"}}
        return JSONResponse(self.document, self.status, headers.get(self.status))


def closing() -> ApiError:
    """The error of a server that shuts down."""
    return ApiError(503, "the server is shutting down: expected another server, or a later try", code="shutting_down")


def ended(error: EngineClosedError) -> ApiError:
    """The error of an engine that is closed, or has failed."""
    if error.__cause__ is None:
        return closing()
    message = "the engine has failed, and the log of the server says why: expected a server that is started anew"
    return ApiError(500, message, code="internal_error")


async def told(request: Request, error: Exception) -> Response:
    """The answer for an error that the application raises for a client."""
    assert isinstance(error, ApiError)
    return error.response


async def gone(request: Request, error: Exception) -> Response:
    """Returns a response that nobody reads, because the client left while it sent its request."""
    return Response(status_code=499)


async def unrouted(request: Request, error: Exception) -> Response:
    """The answer for a path or a method that there is not."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        message = f"{cut(request.method)} is not accepted here: expected {allowed}"
        return ApiError(405, message, code="method_not_allowed").response
    if error.status_code == 404:
        paths = ", ".join(route.path.replace(":path}", "}") for route in request.app.routes)
        return ApiError(404, f"there is no path {shown(request.url.path)}: expected one of {paths}").response
    return ApiError(error.status_code, str(error.detail)).response


def mistake(what: str, error: Exception) -> ApiError:
    """The error for a mistake of the server in this. The log has what happened."""
    logger.error("%s failed", what, exc_info=error)
    return ApiError(500, "the server made a mistake; its log says more", code="internal_error")


async def unexpected(request: Request, error: Exception) -> Response:
    """The answer for a mistake of the server."""
    return mistake(f"{request.method} {request.url.path}", error).response
