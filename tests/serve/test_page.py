"""The first requests of docs/guide/serving.md, sent to the server that the page starts."""

from __future__ import annotations

import json
import re
from contextlib import contextmanager
from pathlib import Path

import pytest

import kvjax
from tests.serve.serving import only, send, served

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "serving.md"


@pytest.mark.long
def test_first_requests_of_the_page() -> None:
    text = PAGE.read_text()
    (options,) = re.findall(
        r"kvjax serve demo --policy (\S+) --rows (\d+) --max-prompt (\d+) --max-new-tokens (\d+)", text
    )
    policy, (rows, prompt, answer) = options[0], map(int, options[1:])
    code = "".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    (body,) = re.findall(r"-d '(\{.*?\})'", text)
    params, tokenizer = kvjax.load("demo")
    sizes = {"rows": rows, "max_prompt": prompt, "max_new_tokens": answer}
    with (
        kvjax.Engine(params, policy, **sizes, tokenizer=tokenizer) as engine,
        contextmanager(served)(only(engine, policy, "demo")) as serving,
    ):
        status, document = send(serving, "/v1/completions", json.loads(body) | {"temperature": 0})
        assert (status, document["choices"][0]["text"]) == (200, "anna is lamp")
        assert '"text":"anna is lamp"' in text
        exec(code.replace(":8000", f":{serving.port}"), {})
