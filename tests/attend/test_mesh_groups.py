"""Budgets for which heads compete, on a mesh: groups retain the same as on one device."""

import jax
import numpy as np
import pytest

import kvjax
from kvjax.parts import Reconstruction
from kvjax.policies import adakv, dms, duo_attention, h2o, headkv, knorm, kvzip, lukv
from tests.attend.meshes import NEW, ROWS, assert_equal, mesh, of_allocation, sharded
from tests.tiny import decoder

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")

KV_HEADS, GROUPS = 8, 4  # two kv heads to a group
LAYERS = {
    "kvzip": 2,
    "kvzip+": 2,
    "adakv": 1,
    "duo_attention": 1,
    "headkv": 1,
    "lukv": 1,
    "dms": 2,
}  # heads of other layers compete under one of them
GATES = tuple(map(tuple, np.random.default_rng(1).random((1, KV_HEADS)).tolist()))


def kvzip_of(groups: int, normalise: bool = False) -> kvjax.Policy:
    score = Reconstruction(2, 48, instruction=(3, 1), starting=(5,), suffix=(2,), normalise=normalise)
    return kvzip(12, 2, groups=groups, score=score)


POLICIES = {
    "kvzip": kvzip_of(GROUPS),
    "kvzip+": kvzip_of(GROUPS, normalise=True),
    "adakv": adakv(h2o(12), groups=GROUPS),
    "duo_attention": duo_attention(GATES, sinks=2, recent=10, groups=GROUPS),
    "headkv": headkv(12, GATES, window=4, groups=GROUPS),
    "lukv": lukv(knorm(), GATES, 12, groups=GROUPS),
    "dms": dms(knorm(), -2.5, window=4, groups=GROUPS),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "data", "model", "kv_heads"),
    [
        ("kvzip", 1, 8, 4),
        ("kvzip+", 1, 8, 4),
        ("adakv", 2, 4, KV_HEADS),
        ("duo_attention", 2, 4, KV_HEADS),
        ("headkv", 2, 4, KV_HEADS),
        ("lukv", 2, 4, KV_HEADS),
        ("dms", 2, 4, KV_HEADS),
    ],
)
def test_groups_on_devices_of_their_own_keep_the_same(
    name: str, data: int, model: int, kv_heads: int, compiled: list[str]
) -> None:
    """Bytes are those of the plan. Another text, with other counts of entries, compiles nothing.

    Two of 8 devices share each of 4 kv heads.
    """
    policy, layers, answers = POLICIES[name], LAYERS[name], []
    for params in (decoder(8, kv_heads, (None,) * layers), sharded(data, model, kv_heads, layers)):
        answers.append(kvjax.generate(params, ROWS, policy=policy, max_new_tokens=NEW, log_probs=True))
    assert_equal(answers[1], answers[0])
    pools = [answer.cache.entries for answer in answers]
    np.testing.assert_array_equal(pools[1].capacity, pools[0].capacity)
    np.testing.assert_array_equal(pools[1].used, pools[0].used)
    assert pools[1].lanes == GROUPS
    assert {shard.data.shape[1] for shard in pools[1].keys.addressable_shards} == {GROUPS // 4}
    shape = {"batch": len(ROWS), "length": 44, "new_tokens": NEW, "dtype": np.float32}
    planned = kvjax.plan_cache(params.config, policy, **shape, mesh=mesh(data, model))
    assert planned.nbytes == answers[1].cache.nbytes == answers[0].cache.nbytes
    compiled.clear()
    others = kvjax.generate(params, [row[::-1] for row in ROWS], policy=policy, max_new_tokens=NEW, log_probs=True)
    assert compiled == []
    assert name in ("duo_attention", "headkv", "lukv") or (np.asarray(others.cache.entries.used) != pools[1].used).any()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kvzip", "adakv", "headkv", "lukv", "dms"])
def test_the_allocation_communicates_nothing(name: str) -> None:
    assert not of_allocation(sharded(2, 4, KV_HEADS, LAYERS[name]), POLICIES[name]).counts


@pytest.mark.parametrize("groups", [1, 2])
def test_a_mesh_that_cuts_a_group_is_refused(groups: int) -> None:
    params = sharded(2, 4, KV_HEADS)
    for policy in (
        kvzip_of(groups),
        adakv(h2o(12), groups=groups),
        duo_attention(GATES, groups=groups),
        headkv(12, GATES, groups=groups),
        lukv(knorm(), GATES, 12, groups=groups),
        dms(groups=groups),
    ):
        with pytest.raises(ValueError, match=rf"groups={groups} on a mesh with 4 devices .*expected a multiple of 4"):
            kvjax.generate(params, ROWS, policy=policy)
