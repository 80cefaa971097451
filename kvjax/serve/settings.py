"""The settings of a server."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvjax.checks import shown
from kvjax.decoding.sampling import Sampler, SamplingMethod

from .dialects import DIALECTS

DEFAULT = Sampler()
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Settings:
    """The settings of an application.

    Attributes:
        api_key: the key that clients send as a bearer token; None asks for none.
        hosts: the names in the Host header that are answered; None answers all. On a loopback address the names of the
            loopback keep web pages of other hosts from reaching the server under a name of their own.
        max_body: the most bytes of a request.
        timeout: the most seconds that a request may take.
        sampler: what draws the tokens of a request, as far as the request does not say.
        origins: the web origins whose pages may use the server, such as https://example.org; "*" is any.
        body_timeout: the most seconds that a client may take to send a request.
        tool_calls: the form of calls of tools, a name of `DIALECTS`; None takes it from the chat template.
    """

    api_key: str | None = None
    hosts: tuple[str, ...] | None = LOOPBACK
    max_body: int = 4_000_000
    timeout: float = 600.0
    body_timeout: float = 30.0
    sampler: SamplingMethod = DEFAULT
    origins: tuple[str, ...] = ()
    tool_calls: str | None = None

    def __post_init__(self) -> None:
        key = self.api_key
        if key is not None and not (key and key.isascii() and key.isprintable() and " " not in key):
            raise ValueError("the API key is empty or has other characters: expected visible ASCII characters")
        for origin in self.origins:
            if not re.fullmatch(r"\*|https?://[^/\s]+", origin):
                raise ValueError(f"the origin {shown(origin)}: expected * or one such as https://example.org")
        if self.tool_calls not in (None, *DIALECTS):
            raise ValueError(f"tool_calls={shown(self.tool_calls)}: expected one of {', '.join(DIALECTS)}")
        for name in ("max_body", "timeout", "body_timeout"):
            if not (value := getattr(self, name)) > 0:
                raise ValueError(f"{name}={shown(value)}: expected a number > 0")
