"""`kvjax serve` as a process: SIGTERM finishes what runs, refuses what comes, and ends with status 0."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

import kvjax
from kvjax.models import Decoder
from tests.cli.commands import kv
from tests.patience import PATIENCE
from tests.processes import free_port
from tests.serve.serving import POLICY

SERVE = [sys.executable, "-c", "from kvjax_command import main; main()", "serve"]
SIZES = ["--policy", POLICY, "--rows", "2", "--max-prompt", "16", "--max-new-tokens", "1500", "--port", "0"]
ENDLESS = {"ignore_eos": True}


@pytest.fixture(scope="module")
def folder(shallow: Decoder, talker: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("served") / "tiny"
    kvjax.save_hf(shallow, path, talker)
    return str(path)


@contextmanager
def started(folder: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A process of a server, with one device."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "JAX_NUM_CPU_DEVICES": "1"}
    with subprocess.Popen([*SERVE, folder, *SIZES, *options], env=environment, stderr=subprocess.PIPE, text=True) as it:
        try:
            yield it
        finally:
            it.kill()


def said(process: subprocess.Popen[str], pattern: str) -> re.Match[str]:
    """Waits for a line of a process, and returns what of it matches."""
    assert process.stderr is not None
    while True:
        line = process.stderr.readline()
        assert line, "the process has ended"
        if found := re.search(pattern, line):
            return found


@contextmanager
def served(folder: str, *options: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A running server and its port."""
    with started(folder, *options) as process:
        yield process, int(said(process, r"http://127.0.0.1:(\d+)/v1")[1])


def ask(port: int, tokens: int) -> socket.socket:
    """A connection that has asked for a stream of tokens."""
    body = json.dumps({"model": "tiny", "prompt": "ba", "max_tokens": tokens, "ignore_eos": True, "stream": True})
    client = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close"
    client.sendall(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
    return client


def rest(client: socket.socket) -> str:
    """Everything until the server closes the connection."""
    parts = []
    while part := client.recv(1 << 16):
        parts.append(part)
    return b"".join(parts).decode()


@pytest.mark.long
def test_sigterm_finishes_what_runs(folder: str) -> None:
    with served(folder) as (process, port):
        client = ask(port, 1500)
        client.recv(1)  # the answer has begun
        process.send_signal(signal.SIGTERM)
        until = time.monotonic() + PATIENCE
        while True:  # the address is given up while the answer goes on
            try:
                socket.create_connection(("127.0.0.1", port), timeout=PATIENCE).close()
            except ConnectionError:
                break
            assert time.monotonic() < until
            time.sleep(0.005)
        text = rest(client)
        client.close()
        assert text.count('"finish_reason": "length"') == 1
        assert "data: [DONE]" in text
        assert process.wait(timeout=PATIENCE) == 0


@pytest.mark.slow
def test_several_policies(folder: str, shallow: Decoder, talker: Any) -> None:
    with served(folder, "--policy", "all=full") as (_, port):
        url = f"http://127.0.0.1:{port}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE) as client:
            assert [one.id for one in client.models.list().data] == ["tiny@morphkv", "tiny@all"]
            asked: Any = {"prompt": "ba bo ce", "temperature": 0, "max_tokens": 20, "extra_body": ENDLESS}
            for name, policy in (("tiny", POLICY), ("tiny@morphkv", POLICY), ("tiny@all", "full")):
                alone = kvjax.generate(
                    shallow, asked["prompt"], policy=policy, tokenizer=talker, max_new_tokens=20, eos=()
                )
                assert client.completions.create(model=name, **asked).choices[0].text == alone.text


@pytest.mark.slow
def test_two_processes_serve_one_model(folder: str, shallow: Decoder, talker: Any) -> None:
    """Requests go to process 0, whose end is that of both."""
    mesh = ("--mesh", "1x2", "--coordinator", f"localhost:{free_port()}", "--processes", "2")
    with (
        started(folder, *mesh, "--process", "1") as follower,
        served(folder, *mesh, "--process", "0") as (leader, port),
    ):
        said(follower, "follows process 0 as process 1")
        with openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=PATIENCE
        ) as client:
            greedily = partial(
                client.completions.create, model="tiny", temperature=0, max_tokens=20, extra_body=ENDLESS
            )
            found = [greedily(prompt=text) for text in ("ba", "bo ba")]
        for process in (follower, leader):  # the follower has no end of its own
            process.send_signal(signal.SIGTERM)
        assert leader.wait(timeout=PATIENCE) == follower.wait(timeout=PATIENCE) == 0
    texts = [one.choices[0].text for one in found]
    alone = kvjax.generate(shallow, ["ba", "bo ba"], policy=POLICY, tokenizer=talker, max_new_tokens=20, eos=())
    assert texts == alone.text
    assert all(texts)


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--rows", "0"], "rows=0"),
        (["--host", "203.0.113.7"], "expected a free port of an address of this machine"),
        (["--host", "no such host"], "unknown name"),
        (["--policy", "nonsense"], "nonsense"),
        (["--policy", POLICY], "have the name morphkv: expected another for one of them, as in --policy morphkv2="),
        (["--policy", "a/b=full"], "has the name 'a/b': expected at most 64 letters"),
        (["--policy", "full", "--coordinator", "auto"], "2 policies with --coordinator: expected one --policy"),
        (["--policy", "full", "--memory", "8kB"], "of each of 2 engines"),
        (["--api-key", ""], "visible ASCII"),
        (["--timeout", "0"], "timeout=0"),
        (["--name", ""], "an empty name"),
        (["--processes", "2"], "--processes and --process together"),
        (["--coordinator", "localhost:1", "--processes", "2"], "--processes and --process together"),
        (["--coordinator", "auto", "--process", "0"], "or --coordinator auto"),
        (["--coordinator", "localhost:1", "--processes", "2", "--process", "2"], "an index below --processes 2"),
    ],
)
def test_options_that_do_not_fit(
    folder: str, options: list[str], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")
    status, _, stderr = kv("serve", folder, *SIZES, *options)
    assert status == 2
    assert problem in stderr
    assert len(stderr.splitlines()) == 1


@pytest.mark.slow
def test_a_port_in_use_is_said_at_once(folder: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        status, _, stderr = kv("serve", folder, *SIZES[:-1], port)
    assert status == 2
    assert f"127.0.0.1 port {port}" in stderr


@pytest.mark.slow
def test_a_model_without_a_tokenizer(shallow: Decoder, tmp_path: Path) -> None:
    kvjax.save_hf(shallow, tmp_path / "mute", None)
    status, _, stderr = kv("serve", tmp_path / "mute", *SIZES)
    assert status == 2
    assert "has no tokenizer" in stderr
