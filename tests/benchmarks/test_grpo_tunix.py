"""GRPO with tunix runs by rollouts of kvjax: the weights that it trains are those that the next answers come from."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.checkpoint.parameters import by_path

pytest.importorskip("tunix", reason="tunix is not installed (docs/guide/rollouts.md)")

from benchmarks import grpo_tunix
from kvjax.integrations.tunix import KVJaxActor
from kvjax.integrations.tunix.names import view_of
from tests.tiny import full_logits

SMALL = ["--steps", "2", "--batch", "2", "--prompt", "48", "--new", "6", "--rate", "1e-2"]


def test_the_actor_is_the_demo_model() -> None:
    params, _ = kvjax.load("demo")
    view = view_of(grpo_tunix.actor())()
    tokens = [np.random.default_rng(0).integers(3, 512, 40)]
    np.testing.assert_allclose(full_logits(view, tokens, 64)[0], full_logits(params, tokens, 64)[0], atol=1e-4)
    biases = {path for path in by_path(view) if "_bias" in path}
    assert by_path(view).keys() - biases == by_path(params).keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "side", "off_policy"),
    [
        (grpo_tunix.actor, "full", False),
        (grpo_tunix.actor, "morphkv:budget=24,window=8", True),
        (lambda: KVJaxActor(kvjax.load("demo")[0]), "full", False),
    ],
    ids=["full", "morphkv", "decoder"],
)
def test_two_steps(make: Callable[[], nnx.Module], side: str, off_policy: bool) -> None:
    arguments = grpo_tunix.parser().parse_args(SMALL)
    cluster = grpo_tunix.cluster_of(make(), side, arguments)
    before = jax.tree.map(np.array, view_of(cluster.rollout.model())())
    first, second = grpo_tunix.train(cluster, side, arguments)
    assert cluster.rollout.model() is cluster.actor_trainer.model
    assert np.abs(view_of(cluster.rollout.model())().embed[...] - before.embed[...]).max() > 1e-3
    for line in (first, second):
        assert line["tokens"] == 2 * grpo_tunix.GROUP * 6
        assert 0 < line["reward"] < 1
        assert np.isfinite(line["loss"])
        assert (line["mean_abs_log_ratio"] > 1e-2) == off_policy
        assert (line["effective_share"] < 0.999) == off_policy
