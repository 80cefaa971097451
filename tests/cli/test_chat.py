"""`kvjax chat`: the answers continue one cache, whose size does not change."""

from __future__ import annotations

import copy
import json
import os
import re
import select
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

import kvjax
from kvjax.cli import app
from kvjax.models import Decoder
from kvjax.reading.room import Compress
from tests.cli.commands import PROMPT, kv
from tests.patience import PATIENCE

OPTIONS = ["--max-new-tokens", "20", "--sampler", "greedy"]


@pytest.mark.long
@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    ("policy", "compress"), [("morphkv:budget=24,window=4", "end"), ("adakv:base=h2o,base.budget=24,groups=2", "auto")]
)
def test_a_dialogue(
    policy: str, compress: Compress, shallow: Decoder, talker: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    kvjax.save_hf(shallow, tmp_path / "model", talker)
    lines = ["ba ce di", "", "fo gu", "ce", "/exit", "never"]
    result = CliRunner().invoke(
        app, ["chat", str(tmp_path / "model"), *OPTIONS, "--policy", policy, "--system", "ga"], input="\n".join(lines)
    )
    assert result.exit_code == 0, result.output
    cache, expected = None, []
    for turn, text in enumerate(["ba ce di", "fo gu", "ce"]):
        messages = [{"role": "system", "content": "ga"}] * (turn == 0) + [{"role": "user", "content": text}]
        out = kvjax.generate(
            shallow, messages, policy=policy, cache=cache, compress=compress, max_new_tokens=20, tokenizer=talker
        )
        cache = out.cache
        expected.append(out.text)
    assert result.stdout.splitlines() == expected
    notes = result.stderr.splitlines()
    assert len(notes) == 3
    assert len(set(re.findall(r"; ([^;]+ are reserved)", "".join(notes)))) == 1
    assert notes[-1] == cache.in_words()


def test_options_of_the_chat_template(shallow: Decoder, talker: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    kvjax.save_hf(shallow, tmp_path / "model", talker)
    told = {"twice": True}
    options = ["chat", str(tmp_path / "model"), *OPTIONS, "--policy", "morphkv:budget=24,window=4"]
    result = CliRunner().invoke(app, [*options, "--chat-template-kwargs", json.dumps(told)], input="ba ce di")
    assert result.exit_code == 0, result.output
    expected = kvjax.generate(
        shallow,
        [{"role": "user", "content": "ba ce di"}],
        policy="morphkv:budget=24,window=4",
        max_new_tokens=20,
        tokenizer=talker,
        chat_template_kwargs=told,
        compress="end",
    )
    assert result.stdout == f"{expected.text}\n"
    assert result.stderr == f"{expected.cache.in_words()}\n"  # one token more than without the option
    status, _, stderr = kv(*options, "--chat-template-kwargs", "[1]")
    assert (status, stderr.count("\n")) == (2, 1)
    assert "--chat-template-kwargs '[1]': expected a JSON object" in stderr


def test_a_model_without_a_chat_template(shallow_model: str, tmp_path: Path) -> None:
    bare = shutil.copytree(shallow_model, tmp_path / "bare", ignore=shutil.ignore_patterns("chat_template.jinja"))
    status, _, stderr = kv("chat", bare, *OPTIONS)
    assert status == 2
    assert "has no chat template" in stderr
    assert "--chat-template FILE" in stderr


@pytest.mark.long
def test_the_demo_chats() -> None:
    result = CliRunner().invoke(app, ["chat", "demo", *OPTIONS], input=f"{PROMPT}\n")
    assert (result.exit_code, result.stdout.strip()) == (0, "adam is sword"), result.output
    assert kv("generate", "demo", PROMPT, "--chat")[:2] == (0, "adam is sword\n")


def test_a_template_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages[0]['content'] }} recall what the code of adam is :")
    told = "the code of adam is sword ."
    assert kv("generate", "demo", told, "--chat", "--chat-template", file)[:2] == (0, "adam is sword\n")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        (b"\xff", "is not UTF-8 text"),
        (b"{% for %}", "TemplateSyntaxError"),
        (b"{{ raise_exception('no') }}", "TemplateError"),
        (b"", "leaves out a user's message"),
    ],
)
def test_a_bad_template(content: bytes | None, said: str, tmp_path: Path) -> None:
    """It is refused before the model is read."""
    file = tmp_path / "chat.jinja"
    if content is not None:
        file.write_bytes(content)
    for command in ("chat",), ("generate", "--chat"):
        status, _, stderr = kv(*command, "no such folder", *["x"] * (command[0] == "generate"), "--chat-template", file)
        assert status == 2
        assert said in stderr
        assert "expected a Jinja file" in stderr


def test_a_template_without_an_end() -> None:
    status, _, stderr = kv("chat", "no such folder", "--chat-template", "/dev/full")
    assert status == 2
    assert "--chat-template /dev/full is a device: expected a Jinja file" in stderr


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        ("kvcompose:budget=0.25", "would allocate the budget to layers and heads more than once"),
        ("adakv", "would allocate the budget to layers and heads more than once"),
        ("finch:positions='in_cache'", "would score by queries that .* kept before the keys moved"),
    ],
)
def test_a_policy_that_compresses_once(policy: str, reason: str) -> None:
    """It is refused before the model is read."""
    status, _, stderr = kv("chat", "no such folder", *OPTIONS, "--policy", policy)
    assert status == 2
    assert re.search(rf"--policy {policy}: compressing the second message {reason}.*; expected a policy", stderr)


# A terminal of its own, as a shell gives it, whose Ctrl-C is SIGINT.
IN_A_TERMINAL = """
import fcntl, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from kvjax_command import main
main()
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="a terminal of POSIX")
def test_ctrl_c_in_a_terminal(shallow: Decoder, talker: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """During an answer it ends the answer, and at the prompt the command; an arrow brings the last message back."""
    import pty
    import termios

    endless = copy.deepcopy(talker)
    endless.eos_token = None
    kvjax.save_hf(shallow, tmp_path / "model", endless)
    options = ["--max-new-tokens", "4000", "--sampler", "greedy", "--policy", "streaming_llm:budget=24"]
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    process = subprocess.Popen(
        [sys.executable, "-c", IN_A_TERMINAL, "chat", str(tmp_path / "model"), *options],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TERM": "dumb"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    said = ""

    def until(text: str) -> None:
        nonlocal said
        while text not in said:
            assert select.select([ours], [], [], 60)[0], said
            said += os.read(ours, 4096).decode(errors="replace")
        said = said.partition(text)[2]

    for message in (b"ba ce di\n", b"\x1b[A\n"):
        until("> ")
        os.write(ours, message)
        until("ba ce di\r\n")
        while len(said) < 9:  # some of the answer
            said += os.read(ours, 4096).decode(errors="replace")
        os.write(ours, b"\x03")
        until("are reserved\r\n")
    until("> ")
    os.write(ours, b"\x03")
    until("kvjax: interrupted\r\n")
    assert process.wait(PATIENCE) == 130
    assert termios.tcgetattr(theirs) == before
