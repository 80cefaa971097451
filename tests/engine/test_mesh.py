"""An engine on several devices answers as `kvjax.generate` on one, and admits a row without communication."""

from __future__ import annotations

import re

import jax
import pytest

import kvjax
from kvjax.engine.sizes import TOGETHER
from kvjax.models import Decoder
from tests.engine.test_tokens import KINDS, check
from tests.engine.traffic import GREEDY
from tests.patience import PATIENCE
from tests.products import part

SHAPES = [(data, model) for data in (1, 2) for model in (1, 2, 4) if data * model > 1]
CHOSEN = [("adakv:base=h2o,base.budget=12,groups=2", (2, 2))]


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "shape"), part([(policy, shape) for policy in KINDS for shape in SHAPES], CHOSEN))
def test_tokens_are_those_of_one_device(policy: str, shape: tuple[int, int], tiny: Decoder) -> None:
    devices = jax.devices()[: shape[0] * shape[1]]
    mesh = kvjax.make_mesh(*shape, devices=devices)
    check(kvjax.shard(tiny, mesh), policy, GREEDY, requests=8, rows=4, reference=tiny)


def test_rows_are_divided_evenly(tiny: Decoder) -> None:
    params = kvjax.shard(tiny, kvjax.make_mesh(2, 1, devices=jax.devices()[:2]))
    with pytest.raises(ValueError, match=r"3 rows on a mesh of data=2: expected multiples of 2 rows"):
        kvjax.Engine(params, rows=3, max_prompt=8, max_new_tokens=8)


@pytest.mark.slow
def test_admission_moves_nothing_between_devices(tiny: Decoder) -> None:
    params = kvjax.shard(tiny, kvjax.make_mesh(2, 2, devices=jax.devices()[:4]))
    with kvjax.Engine(params, "h2o:budget=12", rows=4, max_prompt=64, max_new_tokens=8) as engine:
        for count in (1, TOGETHER):
            text = engine._loop._device._programs._compiled[f"admit {count}"].as_text()
            moves = r"(all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(-start)?\("
            assert not re.search(moves, text)
        answer = engine.submit([1, 2, 3], max_new_tokens=2).result(timeout=PATIENCE)
        stats = engine.stats()
    assert len(answer.tokens) == 2
    planned = kvjax.plan_cache(
        tiny.config,
        engine.policy,
        batch=4,
        length=64,
        new_tokens=8,
        dtype="float32",
        mesh=kvjax.make_mesh(2, 2, devices=jax.devices()[:4]),
    )
    assert stats.cache_bytes == planned.nbytes
