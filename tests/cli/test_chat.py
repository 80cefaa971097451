"""`kvjax chat`: the answers continue one cache, whose size does not change."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

import kvjax
from kvjax.cli import app
from kvjax.models import Decoder
from kvjax.reading.room import Compress
from tests.cli.commands import PROMPT, kv

OPTIONS = ["--max-new-tokens", "20", "--sampler", "greedy"]


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
    assert len(set(re.findall(r"the cache takes ([^,]+),", "".join(notes)))) == 1
    assert notes[-1].startswith(f"{int(cache.length[0])} tokens seen")


def test_a_model_without_a_chat_template(shallow_model: str, tmp_path: Path) -> None:
    bare = shutil.copytree(shallow_model, tmp_path / "bare", ignore=shutil.ignore_patterns("chat_template.jinja"))
    status, _, stderr = kv("chat", bare, *OPTIONS)
    assert status == 2
    assert "has no chat template" in stderr
    assert "--chat-template FILE" in stderr


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
        (b"\xff", "UnicodeDecodeError"),
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
