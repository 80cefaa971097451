"""`kvjax generate`: it prints what the library answers."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

import kvjax
from kvjax.checkpoint.folder import DEMO
from kvjax.cli.loading import EXAMPLE
from tests.cli.commands import PROMPT, kv


@pytest.mark.long
def test_generate_prints_what_the_library_answers(shallow_model: str) -> None:
    params, words = kvjax.load(shallow_model)
    policy = kvjax.policies.parse("morphkv:budget=12,window=4")
    expected = kvjax.generate(params, PROMPT, policy=policy, max_new_tokens=6, tokenizer=words)
    options = ("generate", shallow_model, PROMPT, "--policy", "morphkv:budget=12,window=4", "--max-new-tokens", 6)
    status, stdout, stderr = kv(*options)
    assert (status, stdout) == (0, f"{expected.text}\n")
    assert "15 tokens read" in stderr
    assert expected.cache.in_words() in stderr
    assert "tokens/s" in stderr
    _, _, stderr = kv(*options[:-1], 1)
    assert "tokens/s" not in stderr  # no token took a step
    status, stdout, _ = kv(*options, "--stream")
    assert (status, stdout) == (0, f"{expected.text}\n")
    status, stdout, stderr = kv(*options, "--json")
    document = json.loads(stdout)
    assert (status, stderr) == (0, "")
    assert document["text"] == expected.text
    assert document["tokens"] == expected.tokens[0, : expected.lengths[0]].tolist()
    assert document["cache_bytes"] == expected.cache.nbytes
    assert document["prompt_tokens"] == 15


@pytest.mark.long
def test_a_prompt_of_unknown_words_is_warned_of() -> None:
    status, _, stderr = kv("generate", "demo", "Once upon the time", "--max-new-tokens", 1)
    warning = "kvjax: warning: 3 of 4 tokens of the prompt are unknown to demo, which knows 512 words; try: "
    assert (status, stderr.splitlines()[0]) == (0, f"{warning}{EXAMPLE!r}")
    status, stdout, stderr = kv("generate", "demo", EXAMPLE, "--max-new-tokens", 4)
    assert (status, stdout) == (0, "anna is lamp\n")
    assert "warning" not in stderr


def test_the_first_example_of_the_page_is_one_that_the_demo_model_knows() -> None:
    text = (Path(__file__).parents[2] / "docs" / "guide" / "command_line.md").read_text()
    (first, *_) = re.findall(r'kvjax generate (\S+) "([^"]*)"', text)
    assert first == ("demo", EXAMPLE)


@pytest.mark.long
def test_generate_ends_at_a_stop_string() -> None:
    options = ("generate", "demo", EXAMPLE, "--max-new-tokens", 4)
    assert kv(*options, "--stop", "lamp")[:2] == (0, "anna is \n")
    assert kv(*options, "--stop", "never", "--stop", "is", "--stream")[:2] == (0, "anna \n")
    for stop, message in (("", "expected strings of at least one character"), ("lamp?", "has '?', which no token")):
        status, stdout, stderr = kv(*options, "--stop", stop)
        assert (status, stdout, stderr.count("\n")) == (2, "", 1)
        assert message in stderr


@pytest.mark.slow
def test_generate_chats(shallow_model: str, tmp_path: Path) -> None:
    """The prompt is a user's message, which the checkpoint's template renders."""
    folder = tmp_path / "chat"
    shutil.copytree(shallow_model, folder)
    template = "{% for message in messages %}{{ message.content }} : {% endfor %}{{ place }} "
    template += "{% if add_generation_prompt %}the{% endif %}"
    (folder / "chat_template.jinja").write_text(template)
    options = ("--max-new-tokens", 4, "--json")

    def tokens(*arguments: object) -> list[int]:
        status, stdout, stderr = kv("generate", *arguments, *options)
        assert status == 0, stderr
        return json.loads(stdout)["tokens"]

    question = "what is the code of adam"
    assert tokens(folder, question, "--chat") == tokens(shallow_model, f"{question} : the")
    assert tokens(folder, question, "--chat", "--system", "recall") == tokens(
        shallow_model, f"recall : {question} : the"
    )
    given = ("--chat-template-kwargs", '{"place": "recall"}')
    assert tokens(folder, question, "--chat", *given) == tokens(shallow_model, f"{question} : recall the")
    for arguments, message in (
        (given, "--chat-template-kwargs without --chat"),
        (("--chat", "--chat-template-kwargs", "{"), "is not JSON"),
        (("--chat", "--chat-template-kwargs", "3"), "expected a JSON object"),
    ):
        status, _, stderr = kv("generate", folder, question, *arguments)
        assert (status, stderr.count("\n")) == (2, 1)
        assert message in stderr
    (folder / "chat_template.jinja").unlink()
    status, _, stderr = kv("generate", folder, question, "--chat")
    assert (status, stderr.count("\n")) == (2, 1)
    assert "the tokenizer has no chat template" in stderr
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no users') }}")
    status, _, stderr = kv("generate", folder, question, "--chat")
    assert (status, stderr) == (2, "kvjax: error: the tokenizer's chat template failed with TemplateError: no users\n")
    status, _, stderr = kv("generate", shallow_model, question, "--system", "recall")
    assert status == 2
    assert "--system 'recall' without --chat" in stderr


@pytest.mark.slow
def test_generate_on_a_mesh(shallow_model: str) -> None:
    options = ("generate", shallow_model, PROMPT, "--policy", "tova:budget=12", "--max-new-tokens", 4, "--json")
    one, several = (json.loads(kv(*options, *more)[1]) for more in ((), ("--mesh", "1x2")))
    assert one["tokens"] == several["tokens"]
    status, _, stderr = kv(*options, "--mesh", "2x1")
    assert status == 2
    assert "a batch of 1 row on a mesh of data=2" in stderr


@pytest.mark.slow
def test_generate_reads_a_file_samples_and_casts(shallow_model: str, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT)
    options = ("--sampler", "temperature=0.7,top_p=0.9", "--seed", 3, "--dtype", "bfloat16", "--chunk", 8, "--json")
    status, stdout, _ = kv("generate", shallow_model, "--prompt-file", file, "--max-new-tokens", 4, *options)
    assert status == 0
    params, words = kvjax.load(shallow_model, "bfloat16")
    sampler = kvjax.Sampler(temperature=0.7, top_p=0.9)
    expected = kvjax.generate(params, PROMPT, max_new_tokens=4, sampler=sampler, seed=3, chunk=8, tokenizer=words)
    assert json.loads(stdout)["tokens"] == expected.tokens[0, : expected.lengths[0]].tolist()


@pytest.mark.long
def test_the_checkpoints_sampler_is_the_default_and_info_shows_what_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder)
    said = {"do_sample": True, "temperature": 0.5, "eos_token_id": [2, 3], "no_repeat_ngram_size": 3}
    said |= {"suppress_tokens": [7], "begin_suppress_tokens": [8, 9]}
    (folder / "generation_config.json").write_text(json.dumps(said))
    for options, sampler in (((), "temperature=0.5"), (("--sampler", "greedy"), "greedy")):
        with pytest.warns(UserWarning, match="asks for no_repeat_ngram_size=3"):
            status, stdout, _ = kv("generate", str(folder), "a", "--max-new-tokens", "2", "--json", *options)
        assert (status, json.loads(stdout)["sampler"]) == (0, sampler)
    shown = json.loads(kv("info", str(folder), "--policy", "full", "--json")[1])
    assert (shown["end_tokens"], shown["sampler"]) == ([2, 3], "temperature=0.5")
    assert shown["not_applied"] == ["no_repeat_ngram_size=3"]
    assert shown["suppressed"] == {"always": [7], "first": [8, 9]}
    assert re.search("suppressed first +8, 9 ", kv("info", str(folder), "--policy", "full")[1])
