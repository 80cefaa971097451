"""`kvjax info` and `kvjax inspect`: sizes, kernels, pages."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.cli.choices import CHOICES
from kvjax.cli.costs import left_out, presets, recommended
from kvjax.models import Decoder, config_from_hf
from kvjax.policies import PRESETS
from tests.cli.commands import PROMPT, kv
from tests.models.test_kinds_of_heads import two_kinds
from tests.models.test_readers import reading
from tests.tiny import decoder, hybrid, latents


def test_info_agrees_with_the_model_and_the_plan(model: str) -> None:
    options = ("info", model, "--policy", "full", "--policy", "snapkv:budget=40", "--batch", 3, "--length", 96)
    status, stdout, _ = kv(*options, "--max-new-tokens", 20, "--json")
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
    full, compressed = document["plans"]
    assert (full["compression"], compressed["compression"]) == (1, full["bytes"] / compressed["bytes"])
    assert [plan["bytes_per_row"] for plan in document["plans"]] == [plan["bytes"] // 3 for plan in document["plans"]]
    sizes = ("--max-prompt", 96, "--max-new-tokens", 20)
    asked = ("plan", model, "--policy", "full", "--policy", "snapkv:budget=40", *sizes, "--json")
    plans = json.loads(kv(*asked)[1])  # for this device's memory, as `info`
    assert plans["memory"] == document["memory"]
    assert [plan["rows"] for plan in plans["plans"]] == [plan["rows"] for plan in document["plans"]]


def test_recurrent_layers_are_counted(tmp_path: Path) -> None:
    """In the table, in JSON and in the bytes of a plan."""
    kvjax.save_hf(hybrid((2, 0, 1)), tmp_path / "model")
    document = json.loads(kv("info", tmp_path / "model", "--policy", "full", "--length", 64, "--json")[1])
    facts = {"key_heads": 2, "value_heads": 4, "key_dim": 8, "value_dim": 6, "taps": 4}
    assert (document["layers"], document["recurrence"]) == (3, {"before": [2, 0, 1]} | facts)
    states = 3 * 4 * (3 * (2 * 2 * 8 + 4 * 6) + 4 * 8 * 6)
    entries = kvjax.plan_cache(
        hybrid((2, 0, 1)).config, kvjax.policies.full(), batch=1, length=64, new_tokens=512, dtype="float32"
    ).entries
    assert document["plans"][0]["bytes"] == states + sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(entries))
    text = kv("info", tmp_path / "model", "--policy", "full")[1]
    assert "3 of 6 layers, with 4.32 kB of states per row" in " ".join(text.split())


@pytest.mark.long
def test_experts_are_counted(tmp_path: Path) -> None:
    """Of all experts in every layer that has them, in the table, in JSON and in the weights of a plan."""
    fields = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "mlp_only_layers": [0]}
    sizes = {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3}
    hf = {"model_type": "qwen3_moe", "num_attention_heads": 4, "num_key_value_heads": 2} | sizes | fields
    params = Decoder(config_from_hf(hf), nnx.Rngs(0))
    kvjax.save_hf(params, tmp_path / "model")
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert count > 2 * 6 * 3 * 16 * 20
    document = json.loads(kv("info", tmp_path / "model", "--policy", "full", "--json")[1])
    assert document["parameters"] == count
    facts = {"experts": 6, "per_token": 2, "size": 20, "normalized": False, "dense_layers": [0]}
    others = {"biased": False, "limit": None, "shared": None, "shared_gate": True, "sigmoid": None, "beside_mlp": False}
    assert document["experts"] == facts | others
    assert "6 of 20 columns, 2 per token, in 2 of 3 layers" in kv("info", tmp_path / "model", "--policy", "full")[1]
    plan = json.loads(kv("plan", tmp_path / "model", "--memory", "1GB", "--json")[1])
    assert plan["plans"][0]["weights"] == 4 * count


@pytest.mark.parametrize(
    ("fields", "facts", "shown"),
    [
        (
            {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2},
            (True, None),
            "a learned sink per query head",
        ),
        ({"model_type": "gemma2", "attn_logit_softcapping": 50.0}, (False, 50.0), "logits capped at 50"),
        ({"model_type": "llama"}, (False, None), None),
    ],
)
def test_what_changes_the_softmax_is_shown(
    tmp_path: Path, fields: dict, facts: tuple[bool, float | None], shown: str | None
) -> None:
    sizes = {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
    hf = fields | {"num_attention_heads": 4, "num_key_value_heads": 2} | sizes
    kvjax.save_hf(Decoder(config_from_hf(hf), nnx.Rngs(0)), tmp_path / "model")
    document = json.loads(kv("info", tmp_path / "model", "--policy", "full", "--json")[1])
    assert (document["attention_sinks"], document["attention_softcap"]) == facts
    text = kv("info", tmp_path / "model", "--policy", "full")[1]
    assert shown in text if shown else re.search("of 8 channels *$", text, re.MULTILINE)


def test_recommendations_are_those_of_the_page(model: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "guide" / "choosing.md").read_text()
    rows = re.findall(r"^\| (.+?) \| `(.+?)` \|", page, re.MULTILINE)
    assert rows == [tuple(choice) for choice in CHOICES]
    for choice in CHOICES:
        kvjax.policies.parse(choice.policy.format(budget=0.25))
    status, stdout, _ = kv("info", model, "--policy", "full", "--all")
    assert status == 0
    assert all(choice.policy in stdout for choice in CHOICES)
    document = json.loads(kv("info", model, "--policy", "full", "--json")[1])
    assert document["choices"] == [choice._asdict() for choice in CHOICES]


def test_a_preset_is_planned_or_left_out_with_a_reason() -> None:
    """Short prompts have budgets that some presets do not accept."""
    for length, missing in ((8192, {"d2o"}), (64, {"d2o", "dms", "epikv"})):
        config = decoder(windows=(None, None)).config
        texts, absent = presets(length, config), left_out(length, config)
        assert sorted([*(text.partition(":")[0] for text in texts), *absent]) == sorted(PRESETS)
        assert "rising:share=0.25" in texts  # the budget of its base would be printed, and not be used
        assert f"cam:budget={max(length // 4, 64)}" in texts
        assert missing | {"duo_attention", "headkv", "lukv", "per_layer"} <= absent.keys()
    assert absent["epikv"] == "epikv: a budget of 64 entries: expected 129 or more, which is recent=128 + every=1"
    assert absent["duo_attention"] == "its option gates= is of one model"


@pytest.mark.parametrize("command", ["info", "plan"])
def test_an_error_names_the_policy_that_does_not_suit(model: str, command: str) -> None:
    status, _, stderr = kv(command, model, "--policy", "full", "--policy", "duo_attention:sinks=1")
    assert status == 2
    assert stderr.startswith("kvjax: error: duo_attention:sinks=1: gates of 4 layers with 2 kv heads for a model of 2")


def test_what_reads_gates_is_not_recommended_to_models_that_have_none() -> None:
    """Readers and heads of several kinds have no gates and statistics, and latents no adapters."""
    networks, tokens = {"kvzap", "fastkvzip", "expected_attention_stats", "qfilter"}, {"lookaheadkv", "restorekv"}
    for config in (reading().config, two_kinds().config):
        assert networks | tokens <= left_out(8192, config).keys()
        assert not any(text.startswith("fastkvzip") for text in recommended(8192, config))
    assert "kvgrad" in left_out(8192, reading().config)
    absent = left_out(8192, latents().config)
    assert tokens <= absent.keys()
    assert not networks & absent.keys()


@pytest.mark.slow
def test_info_of_several_sizes_on_a_mesh(shallow_model: str) -> None:
    """The cache's own shards, on the devices of a mesh that is there, are what is planned for one that is not."""
    options = ("--batch", 2, "--batch", 4, "--length", 30, "--length", 90, "--max-new-tokens", 5, "--mesh", "2x4")
    status, stdout, _ = kv("info", shallow_model, *options, "--policy", "morphkv:budget=24,window=4", "--json")
    plans = json.loads(stdout)["plans"]
    assert status == 0
    assert [(plan["batch"], plan["length"]) for plan in plans] == [(2, 30), (2, 90), (4, 30), (4, 90)]
    params, _ = kvjax.load(shallow_model, mesh=kvjax.make_mesh(data=2, model=4))
    prompts, policy = np.ones((4, 30), np.int32), kvjax.policies.morphkv(budget=24, window=4)
    cache = kvjax.generate(params, prompts, policy=policy, max_new_tokens=5).cache
    held = [0] * jax.device_count()
    for array in jax.tree.leaves(cache.entries):
        for shard in array.addressable_shards:
            held[shard.device.id] += shard.data.nbytes
    assert held == [plans[2]["bytes_per_device"]] * 8
    status, stdout, _ = kv("info", shallow_model, "--mesh", "2x4", "--policy", "full")
    assert status == 0
    assert "on 8 devices, data=2 x model=4" in stdout


def test_info_says_which_kernels_run_and_why(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attention = {f"{what}_attention" for what in ("prompt", "scored", "segment", "slot")}
    operations = attention | {"grouped_product", "lowest_tokens", "top_tokens", "window_scores", "write_rows"}
    kernels = json.loads(kv("info", model, "--policy", "full", "--json")[1])["kernels"]
    assert kernels.keys() == operations
    assert {name for name, kernel in kernels.items() if kernel["name"] == "xla"} == operations - {"write_rows"}
    monkeypatch.setenv("KVJAX_KERNELS", "reference")
    status, stdout, _ = kv("info", model, "--policy", "full", "--all")
    assert status == 0
    assert stdout.count("KVJAX_KERNELS asks for it") == len(operations)
    assert re.search("^kernels +reference *$", kv("info", model, "--policy", "full")[1], re.MULTILINE)


@pytest.mark.long
def test_inspect_writes_a_page(shallow_model: str, tmp_path: Path) -> None:
    file, out = tmp_path / "prompt.txt", tmp_path / "page.html"
    file.write_text(PROMPT)
    options = ("--policy", "tova:budget=12", "--max-new-tokens", 4, "--out", out)
    status, stdout, stderr = kv("inspect", shallow_model, "--prompt-file", file, *options)
    assert (status, stdout) == (0, "")
    assert f"15 prompt tokens, 4 generated tokens; open {out} in a browser" in stderr
    text = out.read_text()
    assert all(fact in text for fact in ('"policy":"tova:budget=12"', '"prompt":15,', '"steps":3'))
    status, stdout, stderr = kv("inspect", shallow_model, "--prompt-file", file, *options)
    assert (status, stdout) == (2, "")
    assert stderr == f"kvjax: error: {out} exists: expected a file that does not, or --overwrite\n"
    out.write_text("old")
    assert kv("inspect", shallow_model, "--prompt-file", file, *options, "--overwrite")[0] == 0
    assert '"policy":"tova:budget=12"' in out.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["d2o:budget=12,layer_budgets=False", "dynamickv:budget=12,window=4"])
def test_inspect_on_a_mesh(shallow_model: str, tmp_path: Path, policy: str) -> None:
    pages = []
    for mesh in ("1x1", "1x2"):
        out = tmp_path / f"{mesh}.html"
        options = ("--policy", policy, "--max-new-tokens", 6, "--sampler", "temperature=0.8", "--seed", 3)
        status, _, stderr = kv("inspect", shallow_model, "--prompt", PROMPT, *options, "--mesh", mesh, "--out", out)
        assert status == 0, stderr
        pages.append(out.read_text())
    assert pages[0] == pages[1]


@pytest.mark.long
@pytest.mark.parametrize("command", ["info", "plan"])
def test_the_cost_fits_on_one_screen(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer about `full` and each recommended policy, in 24 lines of 80 columns, none of which is folded."""
    monkeypatch.setenv("COLUMNS", "80")
    status, stdout, _ = kv(command, "demo")
    assert status == 0
    lines = stdout.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    budget = {"info": 2560, "plan": 8192}[command] // 4
    for policy in ("full", *(choice.policy.format(budget=budget) for choice in CHOICES)):
        assert sum(line.strip().startswith(f"{policy} ") for line in lines) == 1
    assert json.loads(kv(command, "demo", "--json")[1])["plans"]


def test_the_plan_begins_with_the_answer(model: str) -> None:
    policies = ("--policy", "full", "--policy", "morphkv:budget=40", "--policy", "snapkv:budget=60")
    status, stdout, _ = kv("plan", model, "--memory", "1MB", *policies, "--max-prompt", 96, "--max-new-tokens", 20)
    assert status == 0
    rows = [plan["rows"] for plan in json.loads(kv("plan", model, "--memory", "1MB", *policies, "--json")[1])["plans"]]
    assert len(rows) == 3
    assert re.match(r"1.00 MB hold, beside [\d.]+ kB of weights, rows of 96 \+ 20 tokens:\n", stdout)
    first, best = re.findall(r"^  ([\d,]+) rows, ([\d,]+) tokens, under (\S+)$", stdout, re.MULTILINE)
    assert (first[2], best[2]) == ("full", "morphkv:budget=40")
    for found in (first, best):
        assert int(found[1].replace(",", "")) == 116 * int(found[0].replace(",", ""))


@pytest.mark.long
@pytest.mark.parametrize("columns", [60, 80, 120])
def test_info_prints_tables_that_fit(model: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    status, stdout, _ = kv("info", model, "--dtype", "bfloat16", "--all")
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

    def download(name: str, allow_patterns: list[str], tqdm_class: type) -> str:
        bar = tqdm_class(total=0, unit="B", desc="Reconstructing", unit_scale=True)
        bar.total += 10
        bar.update(4)
        asked.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    status, stdout, _ = kv("info", "some/model", "--json")
    assert (status, asked) == (0, [("some/model", ["config.json", "generation_config.json"])])
    assert json.loads(stdout)["parameters"] > 0


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        (("info", "--length", 129), "a prompt reaches position 129 and the model was trained for 128"),
        (("info", "--length", 128), ""),
        (
            ("plan", "--max-prompt", 120, "--max-new-tokens", 9, "--memory", "1GB"),
            "requests may reach position 129 and the model was",
        ),
        (("plan", "--max-prompt", 120, "--max-new-tokens", 8, "--memory", "1GB"), ""),
    ],
)
def test_lengths_beyond_the_positions_of_the_model(model: str, options: tuple[str, ...], warned: str) -> None:
    command, *more = options
    status, _, stderr = kv(command, model, "--policy", "full", *more)
    assert status == 0
    assert ("warning" in stderr) == bool(warned)
    assert warned in stderr
