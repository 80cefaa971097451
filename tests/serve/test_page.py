"""The first requests of docs/guide/serving.md, sent to the server that the page starts; and the page of the server."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest

import kvjax
from tests.patience import PATIENCE
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


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_reasoning_on_the_page_of_the_server() -> None:
    """It is shown apart, and an answer without text says why the question comes back."""
    told = [
        [{"reasoning_content": "Hm"}, {"reasoning_content": "."}, {"content": "It is"}, {"content": " 3."}],
        [{"reasoning_content": "Hm"}],
        [{"content": ""}],
    ]
    events = json.dumps([[{"choices": [{"delta": delta}]} for delta in deltas] for deltas in told])
    script, page = Path(__file__).with_name("page.js"), Path(kvjax.__file__).parent / "serve" / "page.html"
    out = subprocess.run(["node", script, page, events], capture_output=True, text=True, timeout=PATIENCE, check=True)
    said, cut, empty = map(json.loads, out.stdout.splitlines())
    assert said == [["user", "question"], ["faint", "Hm."], ["assistant", "It is 3."]]
    assert cut == [["bad", "the answer ended within its reasoning; more tokens may help"]]
    assert empty == [["bad", "the answer ended without text"]]
