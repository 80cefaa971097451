"""Policies that read saved statistics against kvpress, and the statistics against its queries; see golden/README.md."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import kvjax
from kvjax.models import Decoder
from kvjax.statistics.measure import measured
from tests.methods.goldens import GOLDEN, MODELS, check_made_again, needs_kvpress
from tests.products import part
from tests.tiny import held

PRESSES = (
    "qfilter_r50",
    "qfilter_r75",
    "expected_attention_stats_r75",
    "expected_attention_stats_e01_f64_r40",
)
STATISTICS = ("q_filters", "query_mean", "query_cov")


class Golden(NamedTuple):
    params: Decoder
    arrays: dict[str, np.ndarray]
    meta: dict[str, Any]

    def policy(self, label: str) -> kvjax.Policy:
        press = self.meta["presses"][label]
        kwargs = press["kwargs"]
        budget = int(len(self.arrays["prompt"]) * (1 - kwargs["compression_ratio"]))
        if press["press"] == "GivenFilters":
            return kvjax.policies.qfilter(budget)
        assert press["press"] == "ExpectedAttentionStatsPress"
        names = ("n_sink", "n_future_positions", "use_covariance", "use_vnorm", "epsilon")
        return kvjax.policies.expected_attention_stats(budget, *(kwargs[name] for name in names))


@functools.cache
def golden(model: str) -> Golden:
    params, _ = kvjax.load(GOLDEN / model)
    with np.load(GOLDEN / f"{model}_statistics.npz") as archive:
        arrays = dict(archive)
    return Golden(params, arrays, json.loads(str(arrays["meta"])))


@pytest.mark.parametrize(
    ("model", "press"),
    part(
        [(model, press) for model in MODELS for press in PRESSES],
        [("llama_group4", press) for press in PRESSES] + [("llama_group7", PRESSES[0]), ("llama_group7", PRESSES[2])],
    ),
)
def test_policy_retains_what_kvpress_does(model: str, press: str) -> None:
    case = golden(model)
    params = kvjax.with_statistics(case.params, {name: case.arrays[name] for name in STATISTICS})
    cache = kvjax.prefill(params, case.arrays["prompt"], policy=case.policy(press))
    assert held(cache, 0) == [[head[head >= 0].tolist() for head in layer] for layer in case.arrays[f"{press}/pos"]]


@pytest.mark.slow
@pytest.mark.parametrize("model", part(MODELS, ["llama_group1", "llama_group7"]))
def test_measured_are_the_statistics_of_the_queries_that_kvpress_captures(model: str) -> None:
    case = golden(model)
    texts = case.arrays["texts"]
    found = measured(case.params, [texts[:1], texts[1:]], case.meta["sinks"])
    for name in STATISTICS:
        expected = case.arrays[name]
        np.testing.assert_allclose(found[name], expected, atol=1e-4 * np.abs(expected).max(), err_msg=name)


def test_goldens_are_all_compared() -> None:
    for model in MODELS:
        assert set(golden(model).meta["presses"]) == set(PRESSES)


@pytest.mark.parity
@needs_kvpress
def test_goldens_can_be_made_again(tmp_path: Path) -> None:
    check_made_again("make_statistics_goldens", "_statistics", golden("llama_group7").arrays, tmp_path)
