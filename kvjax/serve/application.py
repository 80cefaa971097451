"""The endpoints of the server."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from importlib.resources import files
from typing import Any, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from kvjax.engine import Engine

from .asking import Asked, Wanted, ask, unless_gone
from .chat import Chat
from .dialects import Template
from .documents import Chats, Completions, Form
from .errors import ApiError, gone, told, unexpected, unrouted
from .gate import Gate
from .metrics import registry_of
from .models import Models
from .outputs import Outputs
from .parsing import parse
from .responses import Responses
from .schema import Completion
from .settings import Settings
from .streaming import Events
from .tokenizing import Detokenize, Tokenize, detokenized, tokenized

Turned = TypeVar("Turned", Tokenize, Detokenize)
Endpoint = Callable[[Request], Awaitable[Response]]


def application(models: Models, settings: Settings, is_closing: Callable[[], bool] = lambda: False) -> Starlette:
    """The ASGI application that answers with the engines of models.

    Args:
        models: of one checkpoint. The caller closes their engines after the server.
        settings: what the server accepts.
        is_closing: whether the server shuts down; new requests are then refused.
    """
    registry, template = registry_of(models), Template.of(models.default.engine.tokenizer, settings.tool_calls)
    started = int(time.time())
    page = files("kvjax.serve").joinpath("page.html").read_text(encoding="utf-8")

    async def asked_for(request: Request, kind: type[Wanted]) -> tuple[str, Asked]:
        body = parse(kind, await received(request))
        found = models.find(body.model)
        return found.id, await ask(found.engine, body, settings.sampler, template)

    def answering(kind: type[Wanted], form_of: Callable[[str], Form]) -> Endpoint:
        async def answer(request: Request) -> Response:
            name, asked = await asked_for(request, kind)
            form = form_of(name)
            if asked.stream is not None:
                return Events(form, asked, settings.timeout)
            return JSONResponse(form.whole(asked, await unless_gone(request, asked, settings.timeout)))

        return answer

    def turning(kind: type[Turned], turn: Callable[[Engine, Template, Turned], dict[str, Any]]) -> Endpoint:
        async def answer(request: Request) -> Response:
            body = parse(kind, await received(request))
            found = models.default if body.model is None else models.find(body.model)
            return JSONResponse(await run_in_threadpool(turn, found.engine, template, body))

        return answer

    async def listed(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [model.document(started) for model in models]})

    async def described(request: Request) -> Response:
        return JSONResponse(models.find(request.path_params["name"]).document(started))

    async def health(request: Request) -> Response:
        failed = any(model.engine.stats().failed for model in models)
        status = "failed" if failed else "closing" if is_closing() else "ok"
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

    async def stats(request: Request) -> Response:
        name = request.query_params.get("model")
        model = models.default if name is None else models.find(name)
        found = model.engine.stats()
        named = {"model": model.id, "policy": model.policy, "tokens_per_second": found.tokens_per_second}
        return JSONResponse(asdict(found) | named)

    async def measured(request: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    async def show(request: Request) -> Response:
        return HTMLResponse(page.replace("MODEL_NAME", models.default.id))

    posts = {
        "/v1/completions": answering(Completion, Completions),
        "/v1/chat/completions": answering(Chat, Chats),
        "/v1/responses": answering(Responses, Outputs),
        "/tokenize": turning(Tokenize, tokenized),
        "/detokenize": turning(Detokenize, detokenized),
    }
    gets: dict[str, Endpoint] = {
        "/": show,
        "/health": health,
        "/metrics": measured,
        "/stats": stats,
        "/v1/models": listed,
        "/v1/models/{name:path}": described,
    }
    cors = [_cors(settings.origins)] if settings.origins else []  # first, so that refusals can be read too
    return Starlette(
        routes=[
            *(Route(path, endpoint, methods=["POST"]) for path, endpoint in posts.items()),
            *(Route(path, endpoint, methods=["GET"]) for path, endpoint in gets.items()),
        ],
        middleware=[*cors, Middleware(Gate, settings=settings, is_closing=is_closing)],
        exception_handlers={ApiError: told, ClientDisconnect: gone, HTTPException: unrouted, Exception: unexpected},
    )


async def received(request: Request) -> bytes:
    """The body of a request, which `request.body()` would keep."""
    return b"".join([chunk async for chunk in request.stream()])


def _cors(origins: Sequence[str]) -> Middleware:
    return Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"])
