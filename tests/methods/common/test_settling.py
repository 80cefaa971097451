"""What holds for every storage that settles a prompt into entries of another form."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.inspection import record
from kvjax.policies import parse, quantize
from tests import tiny
from tests.attend import meshes
from tests.products import each_once

SPECS = ("think:ratio=0.5,window=4,recent=4", "zipcache:window=4,queries=4")
ROWS = [np.random.default_rng(2).integers(0, tiny.VOCAB, n) for n in (40, 5, 23)]


def over(spec: str, base: str) -> kvjax.Policy:
    """The policy of a spec over a base, whose options follow a comma."""
    name, *options = base.split(",")
    return parse(",".join([spec, f"base={name}", *(f"base.{option}" for option in options)]))


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "base"), each_once(SPECS, ["snapkv,budget=24,window=4", "full"]))
def test_memory_held_is_what_was_planned(spec: str, base: str) -> None:
    """Of a model with a layer that has a sliding window, and keeps its entries as they are."""
    params, policy = tiny.decoder(windows=(None, 12)), over(spec, base)
    sizes = {"batch": 3, "length": 40, "new_tokens": 9, "dtype": np.float32}
    answer = kvjax.generate(params, ROWS, policy=policy, max_new_tokens=9)
    planned = kvjax.plan_cache(params.config, policy, **sizes)
    assert jax.tree.map(jnp.shape, answer.cache.entries) == jax.tree.map(jnp.shape, planned.entries)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(answer.cache.entries))
    assert held == planned.nbytes == answer.cache.nbytes
    assert held < kvjax.plan_cache(params.config, parse(base.replace(",", ":", 1)), **sizes).nbytes


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
@pytest.mark.parametrize(("spec", "data", "model"), each_once(SPECS, [(2, 4), (4, 2)]))
def test_on_a_mesh(spec: str, data: int, model: int) -> None:
    """With two kv heads, devices of the first mesh share each, and have a part of its query group."""
    params, policy = tiny.decoder(meshes.HEADS, 2), over(spec, "snapkv,budget=24,window=4")
    ours, theirs = (
        kvjax.generate(x, meshes.ROWS, policy=policy, max_new_tokens=12, log_probs=True)
        for x in (meshes.sharded(data, model, 2), params)
    )
    meshes.assert_equal(ours, theirs)
    assert ours.cache.nbytes == theirs.cache.nbytes
    for leaf in jax.tree.leaves(ours.cache.entries[0].settled):
        assert leaf.addressable_shards[0].data.shape[:2] == (8 // data, 1)


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS)
def test_settled_entries_are_seen_by_inspection_and_counted(spec: str) -> None:
    """Merged entries of the prompt are followed as under the base, and no entry leaves."""
    params, base = tiny.decoder(), "kvmerger,budget=12,recent=4,merge.heavy=2,merge.theta=None"
    policies = over(spec, base), parse(base.replace(",", ":", 1))
    ours, theirs = (record(params, ROWS[0], policy=policy, max_new_tokens=3) for policy in policies)
    np.testing.assert_array_equal(ours.left[..., :40], theirs.left[..., :40])
    assert ours.into is not None
    assert theirs.into is not None
    np.testing.assert_array_equal(ours.into[..., :40], theirs.into[..., :40])
    assert (theirs.into[..., :40] >= 0).any()
    held, expected = (kvjax.prefill(params, ROWS, policy=policy).entries.held() for policy in policies)
    np.testing.assert_array_equal(held, expected)
    planned = kvjax.plan_cache(params.config, policies[0], batch=1, length=40, new_tokens=9, dtype=np.float32)
    assert planned.entries.mean_slots == (12 + 64,)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [*SPECS, "think:ratio=0.4,window=4,recent=0"])
def test_one_document_serves_two_questions_and_a_saved_one_another(spec: str, tmp_path: Path) -> None:
    """Decoding donates its cache, and settled entries go from call to call as they are; also where all are settled."""
    params, policy = tiny.decoder(), over(spec, "snapkv,budget=0.5,window=4")
    half = kvjax.prefill(params, ROWS, policy=policy, compress="never")
    document = kvjax.prefill(params, ROWS, policy=policy)
    answers = []
    for name, cache in (("half", half), ("document", document)):
        kvjax.save_cache(tmp_path / name, cache, params)
        restored = kvjax.restore_cache(tmp_path / name, params)
        assert jax.tree.structure(restored) == jax.tree.structure(cache)
        for given in (cache, cache, restored):
            answers.append(kvjax.generate(params, [[3, 4], [5], [6, 7]], cache=given, max_new_tokens=6).tokens)
    for first in (0, 3):
        np.testing.assert_array_equal(answers[first + 1], answers[first])
        np.testing.assert_array_equal(answers[first + 2], answers[first])


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS)
def test_a_second_compression_is_refused(spec: str) -> None:
    params, policy = tiny.decoder(), over(spec, "snapkv,budget=0.5,window=4")
    with pytest.raises(ValueError, match="compress='chunk' would settle the entries of a prompt in another form"):
        kvjax.prefill(params, ROWS, policy=policy, chunk=8, compress="chunk")
    cache = kvjax.prefill(params, ROWS, policy=policy)
    with pytest.raises(ValueError, match="compress='end' would settle the entries of a prompt in another form"):
        kvjax.extend(params, cache, [[1, 2]] * 3, compress="end")


@pytest.mark.parametrize(("name", "does"), [("think", "drops channels"), ("zipcache", "probes keys")])
@pytest.mark.parametrize(
    ("base", "says"),
    [
        ("morphkv", "every=1 evicts while decoding; expected a policy with every=None"),
        ("adakv", "it stores .* the budget AdaptiveShares stores heads in"),
        ("key_rerotation", "^{name}: it {does} .* positions='in_cache'"),
        ("attention_matching", "no bias, by which the merge FittedEntries weighs entries"),
        ("quantize", "its base already stores keys and values"),
        ("think", "its base already stores keys and values"),
    ],
)
def test_bases_that_do_not_fit(name: str, does: str, base: str, says: str) -> None:
    with pytest.raises(ValueError, match=says.format(name=name, does=does)):
        parse(f"{name}:base={base}")


@pytest.mark.parametrize("spec", SPECS)
def test_the_end_of_a_prompt_decides_and_no_other_storage_fits(spec: str) -> None:
    assert parse(spec).asks_the_end
    with pytest.raises(ValueError, match=r"^quantize: its policy already stores"):
        quantize(parse(spec))
