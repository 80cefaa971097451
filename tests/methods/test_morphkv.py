"""MorphKV's layer against a literal Algorithm 1, step by step."""

from __future__ import annotations

import re
from functools import partial
from itertools import product
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from kvjax.policies import morphkv, parse
from kvjax.reading.layers import step
from tests import tiny
from tests.dense import assert_close
from tests.methods import one_layer
from tests.methods.reference import Head
from tests.products import part

HEADS, PROMPT = 2, 40
CONFIGS = Path(__file__).parents[2] / "configs" / "morphkv"
LENGTHS = np.array([40, 25, 3])  # longer than the budget, longer than the window, shorter than the window


@partial(jax.jit, static_argnames="policy")
def run(policy, q, k, v):
    """(prompt context, retained after it, contexts [T, B, Hq, D], positions [T, B, H, S]) of one layer of ours."""
    lengths = jnp.asarray(LENGTHS)
    context, after = one_layer.read(policy, lengths, PROMPT, q, k, v)

    def step(carry, i):
        entries, positions = carry
        token = (jax.lax.dynamic_slice_in_dim(x, PROMPT + i, 1, axis=2) for x in (q, k, v))
        out, entries = one_layer.step(policy, positions, entries, *token)
        return (entries, positions + 1), (out[:, :, 0], entries[0].positions)

    _, (contexts, retained) = jax.lax.scan(step, (after, lengths), jnp.arange(q.shape[2] - PROMPT))
    return context, after[0].positions, contexts, retained


def compare(queries_per_head, steps, block=None, **options):
    q, k, v = one_layer.random_streams(queries_per_head, 3, HEADS, queries_per_head, PROMPT + steps)
    q = 1.5 * q
    context, after, contexts, retained = map(np.asarray, run(morphkv(**options, block=block), q, k, v))
    closest = np.inf
    for b, n in enumerate(LENGTHS):
        for h in range(HEADS):
            mine = slice(h * queries_per_head, (h + 1) * queries_per_head)
            head = Head(**options)
            x, y, z = (s.astype(np.float64)[b, at, PROMPT - n :] for s, at in ((q, mine), (k, h), (v, h)))
            assert_close(context[b, mine, PROMPT - n :], head.read(x[:, :n], y[:n], z[:n]), 1e-5, 1e-4)
            assert sorted(after[b, h][after[b, h] >= 0]) == sorted(head.tokens)
            expected = []
            for i in range(steps):
                expected.append(head.decode(n + i, x[:, n + i], y[n + i], z[n + i]))
                ours = retained[i, b, h]
                assert sorted(ours[ours >= 0]) == sorted(head.tokens), f"row {b}, head {h}, step {i}"
                assert len(head.tokens) <= options["budget"]
            assert_close(contexts[:, b, mine], np.stack(expected), 1e-5, 1e-4)
            closest = min(closest, head.closest)
    assert closest > 1e-6, "these random numbers leave a decision to rounding; take others"


@pytest.mark.long(first=1)
@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    ("group", "fusion", "every"),
    part(
        product([1, 4, 7], ["sum", "max"], [1, 8]),
        [(1, "max", 1), (4, "sum", 1), (4, "max", 8), (7, "sum", 8)],
    ),
)
def test_retains_what_algorithm_1_retains(group, fusion, every):
    """Three rows for 300 steps: the same positions at every step, the same context. A block leaves in three steps."""
    compare(group, 300, block=3, budget=24, window=6, fusion=fusion, every=every)


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("options", [{"group": "max"}, {"group": "logits"}, {"group": "max", "fusion": "max"}])
def test_released_normalisation_and_group_rules(options):
    compare(4, 100, budget=20, window=5, normalise="distant", **options)


@pytest.mark.long
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="reads a CPU's program")
def test_a_step_does_not_copy_the_queries_of_the_window(optimized):
    """It reads them before it writes the newest one, and XLA must see that it does."""
    params = tiny.decoder()
    _, cache = tiny.prefill(params, "morphkv:budget=40,window=24", [np.arange(50), np.arange(45)], 64)
    program = jax.jit(step, donate_argnums=1).lower(params, cache, np.zeros(2, np.int32), np.ones(2, bool))
    text = program.compile().as_text()
    rings = {x.shape for x in jax.tree.leaves(cache) if x.ndim == 4 and x.shape[2] == 24}
    assert len(rings) == 1
    shape = ",".join(map(str, *rings))
    assert f"f32[{shape}]" in text
    assert re.findall(rf"= f32\[{shape}\]\S* copy\(", text) == []


@pytest.mark.slow
def test_dense_layers_keep_everything():
    params = tiny.decoder(windows=(None, None))
    rows = [np.arange(20), np.arange(7)]
    _, cache = tiny.prefill(params, "morphkv:budget=9,window=3,dense_layers=1", rows, 24)
    for i in range(5):
        _, cache = tiny.step(params, cache, np.array([i, i]), np.array([True, True]))
    for b, n in enumerate((25, 12)):
        dense, evicting = tiny.held(cache, b)
        assert dense == [list(range(n))] * 2
        assert [len(head) for head in evicting] == [9, 9]


def test_table_11_has_the_model_and_the_capacity_of_its_caption():
    config = yaml.safe_load((CONFIGS / "table11_dense_layers.yaml").read_text())
    assert config["model"] == "mistralai/Mistral-7B-Instruct-v0.2"
    default, dense = (parse(policy["policy"]) for policy in config["policies"])
    assert default == morphkv(2000, window=200, fusion="max")
    assert dense == morphkv(2000, window=200, fusion="max", dense_layers=3)
