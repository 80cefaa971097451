"""Judges for answers that only a model can mark: any callable from prompt to reply, or a chat endpoint."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass

from kvjax.checks import shown

Judge = Callable[[str], str]
"""Maps a prompt to the judge's reply. A judge that cannot answer raises JudgeError."""

KEY = "KVJAX_JUDGE_KEY"


class JudgeError(RuntimeError):
    """The judge gave no usable reply; the answer that it should have marked has no score."""


@dataclass(frozen=True)
class Endpoint:
    """A judge behind an OpenAI-compatible endpoint, POST {url}/chat/completions.

    The environment variable KVJAX_JUDGE_KEY holds the key, if the endpoint needs one.

    Attributes:
        url: the address up to and including the version, such as "http://localhost:8000/v1".
        model: the name of the model at the endpoint.
        temperature: the sampling temperature of the judge.
        max_tokens: the largest number of tokens of a reply.
        tries: the largest number of requests per prompt.
        timeout: the time limit of a request in seconds.
        pause: the pause before the second request in seconds. The pause doubles before each further request.
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
        reason: object = "no request was made"
        for i in range(self.tries):
            if i:
                time.sleep(self.pause * 2 ** (i - 1))
            try:
                request = urllib.request.Request(address, json.dumps(asked).encode(), headers)
                with urllib.request.urlopen(request, timeout=self.timeout) as reply:
                    content = json.loads(reply.read())["choices"][0]["message"]["content"]
                if isinstance(content, str):
                    return content
                reason = f"its reply has the content {shown(content)}: expected a string"
            except urllib.error.HTTPError as error:
                reason = f"HTTP {error.code}: {error.read(300).decode('utf-8', 'replace')}"
                if error.code not in (408, 409, 425, 429) and error.code < 500:  # the same request would fail again
                    break
            except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
                reason = f"{type(error).__name__}: {error}"
        raise JudgeError(f"the judge {self.model} at {address} gave no reply: {reason}")
