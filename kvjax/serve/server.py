"""Runs an application until a signal ends it."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import socket

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from .errors import ApiError

KEEP_ALIVE = 75  # seconds that a connection may idle; clients that close it sooner never find it closed
LINGER = 5  # seconds in which a client may finish what it sends of a request that is refused


class Http(H11Protocol):
    """Uvicorn's HTTP, which answers what is no HTTP in OpenAI's form too."""

    def send_400_response(self, msg: str) -> None:
        error = ApiError(400, "the request is not HTTP/1.1: expected a line, headers and a body as RFC 9112 has them")
        body = error.response.body
        head = f"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        self.transport.write(f"{head}Connection: close\r\n\r\n".encode() + body)
        # A close with bytes unread resets the connection, and the client may lose the answer (RFC 9112, section 9.6).
        self.transport.write_eof()
        self.transport.set_protocol(asyncio.Protocol())  # drops what comes, and closes when the client has
        self.loop.call_later(LINGER, self.transport.close)
        self.connections.discard(self)


class Ending:
    """A flag that says whether a server has been told to end. The application asks, and is made before the server."""

    def __init__(self) -> None:
        self.server: uvicorn.Server | None = None

    def __call__(self) -> bool:
        return self.server is not None and self.server.should_exit


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; connections wait until `run` accepts them.

    Args:
        host: an IPv4 or IPv6 address, or a name.
        port: the port; 0 takes a free one.

    Raises:
        ValueError: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:  # names that are unknown have negative numbers
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else "unknown name"
        raise ValueError(f"{host} port {port}: {reason}; expected a free port of an address of this machine") from None


def run(app: Starlette, ending: Ending, listener: socket.socket, *, patience: float) -> None:
    """Serves until SIGTERM. The server then refuses new requests, finishes those that run, and returns.

    Args:
        app: the application, which was made with `ending`.
        ending: knows whether the server ends.
        listener: from `listen`; it is closed at the end.
        patience: the most seconds to wait for requests that run when the server ends.
    """
    server = ending.server = uvicorn.Server(configured(app, patience=patience))
    # uvicorn raises the signal again that has ended it. Without a handler SIGTERM would end the process before the
    # engine is closed, and with a status that is not 0.
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with listener:
            server.run(sockets=[listener])
    finally:
        signal.signal(signal.SIGTERM, before)


def configured(app: Starlette, *, patience: float) -> uvicorn.Config:
    """Returns how uvicorn serves an application: as `run` does."""
    return uvicorn.Config(
        app,
        http=Http,
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=None if math.isinf(patience) else math.ceil(patience),
    )
