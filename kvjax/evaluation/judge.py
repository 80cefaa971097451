"""Answers that a model must judge: any callable from a prompt to a reply, or an OpenAI-compatible endpoint."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass

Judge = Callable[[str], str]
"""A prompt -> the judge's reply. A judge that cannot answer raises JudgeError."""

KEY = "KVJAX_JUDGE_KEY"


class JudgeError(RuntimeError):
    """No usable reply was to be had; what it should have judged is not scored."""


@dataclass(frozen=True)
class Endpoint:
    """A judge behind POST {url}/chat/completions; its key, if it needs one, is in the variable KVJAX_JUDGE_KEY.

    Attributes:
        url: up to and with the version: "http://localhost:8000/v1".
        model: its name there.
        tries: so often a request is made until one succeeds, with growing pauses.
        timeout: of a request, in seconds.
    """

    url: str
    model: str
    temperature: float = 0.5
    max_tokens: int = 1024
    tries: int = 5
    timeout: float = 600
    pause: float = 1.0

    def __call__(self, prompt: str) -> str:
        asked = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
        }
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY):
            headers["Authorization"] = f"Bearer {key}"
        address = f"{self.url.rstrip('/')}/chat/completions"
        reason: object = "it was not asked"
        for i in range(self.tries):
            if i:
                time.sleep(self.pause * 2 ** (i - 1))
            try:
                request = urllib.request.Request(address, json.dumps(asked).encode(), headers)
                with urllib.request.urlopen(request, timeout=self.timeout) as reply:
                    content = json.loads(reply.read())["choices"][0]["message"]["content"]
                if isinstance(content, str):
                    return content
                reason = f"its reply has {content!r} for a text"
            except urllib.error.HTTPError as error:
                reason = f"HTTP {error.code}: {error.read(300).decode('utf-8', 'replace')}"
                if error.code not in (408, 409, 425, 429) and error.code < 500:  # it would say the same again
                    break
            except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
                reason = f"{type(error).__name__}: {error}"
        raise JudgeError(f"the judge {self.model} at {address} gave no reply: {reason}")
