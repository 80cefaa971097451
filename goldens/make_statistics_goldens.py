"""Makes tests/golden/<model>_statistics.npz: statistics of queries, and the entries that kvpress retains by them.

tests/golden/README.md describes the format. The script runs in the environment of `make_goldens.py`, on the
models of tests/golden:

    .venv-kvpress/bin/python -m goldens.make_statistics_goldens

kvpress would download the statistics of large models. Here they are measured on the tiny models, from the queries that
kvpress captures.
"""

from __future__ import annotations

import argparse
import importlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import kvpress
import numpy as np
import torch
from kvpress.presses.expected_attention_with_stats import ExpectedAttentionStatsPress, patch_rotary_embedding
from transformers import PreTrainedModel

from goldens.golden_models import MODELS, VOCABULARY, TinyModel
from goldens.golden_presses import described
from goldens.make_goldens import LEAST_MARGIN, PACKAGES, PROMPT_LENGTH, margin, positions, run

TEXTS, LENGTH, SINKS = 3, 80, 4
SEEDS = {
    "llama_group1": 1,
    "llama_group4": 1,
    "llama_group7": 2,
    "mistral": 1,
}  # of texts and prompts that do not nearly tie


class GivenFilters(kvpress.QFilterPress):
    """Q-Filters with the filters that are set. The press itself would download those of a large model."""

    q_filters: Any

    def post_init_from_model(self, model: PreTrainedModel) -> None:
        self.q_filters = self.q_filters.to(model.dtype)


PRESSES: dict[str, kvpress.BasePress] = {
    "qfilter_r50": GivenFilters(0.5),
    "qfilter_r75": GivenFilters(0.75),
    "expected_attention_stats_r75": ExpectedAttentionStatsPress(0.75),
    "expected_attention_stats_e01_f64_r40": ExpectedAttentionStatsPress(
        0.4, n_future_positions=64, n_sink=2, epsilon=0.01
    ),
}
STATISTICS = {"q_filters", "mu", "cov"}  # attributes of presses


def captured(model: PreTrainedModel, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the queries [L, Hq, N, D] of a text before and after RoPE, without those of its first tokens."""
    modeling = importlib.import_module(type(model).__module__)
    rotate, after = modeling.apply_rotary_pos_emb, []

    def rotated(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        queries, keys = rotate(*args, **kwargs)
        after.append(queries)
        return queries, keys

    with patch.object(modeling, "apply_rotary_pos_emb", rotated), patch_rotary_embedding(model) as before:
        model(text[None])
    return tuple(torch.cat(queries)[:, :, SINKS:] for queries in (before, after))


@torch.no_grad()
def measured(model: PreTrainedModel, texts: torch.Tensor, kv_heads: int) -> dict[str, torch.Tensor]:
    """Returns query_mean and query_cov as kvpress computes them, and the filters of the paper, from all queries."""
    before, after = (torch.cat(x, dim=2) for x in zip(*(captured(model, text) for text in texts), strict=True))
    mean = before.mean(dim=2)
    apart = before - mean[:, :, None]
    _, _, right = torch.linalg.svd(after, full_matrices=False)
    principal = right[..., 0, :]
    principal = principal * torch.sign((after * principal[:, :, None]).sum(dim=(2, 3)))[..., None]
    grouped = principal.reshape(len(principal), kv_heads, -1, principal.shape[-1])
    return {
        "query_mean": mean,
        "query_cov": apart.transpose(2, 3) @ apart / (apart.shape[2] - 1),
        "q_filters": -grouped.mean(dim=2),
    }


def record(name: str, tiny: TinyModel, folder: Path) -> None:
    """Measures a model in float64, runs all presses in float32 and float64, and writes the archive."""
    model, wide = tiny.build(), tiny.build().double()
    rng = np.random.default_rng(SEEDS[name])
    prompt, texts = rng.permutation(VOCABULARY)[:PROMPT_LENGTH], rng.integers(0, VOCABULARY, (TEXTS, LENGTH))
    ids = torch.from_numpy(prompt)
    statistics = {key: x.float() for key, x in measured(wide, torch.from_numpy(texts), tiny.kv_heads).items()}
    arrays: dict[str, Any] = {"prompt": prompt.astype(np.int32), "texts": texts.astype(np.int32)}
    arrays |= {key: statistic.numpy() for key, statistic in statistics.items()}
    full, full_wide = (run(x, ids, "sdpa")["kept"] for x in (model, wide))
    presses = {}
    for label, press in PRESSES.items():
        description = described(press)
        found = []
        for each, whole in ((model, full), (wide, full_wide)):
            press.q_filters = statistics["q_filters"]
            press.mu, press.cov = (statistics[key].to(each.dtype) for key in ("query_mean", "query_cov"))
            out = run(each, ids, "sdpa", press)
            found.append((out, positions(out["kept"], whole, press)))
        for attribute in STATISTICS:
            setattr(press, attribute, None)
        (out, pos), (_, pos_wide) = found
        gap = margin(out["scores"], pos)
        if not np.array_equal(pos, pos_wide) or gap < LEAST_MARGIN:
            raise SystemExit(
                f"{name}/{label}: float64 differs, or margin={gap:.1e} is below {LEAST_MARGIN:.0e}; choose another seed"
            )
        arrays[f"{label}/pos"], arrays[f"{label}/scores"] = pos.astype(np.int16), out["scores"]
        kwargs = {key: value for key, value in description["kwargs"].items() if key not in STATISTICS}
        presses[label] = {**description, "kwargs": kwargs, "retained": pos.shape[-1], "margin": gap}
    meta = {
        "sinks": SINKS,
        "seed": SEEDS[name],
        "presses": presses,
        "versions": {package: version(package) for package in PACKAGES},
    }
    np.savez_compressed(folder / f"{name}_statistics.npz", meta=json.dumps(meta), **arrays)
    smallest = min(press["margin"] for press in presses.values())
    print(f"{name}: {len(presses)} presses, smallest margin between retained and evicted scores {smallest:.1e}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parents[1] / "tests" / "golden")
    parser.add_argument("--model", choices=MODELS, nargs="+", default=list(MODELS), help="default: all")
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    for name in arguments.model:
        record(name, MODELS[name], arguments.folder)
