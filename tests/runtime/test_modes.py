"""Modes of JAX that a caller may set: policies give the same answers under each."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import product
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
import kvjax.evaluation
from kvjax.policies import PRESETS
from tests.patience import PATIENCE
from tests.policy.small import small
from tests.products import part
from tests.tiny import VOCAB, decoder, random_gates, random_statistics

MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "enable_x64": lambda: jax.enable_x64(True),
    "debug_nans": lambda: jax.debug_nans(True),
    "strict promotion of types": lambda: jax.numpy_dtype_promotion("strict"),
    "no promotion of ranks": lambda: jax.numpy_rank_promotion("raise"),
    "transfer_guard": lambda: jax.transfer_guard("disallow"),
}
POLICIES = (  # what a cache carries differs: nothing, a window's queries, a threshold, segments, segments that grow
    "full",
    "morphkv:budget=12,window=4,every=4",
    "d2o:budget=12,layer_budgets=False",
    "adakv:base=h2o,base.budget=12,groups=2",
    "kvzip:budget=12,score.chunk=8,score.instruction='',score.starting='',score.suffix='',groups=2",
)
WITHOUT_JIT = "knorm:budget=5"
ROWS = [np.random.default_rng(0).integers(0, VOCAB, n).tolist() for n in (20, 7)]
OPTIONS = {"max_new_tokens": 4, "eos": ()}


@cache
def tokens(policy: str | kvjax.Policy, mode: str | None = None) -> np.ndarray:
    """The answers under a policy. Presets have two layers, since the gates of duo_attention are for two."""
    params = decoder() if isinstance(policy, str) else decoder(8, 4, (None, None), gates=True)
    with MODES[mode]() if mode else nullcontext(), warnings.catch_warnings():
        warnings.simplefilter("error")
        return kvjax.generate(params, ROWS, policy=policy, **OPTIONS).tokens


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    ("mode", "policy"),
    part(
        product(MODES, POLICIES),
        {*product(["enable_x64"], POLICIES), *zip(MODES, POLICIES, strict=True)},
    ),
)
def test_answers_are_the_same(mode: str, policy: str) -> None:
    np.testing.assert_array_equal(tokens(policy, mode), tokens(policy))


@pytest.mark.exhaustive
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("mode", MODES)
def test_answers_of_all_presets_are_the_same(mode: str, preset: str) -> None:
    np.testing.assert_array_equal(tokens(small(preset), mode), tokens(small(preset)))


@pytest.mark.slow
@pytest.mark.parametrize("policy", part((WITHOUT_JIT, *POLICIES), [WITHOUT_JIT]))
def test_answers_are_the_same_without_jit(policy: str) -> None:
    """Each operation is a program of its own, so prompts and answers are short."""
    rows, options = [[5, 6, 7, 8, 9, 3], [1]], {"max_new_tokens": 2, "eos": ()}
    for long, short in (("budget=12", "budget=5"), ("window=4,every=4", "window=2,every=2"), ("d2o:", "d2o:sinks=1,")):
        policy = policy.replace(long, short)
    compiled = kvjax.generate(decoder(), rows, policy=policy, **options).tokens
    with jax.disable_jit():
        np.testing.assert_array_equal(kvjax.generate(decoder(), rows, policy=policy, **options).tokens, compiled)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_streams_and_curves_are_the_same_and_leave_the_mode_alone(mode: str) -> None:
    policies = [f"h2o:budget={budget}" for budget in (8, 12)]
    answers = tokens(policies[1])

    def state() -> tuple[object, ...]:
        names = ("enable_x64", "numpy_dtype_promotion", "numpy_rank_promotion", "transfer_guard", "debug_nans")
        return tuple(getattr(jax.config, f"jax_{name}", None) for name in names)

    with MODES[mode]():
        before, found = state(), []
        for piece in kvjax.stream(decoder(), ROWS, policy=policies[1], **OPTIONS):
            assert state() == before
            found.append(piece.tokens)
        *_, last = kvjax.prefill_each(decoder(), ROWS, policies=policies)
        assert state() == before
        later = kvjax.generate(decoder(), [[3], [3]], cache=last, **OPTIONS)
    np.testing.assert_array_equal(np.stack(found, axis=1), answers)
    document = kvjax.prefill(decoder(), ROWS, policy=policies[1])
    np.testing.assert_array_equal(later.tokens, kvjax.generate(decoder(), [[3], [3]], cache=document, **OPTIONS).tokens)


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("mode", ["enable_x64", "strict promotion of types", "no promotion of ranks"])
def test_a_step_within_a_program_of_the_caller(mode: str) -> None:
    """The caller's mode holds around `extend`, and 64-bit tokens are tokens."""
    params, policy = decoder(), kvjax.policies.h2o(12)
    cache = kvjax.prefill(params, ROWS, policy=policy)
    plain, _ = kvjax.extend(params, cache, jnp.array([[1], [2]]))
    with MODES[mode]():
        logits, _ = jax.jit(kvjax.extend)(params, cache, jnp.array([[1], [2]]))
    np.testing.assert_allclose(logits, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.long
@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
def test_a_mesh_that_the_caller_has_set() -> None:
    """Two devices share each kv head, so that the arrays lie on a mesh with another axis."""
    mesh, alone, expected = kvjax.make_mesh(2, 4), decoder(), tokens("full")  # both are of one device, and stay so
    with jax.set_mesh(mesh):
        params = kvjax.shard(alone, mesh)
        answer = kvjax.generate(params, ROWS, **OPTIONS)
        np.testing.assert_array_equal(answer.tokens, expected)
        last = answer.cache.pending[:, None]
        plain, within = (call(params, answer.cache, last)[0] for call in (kvjax.extend, jax.jit(kvjax.extend)))
        np.testing.assert_allclose(within, plain, rtol=1e-5, atol=1e-6)
        assert jax.sharding.get_mesh() == mesh


@pytest.mark.parametrize("mode", [*MODES, "mesh"])
def test_checkpoints_are_the_same(mode: str, tmp_path: Path) -> None:
    """Parameters are written and read, sharded and given gates as without the caller's mode."""
    mesh, plain = kvjax.make_mesh(), decoder()
    gates, statistics = random_gates(1, 2, 2)[0], random_statistics(plain.config)
    with jax.set_mesh(mesh) if mode == "mesh" else MODES[mode]():
        kvjax.save(plain, tmp_path / "orbax")
        kvjax.save_hf(plain, tmp_path / "hf")
        found = [kvjax.restore(tmp_path / "orbax")[0], kvjax.load(tmp_path / "hf")[0], kvjax.shard(plain, mesh)]
        found.append(kvjax.with_statistics(kvjax.with_gates(plain, gates), statistics))
    for params in found:
        assert params.embed[...].dtype == np.float32
        assert str(params.embed[...].sharding) == str(plain.embed[...].sharding) or params is found[2]
        np.testing.assert_array_equal(kvjax.generate(params, ROWS, **OPTIONS).tokens, tokens("full"))


@pytest.mark.long
@pytest.mark.parametrize("question", ["after", "before"])
def test_runs_do_not_meet_a_guard_against_transfers(question: str) -> None:
    asked = {"context": "the code of anna is lamp .", "question": "recall what the code of anna is :", "answers": ["x"]}
    with jax.transfer_guard("disallow"):
        results = kvjax.evaluation.run("demo", ["full"], [asked], max_new_tokens=4, question=question)
    (cell,) = results.cells.values()
    assert cell.lines[0]["prediction"] == "anna is lamp"


def test_a_program_of_the_caller_has_no_values() -> None:
    params, cache = decoder(), kvjax.prefill(decoder(), ROWS)
    for call in (lambda: kvjax.generate(params, ROWS).tokens, lambda: kvjax.prefill(params, ROWS).length):
        with pytest.raises(
            ValueError, match=r"none under jax.jit .*: expected a call outside of them, where kvjax.ext"
        ):
            jax.jit(call)()
    with pytest.raises(ValueError, match=r"none under jax.jit"):
        jax.jit(lambda cache: kvjax.with_room(cache, 3).length)(cache)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_process_is_refused_and_does_not_wait_for_ever() -> None:
    """Also the second call; a process that is forked before kvjax has run is served."""
    code = f"""
import os, kvjax
from tests.tiny import decoder

def run():
    try:
        print(kvjax.generate(decoder(), [[1, 2]], **{OPTIONS}).tokens.shape, flush=True)
    except RuntimeError as error:
        print(str(error)[:83], flush=True)

for _ in range(2):
    if os.fork() == 0:
        run()
        run()
        os._exit(0)
    os.wait()
    run()
"""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=PATIENCE
    )
    refusal = "this process was forked from one in which kvjax has run; JAX would wait here for th"
    assert result.stdout.splitlines() == ["(1, 4)"] * 3 + [refusal] * 2 + ["(1, 4)"], result.stderr
