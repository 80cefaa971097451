"""`--json`: one document on stdout, whose fields programs may rely on, and 80 columns for people."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from kvjax.cli import app
from kvjax.cli.console import show_warning
from tests.cli.commands import PROMPT, kv

COMMANDS: Any = get_command(app)
TALKS = {"chat", "serve"}  # commands that answer people and clients until they are ended
SIZES = ("--batches", 1, "--length", 16)
GATES = ("--method", "kvzap", "--steps", 1, "--length", 16, "--inner", 4)
ARGUMENTS: dict[str, tuple[object, ...]] = {
    "generate": ("MODEL", PROMPT, "--max-new-tokens", 2),
    "info": ("MODEL", "--policy", "full"),
    "plan": ("MODEL", "--policy", "full"),
    "convert": ("MODEL", "OUT", "--to", "orbax"),
    "inspect": ("MODEL", "--prompt", PROMPT, "--policy", "tova:budget=8", "--max-new-tokens", 2, "--out", "OUT"),
    "measure-statistics": ("MODEL", "--data", "TEXT", "--out", "OUT", *SIZES),
    "train-gates": ("MODEL", "--data", "TEXT", "--out", "OUT", *GATES),
    "eval": ("--config", "GRID", "--out", "OUT"),
    "report": ("RUN",),
    "compare": ("MODEL", "--policy", "streaming_llm:budget=8", "--tasks", "QUESTIONS", "--max-new-tokens", 2),
    "demo": ("--length", 256, "--examples", 1, "--budget", 48, "--out", "OUT"),
}
FIELDS = {
    "generate": "model policy sampler seed text tokens prompt_tokens decoded_tokens prefill_seconds decode_seconds "
    "compile_seconds cache_bytes full_cache_bytes decode_tokens_per_second compression_ratio",
    "info": "path family parameters stored layers hidden_size query_heads kv_heads head_dim window_heads "
    "attention_sinks attention_softcap experts latent recurrence readers vocabulary rope windows max_positions "
    "end_tokens bos_token pad_token sampler suppressed not_applied cache_dtype kv_bytes_per_token new_tokens "
    "mesh memory plans left_out choices kernels",
    "plan": "path memory dtype max_prompt max_new_tokens chunk plans rows_of_each",
    "convert": "source from out to dtype parameters parameter_bytes peak_bytes seconds",
    "inspect": "model policy page prompt_tokens generated_tokens retained",
    "measure-statistics": "model data out tokens statistics",
    "train-gates": "model data out method steps loss",
    "eval": "results answers planned new errors",
    "report": "report leaderboard models",
    "compare": "model tasks texts questions score against policies out picture",
    "demo": "model length examples seed tasks cells example picture seconds",
}
SLOW = {"demo", "eval", "report", "compare", "train-gates", "measure-statistics"}


@pytest.fixture
def places(shallow_model: str, tmp_path: Path) -> dict[object, object]:
    """What the names in capitals stand for."""
    (tmp_path / "text.txt").write_text("the code of adam is sword . the baker trusts . " * 9)
    grid = f"{{model: {shallow_model}, tasks: [{{name: demo/needle, lengths: [64]}}], policies: [full], limit: 1}}"
    (tmp_path / "grid.yaml").write_text(grid)
    asked = {"context": PROMPT, "question": "what is the code of adam", "answers": ["sword"]}
    (tmp_path / "questions.jsonl").write_text(json.dumps(asked) + "\n")
    names = {"OUT": "out", "TEXT": "text.txt", "GRID": "grid.yaml", "QUESTIONS": "questions.jsonl", "RUN": "run"}
    return {"MODEL": shallow_model} | {name: tmp_path / file for name, file in names.items()}


def test_all_commands_are_here() -> None:
    assert ARGUMENTS.keys() == FIELDS.keys() == COMMANDS.commands.keys() - TALKS
    for name, command in COMMANDS.commands.items():
        assert any("--json" in parameter.opts for parameter in command.params) == (name in FIELDS)


@pytest.mark.parametrize(
    "command", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in ARGUMENTS]
)
def test_json_is_one_document_with_these_fields(command: str, places: dict[object, object]) -> None:
    if command == "report":
        assert kv("eval", "--config", places["GRID"], "--out", places["RUN"])[0] == 0
    status, stdout, stderr = kv(command, *(places.get(given, given) for given in ARGUMENTS[command]), "--json")
    assert (status, [line for line in stderr.splitlines() if "warning: " not in line]) == (0, [])
    assert list(json.loads(stdout)) == FIELDS[command].split()


def test_a_plan_of_an_evaluation_is_json_too(places: dict[object, object]) -> None:
    status, stdout, _ = kv("eval", "--config", places["GRID"], "--dry-run", "--json")
    plan = json.loads(stdout)
    assert (status, list(plan)) == (0, ["model", "tasks", "policies", "errors"])
    assert plan["tasks"] == [{"task": "demo/needle", "length": 64, "examples": 1}]
    assert [policy["policy"] for policy in plan["policies"]] == ["full"]


@pytest.mark.parametrize("command", COMMANDS.commands)
def test_help_fits_80_columns(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    status, stdout, _ = kv(command, "--help")
    assert status == 0
    assert max(map(len, stdout.splitlines())) <= 80


def test_a_plan_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    status, stdout, _ = kv("eval", "--dry-run")
    assert status == 0
    assert max(map(len, stdout.splitlines())) <= 80


def test_errors_are_wrapped_on_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    name = "x" * 100
    text = f"kvjax: warning: {name}: expected a folder that holds config.json and the weights, or a GGUF file"
    show_warning(text.removeprefix("kvjax: warning: "))
    assert capsys.readouterr().err == f"{text}\n"
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    show_warning(text.removeprefix("kvjax: warning: "))
    lines = capsys.readouterr().err.splitlines()
    assert [len(line) <= 80 or name in line for line in lines] == [True] * len(lines)
    assert " ".join(line.strip() for line in lines) == text
