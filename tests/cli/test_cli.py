"""The command line: what commands print, and how they fail."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import kvjax
from kvjax.checks import bytes_text, counted
from kvjax.evaluation import answers
from kvjax.evaluation.answers import answer
from tests.cli.commands import PROMPT, kv


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["info", "/no/such/folder"], "no such folder"),
        (
            ["generate", "/no/such/folder", PROMPT],
            "no such folder: expected a folder with config.json and the weights, a",
        ),
        (
            ["info", "snapkv:budget=4"],
            "MODEL is 'snapkv:budget=4', a policy: expected a model, and the policy as --policy",
        ),
        (["info"], "Missing argument 'MODEL'"),
        (["generate", "MODEL", PROMPT, "--policy", "lru"], "unknown policy 'lru': expected one of"),
        (["generate", "MODEL", PROMPT, "--policy", "snapkv:size=3"], "snapkv has no option 'size'"),
        (["generate", "MODEL", PROMPT, "--policy", "snapkv:pool=sum"], "pool='sum': expected 'max' or 'avg'"),
        (
            ["generate", "MODEL", PROMPT, "--policy", "morphkv:budget=32"],
            "morphkv: a budget of 32 entries: expected 33",
        ),
        (["info", "MODEL", "--policy", "morphkv:budget=32"], "a budget of 32 entries: expected 33"),
        (["info", "MODEL", "--batch", "0"], "batch=0: expected an integer in 1 .. 2147483647"),
        (["info", "MODEL", "--mesh", "2"], "mesh '2': expected DATAxMODEL"),
        (["info", "MODEL", "--mesh", "1x3"], "model=3 does not fit 4 query heads, 2 kv heads"),
        (["info", "MODEL", "--mesh", "2x2", "--batch", "3"], "data=2 for a batch of 3: expected a divisor"),
        (["generate", "MODEL", PROMPT, "--sampler", "heat=1"], "'heat=1' in sampler"),
        (["generate", "MODEL", PROMPT, "--dtype", "int8"], "dtype 'int8' is not supported; accepted: float32"),
        (["info", "MODEL", "--dtype", "int8"], "dtype 'int8' is not supported; accepted: float32"),
        (["generate", "MODEL", PROMPT, "--max-new-tokens", "0"], "max_new_tokens=0: expected an integer in 1"),
        (["generate", "MODEL", PROMPT, "--max-new-tokens", "some"], "Invalid value for '--max-new-tokens'"),
        (["generate", "MODEL", PROMPT, "--chunk", "0"], "chunk=0: expected an integer in 1"),
        (["generate", "MODEL", PROMPT, "--json", "--stream"], "expected one of them"),
        (["generate", "MODEL", ""], "an empty prompt"),
        (["generate", "MODEL"], "PROMPT and --prompt-file: expected exactly one of them"),
        (["generate", "MODEL", "--prompt-file", "/no/such/file"], "/no/such/file does not exist: expected a file"),
        (["generate", "MODEL", "--prompt-file", "/dev"], "/dev is a folder: expected a file"),
        (["demo", "--out", "/dev/null"], "/dev/null is a file: expected a folder"),
        (["convert", "MODEL", "/dev/null/out", "--to", "hf"], "/dev/null is a file: expected a folder"),
        (["generate", "./dmo", PROMPT], "no such folder (did you mean demo?)"),
        (["generate", "MODEL", PROMPT, "--dtype", "flot32"], "; did you mean float32"),
        (["generate", "MODEL", PROMPT, "--sampler", "temprature=1"], "; did you mean temperature?"),
        (["eval", "--tasks", "demo/nedle"], "; did you mean demo/needle "),
        (["convert", "/no/such/folder", "no/such/place", "--to", "hf"], "no such folder"),
        (["convert", "MODEL", "/no/such/place", "--to", "gguf"], "Invalid value for '--to'"),
        (["convert", "MODEL", "/no/such/place", "--to", "hf", "--dtype", "int8"], "dtype 'int8' is not supported"),
        (["convert", "MODEL", "/dev/null", "--to", "hf"], "/dev/null is a file: expected a folder"),
        (["eval", "--config", "/no/such.yaml"], "/no/such.yaml does not exist: expected a file"),
        (["eval", "--model", "/no/such/folder"], "no such folder"),
        (["eval", "--model", "MODEL", "--tasks", "ruler/nothing"], "no task matches 'ruler/nothing'"),
        (
            ["eval", "--tasks", "math/*", "--dry-run"],
            "no task of the grid matches 'math/*': expected some of demo/needle",
        ),
        (["eval", "--workers", "2"], "--workers 2 without --ray: expected both"),
        pytest.param(
            ["eval", "--ray", "nowhere", "--tasks", "demo/needle"],
            "ray 'nowhere': expected local, auto or HOST:PORT",
            marks=pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed (the extra `ray`)"),
        ),
        (["inspect", "MODEL"], "--prompt and --prompt-file: expected exactly one of them"),
        (["inspect", "--prompt", ""], "an empty prompt"),
        (["inspect", "MODEL", "--prompt", PROMPT, "--policy", "lru"], "unknown policy 'lru'"),
        (
            ["inspect", "MODEL", "--prompt", PROMPT, "--max-new-tokens", "0"],
            "max_new_tokens=0: expected an integer in 1",
        ),
        (
            ["inspect", "--out", "/no/such/place/page.html"],
            "/no/such/place is not a folder; expected a file in an existing folder",
        ),
        (["inspect", "/no/such/folder", "--prompt", PROMPT], "no such folder"),
        (["demo", "--length", "12"], "Invalid value for '--length'"),
        (["demo", "--budget", "20"], "snapkv: a budget of 20 entries: expected 33 or more, which is window=32 + 1"),
    ],
)
def test_errors_are_a_line_on_stderr_and_status_2(model: str, arguments: list[str], message: str) -> None:
    status, stdout, stderr = kv(*(model if argument == "MODEL" else argument for argument in arguments))
    assert status == 2
    assert stdout == ""
    assert message in " ".join(stderr.replace("│", " ").split())
    assert "Traceback" not in stderr


def test_an_error_that_is_a_bug_is_not_hidden(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvjax, "generate", lambda *_, **__: np.zeros(2).reshape(3))
    with pytest.raises(ValueError, match="cannot reshape"):
        kv("generate", model, PROMPT)


@pytest.mark.slow
def test_positions_beyond_the_model_are_a_warning_in_a_line(model: str) -> None:
    code = "from kvjax.cli import main; main()"
    command = [sys.executable, "-c", code, "generate", model, "the " * 150, "--max-new-tokens", "1"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "kvjax: warning: the request reaches position 151" in result.stderr
    assert "UserWarning" not in result.stderr


@pytest.mark.long
def test_the_process_exits_with_status_2_and_no_traceback() -> None:
    command = [sys.executable, "-c", "from kvjax.cli import main; main()", "info", "/no/such/folder"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("kvjax: error: cannot load /no/such/folder: no such folder: expected a folder")
    assert result.stderr.count("\n") == 1


def test_version() -> None:
    try:
        expected = version("kvjax")
    except PackageNotFoundError:
        pytest.skip("kvjax is not installed, only on the path")
    assert kv("--version") == (0, f"kvjax {expected}\n", "")


def test_help() -> None:
    status, stdout, _ = kv("--help")
    assert status == 0
    assert all(command in stdout for command in ("generate", "info", "convert", "demo", "eval", "compare", "inspect"))


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (4096, "4.10 kB"),
        (29.6e6, "29.6 MB"),
        (122e6, "122 MB"),
        (999.9e6, "1.00 GB"),
        (4e12, "4.0 TB"),
    ],
)
def test_bytes_in_words(count: float, text: str) -> None:
    assert bytes_text(count) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0 rows"), (1, "1 row"), (1024, "1,024 rows")])
def test_things_are_counted_as_text(count: int, text: str) -> None:
    assert counted(count, "row") == text


@pytest.mark.long
def test_eval_says_what_it_would_do_does_it_and_goes_on(shallow_model: str, tmp_path: Path) -> None:
    config, out = tmp_path / "run.yaml", tmp_path / "out"
    config.write_text(
        "tasks: [{name: demo/*, lengths: [64]}]\nlimit: 2\npolicies: [full, 'tova:budget={budget}', {name: thirds, "
        "policy: 'adakv:base=h2o,base.budget=40,groups=3'}]\n"
        "budgets: [0.5]\nbatch: 2\n"
    )
    options = ("eval", "--config", config, "--model", shallow_model, "--out", out, "--tasks", "demo/n*")
    status, stdout, stderr = kv(*options, "--limit", 1, "--dry-run")
    assert (status, stderr, out.exists()) == (1, "", False)
    for text in (
        "demo/needles",
        "64 - 64 - 64",
        "│ tova ",
        "10 answers in total",
        "thirds after: groups=3 of 2 kv heads",
    ):
        assert text in stdout
    assert "demo/keys" not in stdout
    bare = tmp_path / "bare"  # a dry run needs no weights
    shutil.copytree(shallow_model, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    assert kv(*options, "--limit", 1, "--dry-run", "--model", bare) == (status, stdout, stderr)
    status, stdout, stderr = kv(*options, "--limit", 1)
    assert (status, stdout) == (1, "")
    assert f"10 of 10 answers are in {out / 'results.jsonl'}, 10 of them new" in stderr
    assert "kvjax: warning: not asked: thirds after: groups=3 of 2 kv heads" in stderr
    assert "1 errors:\n  thirds after: groups=3 of 2 kv heads: expected a divisor of 2" in stderr
    status, _, stderr = kv(*options)
    assert "20 of 20 answers are in" in stderr
    assert "10 of them new" in stderr
    assert json.loads((out / "run.json").read_text())["model"]["bytes_per_token"] == 2 * 1 * 2 * 8 * 4


def test_demo_answers_draws_and_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []

    def answering(*given, **options):
        results.append(answer(*given, **options))
        return results[-1]

    monkeypatch.setattr(answers, "answer", answering)
    command = sys.modules["kvjax.cli.demo"]  # the package has the function of the same name
    monkeypatch.setattr(command, "COMPRESSING", ("streaming_llm", "morphkv"))  # a policy takes five seconds to compile
    options = ("demo", "--length", 256, "--examples", 4, "--budget", 64, "--out", tmp_path / "new")
    status, stdout, stderr = kv(*options, "--json")
    assert (status, [line for line in stderr.splitlines() if line and " of 3 policies, at " not in line]) == (0, [])
    document = json.loads(stdout)
    full, *others = document["cells"]
    assert [cell["policy"] for cell in others] == ["streaming_llm", "morphkv"]
    assert full["accuracy"] >= 0.75
    assert all(cell["budget"] == 64 and cell["kv_bytes"] < full["kv_bytes"] for cell in others)
    assert all(len(cell["correct"]) == 4 for cell in document["cells"])
    assert all(
        right == (answer == document["example"]["answer"])
        for cell in document["cells"]
        for right, answer in [(cell["correct"][i], cell["answers"][i]) for i in [document["example"]["index"]]]
    )
    assert Path(document["picture"]).read_bytes().startswith(b"\x89PNG\r\n\x1a\n")

    again = iter(results)  # the same questions have the same answers
    monkeypatch.setattr(answers, "answer", lambda *given, **options: next(again))
    monkeypatch.setenv("COLUMNS", "80")
    for module in ("matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, module, None)
    Path(document["picture"]).unlink()
    status, stdout, stderr = kv(*options)
    assert status == 0
    assert max(map(len, stdout.splitlines())) <= 80
    assert "ends in a question" in stdout
    assert document["example"]["question"] in stdout
    assert stderr.strip().count("\n") == 0
    assert "matplotlib is not installed" in stderr
    assert not Path(document["picture"]).exists()
