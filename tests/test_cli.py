"""The command line: what commands print, and how they fail."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from typer.testing import CliRunner

import kvjax
from kvjax.cli import app
from kvjax.cli.console import bytes_text
from kvjax.evaluation.tasks.vocabulary import WORDS, tokenizer
from kvjax.models import Decoder, DecoderConfig, Rope

PROMPT = "the code of adam is sword . recall what the code of adam is :"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tiny random model that speaks the demo's words."""
    config = DecoderConfig("llama", len(WORDS), 16, 16, 4, 2, 8, (None, None), Rope(1e4), 128)
    folder = tmp_path_factory.mktemp("model")
    kvjax.save_hf(Decoder(config, nnx.Rngs(0)), folder, tokenizer())
    return str(folder)


@pytest.fixture(autouse=True)
def _no_cache_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")


def kv(*arguments: object) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a command. An error that is not expected is raised here."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.slow
def test_generate_prints_what_the_library_answers(model: str) -> None:
    params, words = kvjax.load(model)
    policy = kvjax.policies.parse("morphkv:budget=12,window=4")
    expected = kvjax.generate(params, PROMPT, policy=policy, max_new_tokens=6, tokenizer=words)
    assert expected.text is not None
    options = ("generate", model, PROMPT, "--policy", "morphkv:budget=12,window=4", "--max-new-tokens", 6)
    status, stdout, stderr = kv(*options)
    assert (status, stdout) == (0, expected.text[0] + "\n")
    assert "15 tokens read" in stderr
    status, stdout, _ = kv(*options, "--stream")
    assert (status, stdout) == (0, expected.text[0] + "\n")
    status, stdout, stderr = kv(*options, "--json")
    document = json.loads(stdout)
    assert (status, stderr) == (0, "")
    assert document["text"] == expected.text[0]
    assert document["tokens"] == expected.tokens[0, : expected.lengths[0]].tolist()
    assert document["cache_bytes"] == expected.cache.nbytes
    assert document["prompt_tokens"] == 15


@pytest.mark.slow
def test_generate_chats(model: str, tmp_path: Path) -> None:
    """The prompt is a user's message, which the checkpoint's template renders."""
    folder = tmp_path / "chat"
    shutil.copytree(model, folder)
    template = (
        "{% for message in messages %}{{ message.content }} : {% endfor %}{% if add_generation_prompt %}the{% endif %}"
    )
    (folder / "chat_template.jinja").write_text(template)
    options = ("--max-new-tokens", 4, "--json")

    def tokens(*arguments: object) -> list[int]:
        status, stdout, stderr = kv("generate", *arguments, *options)
        assert status == 0, stderr
        return json.loads(stdout)["tokens"]

    question = "what is the code of adam"
    assert tokens(folder, question, "--chat") == tokens(model, f"{question} : the")
    assert tokens(folder, question, "--chat", "--system", "recall") == tokens(model, f"recall : {question} : the")
    status, _, stderr = kv("generate", model, question, "--chat")
    assert (status, stderr.count("\n")) == (2, 1)
    assert "the tokenizer has no chat template" in stderr
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no users') }}")
    status, _, stderr = kv("generate", folder, question, "--chat")
    assert (status, stderr) == (2, "kvjax: error: the tokenizer's chat template failed with TemplateError: no users\n")
    status, _, stderr = kv("generate", model, question, "--system", "recall")
    assert status == 2
    assert "--system 'recall' without --chat" in stderr


@pytest.mark.slow
def test_generate_on_a_mesh(model: str) -> None:
    options = ("generate", model, PROMPT, "--policy", "tova:budget=12", "--max-new-tokens", 4, "--json")
    one, several = (json.loads(kv(*options, *more)[1]) for more in ((), ("--mesh", "1x2")))
    assert one["tokens"] == several["tokens"]
    status, _, stderr = kv(*options, "--mesh", "2x1")
    assert status == 2
    assert "a batch of 1 rows on a mesh of data=2" in stderr


@pytest.mark.slow
def test_generate_reads_a_file_samples_and_casts(model: str, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT)
    options = ("--sampler", "temperature=0.7,top_p=0.9", "--seed", 3, "--dtype", "bfloat16", "--chunk", 8, "--json")
    status, stdout, _ = kv("generate", model, "--prompt-file", file, "--max-new-tokens", 4, *options)
    assert status == 0
    params, words = kvjax.load(model, "bfloat16")
    sampler = kvjax.Sampler(temperature=0.7, top_p=0.9)
    expected = kvjax.generate(params, PROMPT, max_new_tokens=4, sampler=sampler, seed=3, chunk=8, tokenizer=words)
    assert json.loads(stdout)["tokens"] == expected.tokens[0, : expected.lengths[0]].tolist()


def test_info_agrees_with_the_model_and_the_plan(model: str) -> None:
    options = ("info", model, "--policy", "full", "--policy", "snapkv:budget=40", "--batch", 3, "--length", 96)
    status, stdout, _ = kv(*options, "--new-tokens", 20, "--json")
    document = json.loads(stdout)
    params, _ = kvjax.load(model)
    assert status == 0
    assert document["parameters"] == sum(leaf.size for leaf in nnx.to_flat_state(nnx.state(params)).leaves)
    assert document["stored"] == ["float32"]
    assert document["kv_bytes_per_token"] == 2 * 2 * 2 * 8 * 4
    assert [plan["policy"] for plan in document["plans"]] == ["full", "snapkv:budget=40"]
    policy = kvjax.policies.snapkv(budget=40)
    planned = kvjax.plan_cache(params.config, policy, batch=3, length=96, new_tokens=20, dtype="float32")
    assert document["plans"][1]["bytes"] == planned.nbytes
    assert document["plans"][1]["slots"] == [104, 104]


@pytest.mark.slow
def test_info_of_several_sizes_on_a_mesh(model: str) -> None:
    """The cache's own shards, on the devices of a mesh that is there, are what is planned for one that is not."""
    options = ("--batch", 2, "--batch", 4, "--length", 30, "--length", 90, "--new-tokens", 5, "--mesh", "2x4")
    status, stdout, _ = kv("info", model, *options, "--policy", "morphkv:budget=24,window=4", "--json")
    plans = json.loads(stdout)["plans"]
    assert status == 0
    assert [(plan["batch"], plan["length"]) for plan in plans] == [(2, 30), (2, 90), (4, 30), (4, 90)]
    params, _ = kvjax.load(model, mesh=kvjax.make_mesh(data=2, model=4))
    prompts, policy = np.ones((4, 30), np.int32), kvjax.policies.morphkv(budget=24, window=4)
    cache = kvjax.generate(params, prompts, policy=policy, max_new_tokens=5).cache
    held = [0] * jax.device_count()
    for array in jax.tree.leaves(cache.entries):
        for shard in array.addressable_shards:
            held[shard.device.id] += shard.data.nbytes
    assert held == [plans[2]["bytes_per_device"]] * 8
    status, stdout, _ = kv("info", model, "--mesh", "2x4", "--policy", "full")
    assert status == 0
    assert "on 8 devices, data=2 x model=4" in stdout


def test_info_says_which_kernels_run_and_why(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    operations = {"prompt_attention", "segment_attention", "slot_attention", "top_tokens", "window_scores"}
    kernels = json.loads(kv("info", model, "--policy", "full", "--json")[1])["kernels"]
    assert kernels.keys() == operations
    assert {kernel["name"] for kernel in kernels.values()} == {"reference"}
    monkeypatch.setenv("KVJAX_KERNELS", "reference")
    status, stdout, _ = kv("info", model, "--policy", "full")
    assert status == 0
    assert stdout.count("KVJAX_KERNELS asks for it") == len(operations)


def test_inspect_writes_a_page(model: str, tmp_path: Path) -> None:
    file, out = tmp_path / "prompt.txt", tmp_path / "page.html"
    file.write_text(PROMPT)
    options = ("--policy", "tova:budget=12", "--new-tokens", 4, "--out", out)
    status, stdout, stderr = kv("inspect", model, "--prompt-file", file, *options)
    assert (status, stdout) == (0, "")
    assert f"15 prompt tokens, 4 generated tokens; open {out} in a browser" in stderr
    assert '"policy":"tova:budget=12","prompt":15,"steps":3,' in out.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["d2o:budget=12,layer_budgets=False", "dynamickv:budget=12,window=4"])
def test_inspect_on_a_mesh(model: str, tmp_path: Path, policy: str) -> None:
    pages = []
    for mesh in ("1x1", "1x2"):
        out = tmp_path / f"{mesh}.html"
        options = ("--policy", policy, "--new-tokens", 6, "--sampler", "temperature=0.8", "--seed", 3, "--mesh", mesh)
        status, _, stderr = kv("inspect", model, "--prompt", PROMPT, *options, "--out", out)
        assert status == 0, stderr
        pages.append(out.read_text())
    assert pages[0] == pages[1]


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_info_prints_a_table_that_fits(model: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    status, stdout, _ = kv("info", model, "--dtype", "bfloat16")
    assert status == 0
    assert max(map(len, stdout.splitlines())) <= columns
    for text in ("4 query, 2 kv, of 8 channels", "128 B per token in bfloat16", "streaming_llm", "morphkv"):
        assert text in stdout


def test_info_reads_no_weights(model: str, tmp_path: Path) -> None:
    """A folder with nothing but a config has the same parameters, and truncated weights are noticed by their header."""
    (tmp_path / "config.json").write_bytes((Path(model) / "config.json").read_bytes())
    with_weights, without = (json.loads(kv("info", folder, "--json")[1]) for folder in (model, tmp_path))
    assert with_weights | {"path": ""} == without | {"path": ""}
    (tmp_path / "model.safetensors").write_bytes(b"too short")
    status, _, stderr = kv("info", tmp_path)
    assert status == 2
    assert "truncated" in stderr


def test_info_downloads_the_config_only(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_bytes((Path(model) / "config.json").read_bytes())
    asked: list[object] = []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    status, stdout, _ = kv("info", "some/model", "--json")
    assert (status, asked) == (0, [("some/model", ["config.json"])])
    assert json.loads(stdout)["parameters"] > 0


@pytest.mark.slow
def test_convert_to_orbax_and_back(model: str, tmp_path: Path) -> None:
    (Path(model) / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    saved, again = tmp_path / "saved", tmp_path / "again"
    status, stdout, stderr = kv("convert", model, saved, "--to", "orbax", "--dtype", "bfloat16")
    params, _ = kvjax.load(model, "bfloat16")
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert (status, stdout) == (0, "")
    assert f"{bytes_text(size)} in bfloat16; the conversion needs about" in stderr
    status, stdout, stderr = kv("convert", saved, again, "--to", "hf", "--json")
    document = json.loads(stdout)
    assert (status, stderr) == (0, "")
    assert (document["from"], document["to"], document["dtype"]) == ("orbax", "hf", "bfloat16")
    assert (document["source"], document["out"]) == (str(saved), str(again))
    assert (document["parameters"], document["parameter_bytes"]) == (size // 2, size)
    assert document["peak_bytes"] > size
    for converted, words in (kvjax.restore(saved), kvjax.load(again)):
        assert words is not None
        assert converted.config == params.config
        for ours, theirs in zip(jax.tree.leaves(converted), jax.tree.leaves(params), strict=True):
            assert ours.dtype == theirs.dtype
            np.testing.assert_array_equal(ours, theirs)
    assert json.loads((again / "generation_config.json").read_text()) == {"eos_token_id": [1, 2]}
    answers = [kv("generate", folder, PROMPT, "--max-new-tokens", 3)[:2] for folder in (saved, again)]
    assert answers[0] == answers[1]
    assert answers[0][0] == 0


def test_convert_replaces_what_it_is_told_to(model: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert kv("convert", model, out, "--to", "orbax")[0] == 0
    status, _, stderr = kv("convert", model, out, "--to", "hf")
    assert status == 2
    assert "out is not empty; overwrite=True (--overwrite) replaces the weights" in stderr
    assert kv("convert", model, out, "--to", "hf", "--overwrite")[0] == 0
    assert not (out / "params").exists()
    kvjax.load(out)
    status, _, stderr = kv("convert", out, out, "--to", "orbax", "--overwrite")
    assert status == 2
    assert "out is what is to be converted: expected another folder" in stderr


def test_convert_reads_no_weights_that_are_pickled(model: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((Path(model) / "config.json").read_bytes())
    (tmp_path / "pytorch_model.bin").touch()
    status, stdout, stderr = kv("convert", tmp_path, tmp_path / "out", "--to", "hf", "--json")
    assert (status, stdout) == (2, "")
    assert "its weights are pickled (pytorch_model.bin)" in stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["info", "/no/such/folder"], "no such folder"),
        (["generate", "/no/such/folder", PROMPT], "no such folder"),
        (["generate", "MODEL", PROMPT, "--policy", "lru"], "unknown policy 'lru': expected adakv, cam"),
        (["generate", "MODEL", PROMPT, "--policy", "snapkv:size=3"], "snapkv has no option 'size'"),
        (["generate", "MODEL", PROMPT, "--policy", "snapkv:pool=sum"], "pool='sum': expected 'max' or 'avg'"),
        (["generate", "MODEL", PROMPT, "--policy", "morphkv:budget=32"], "expected a budget of 33 or more"),
        (["info", "MODEL", "--policy", "morphkv:budget=32"], "expected a budget of 33 or more"),
        (["info", "MODEL", "--batch", "0"], "batch=0: expected an integer >= 1"),
        (["info", "MODEL", "--mesh", "2"], "mesh '2': expected DATAxMODEL"),
        (["info", "MODEL", "--mesh", "1x3"], "model=3 does not fit 4 query heads, 2 kv heads"),
        (["info", "MODEL", "--mesh", "2x2", "--batch", "3"], "data=2 for a batch of 3: expected a divisor"),
        (["generate", "MODEL", PROMPT, "--sampler", "heat=1"], "'heat=1' in sampler"),
        (["generate", "MODEL", PROMPT, "--dtype", "int8"], "dtype 'int8' is not supported; accepted: float32"),
        (["info", "MODEL", "--dtype", "int8"], "dtype 'int8' is not supported; accepted: float32"),
        (["generate", "MODEL", PROMPT, "--max-new-tokens", "0"], "max_new_tokens=0: expected an integer in 1"),
        (["generate", "MODEL", PROMPT, "--max-new-tokens", "some"], "Invalid value for '--max-new-tokens'"),
        (["generate", "MODEL", PROMPT, "--chunk", "0"], "chunk=0: expected a number of tokens >= 1"),
        (["generate", "MODEL", PROMPT, "--json", "--stream"], "expected one of them"),
        (["generate", "MODEL", ""], "an empty prompt"),
        (["generate", "MODEL"], "PROMPT and --prompt-file: expected exactly one of them"),
        (["generate", "MODEL", "--prompt-file", "/no/such/file"], "No such file or directory: '/no/such/file'"),
        (["convert", "/no/such/folder", "/no/such/place", "--to", "hf"], "no such folder"),
        (["convert", "MODEL", "/no/such/place", "--to", "gguf"], "Invalid value for '--to'"),
        (["convert", "MODEL", "/no/such/place", "--to", "hf", "--dtype", "int8"], "dtype 'int8' is not supported"),
        (["convert", "MODEL", "/dev/null", "--to", "hf"], "/dev/null is a file: expected a folder"),
        (["eval", "--config", "/no/such.yaml"], "No such file or directory: '/no/such.yaml'"),
        (["eval", "--model", "/no/such/folder"], "no such folder"),
        (["eval", "--model", "MODEL", "--tasks", "ruler/nothing"], "no task matches 'ruler/nothing'"),
        (["eval", "--model", "MODEL", "--host", "2/2"], "host '2/2': expected I/N"),
        (["inspect", "MODEL"], "--prompt and --prompt-file: expected exactly one of them"),
        (["inspect", "--prompt", ""], "an empty prompt"),
        (["inspect", "MODEL", "--prompt", PROMPT, "--policy", "lru"], "unknown policy 'lru'"),
        (
            ["inspect", "MODEL", "--prompt", PROMPT, "--new-tokens", "0"],
            "max_new_tokens=0: expected an integer in 1",
        ),
        (
            ["inspect", "--out", "/no/such/place/page.html"],
            "/no/such/place is not a folder; expected a file in an existing folder",
        ),
        (["inspect", "/no/such/folder", "--prompt", PROMPT], "no such folder"),
        (["demo", "--length", "12"], "Invalid value for '--length'"),
        (["demo", "--budget", "20"], "expected a budget of 33 or more"),
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


def test_positions_beyond_the_model_are_a_warning_in_a_line(model: str) -> None:
    code = "from kvjax.cli import main; main()"
    command = [sys.executable, "-c", code, "generate", model, "the " * 150, "--max-new-tokens", "1"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "kvjax: warning: the request reaches position 151" in result.stderr
    assert "UserWarning" not in result.stderr


def test_the_process_exits_with_status_2_and_no_traceback() -> None:
    command = [sys.executable, "-c", "from kvjax.cli import main; main()", "info", "/no/such/folder"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "kvjax: error: cannot load /no/such/folder: no such folder\n"


def test_version() -> None:
    try:
        expected = version("kvjax")
    except PackageNotFoundError:
        pytest.skip("kvjax is not installed, only on the path")
    assert kv("--version") == (0, f"kvjax {expected}\n", "")


def test_help() -> None:
    status, stdout, _ = kv("--help")
    assert status == 0
    assert all(command in stdout for command in ("generate", "info", "convert", "demo", "eval", "inspect"))


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


@pytest.mark.slow
def test_eval_says_what_it_would_do_does_it_and_goes_on(model: str, tmp_path: Path) -> None:
    config, out = tmp_path / "run.yaml", tmp_path / "out"
    config.write_text(
        "tasks: [{name: demo/*, lengths: [64]}]\nlimit: 2\npolicies: [full, 'tova:budget={budget}', 'lru']\n"
        "budgets: [0.5]\nbatch: 2\n"
    )
    options = ("eval", "--config", config, "--model", model, "--out", out, "--tasks", "demo/n*")
    status, stdout, stderr = kv(*options, "--limit", 1, "--dry-run")
    assert (status, stderr, out.exists()) == (1, "", False)
    for text in (
        "demo/needles",
        "64 - 64 - 64",
        "│ tova ",
        "10 answers in total",
        "lru after: unknown policy",
    ):
        assert text in stdout
    assert "demo/keys" not in stdout
    bare = tmp_path / "bare"  # a dry run needs no weights
    shutil.copytree(model, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    assert kv(*options, "--limit", 1, "--dry-run", "--model", bare) == (status, stdout, stderr)
    status, stdout, stderr = kv(*options, "--limit", 1)
    assert (status, stdout) == (1, "")
    assert f"10 of 10 answers are in {out / 'results.jsonl'}, 10 of them new" in stderr
    assert "1 errors:\n  lru after: unknown policy 'lru': expected adakv" in stderr
    status, _, stderr = kv(*options)
    assert "20 of 20 answers are in" in stderr
    assert "10 of them new" in stderr
    assert json.loads((out / "run.json").read_text())["model"]["bytes_per_token"] == 2 * 2 * 2 * 8 * 4


@pytest.mark.slow
def test_demo_answers_draws_and_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("demo", "--length", 256, "--examples", 4, "--budget", 64, "--out", tmp_path / "new")
    status, stdout, stderr = kv(*options, "--json")
    assert (status, stderr) == (0, "")
    document = json.loads(stdout)
    full, *others = document["cells"]
    assert [cell["policy"] for cell in others] == ["streaming_llm", "h2o", "tova", "snapkv", "morphkv"]
    assert full["accuracy"] >= 0.75
    assert all(cell["budget"] == 64 and cell["kv_bytes"] < full["kv_bytes"] for cell in others)
    assert all(len(cell["correct"]) == 4 for cell in document["cells"])
    assert all(
        right == (answer == document["example"]["answer"])
        for cell in document["cells"]
        for right, answer in [(cell["correct"][i], cell["answers"][i]) for i in [document["example"]["index"]]]
    )
    assert Path(document["picture"]).read_bytes().startswith(b"\x89PNG\r\n\x1a\n")

    monkeypatch.setenv("COLUMNS", "80")
    for module in ("matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, module, None)
    Path(document["picture"]).unlink()
    status, stdout, stderr = kv(*options)
    assert status == 0
    assert max(map(len, stdout.splitlines())) <= 80
    assert "ends in a question" in stdout
    assert document["example"]["question"] in stdout
    assert stderr.count("\n") == 1
    assert "matplotlib is not installed" in stderr
    assert not Path(document["picture"]).exists()
