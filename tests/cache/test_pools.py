"""Copies of pools, and attention on their pieces."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache import Segments, Slots
from kvjax.cache.entries import StepQuery
from kvjax.cache.segments import BY_LAYER, _received_by
from kvjax.pallas_kernels import QuantizedArray, Reduction
from kvjax.pallas_kernels.segment_attention import SegmentAttention
from tests.tiny import decoder

B, H, G, M, D = 2, 2, 3, 7, 4


def pool(text: str) -> Segments:
    config = decoder(windows=(None, None)).config
    plan = kvjax.plan_cache(
        config, kvjax.policies.parse(text), batch=2, length=40, new_tokens=4, dtype="float32"
    ).entries
    assert isinstance(plan, Segments)
    return jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), plan)


def test_a_private_pool_has_arrays_of_its_own() -> None:
    """Of those by layer; the others are the same arrays, which nothing changes in place without a copy."""
    shared = pool("adakv:base=h2o,base.budget=24")
    own = shared.private()
    for name in BY_LAYER:
        for ours, theirs in zip(*map(jax.tree.leaves, (getattr(own, name), getattr(shared, name))), strict=True):
            np.testing.assert_array_equal(ours, theirs)
            assert ours.unsafe_buffer_pointer() != theirs.unsafe_buffer_pointer()
    assert own.keys is shared.keys


def test_a_plain_pool_has_arrays_of_keys_and_values() -> None:
    stored = pool("adakv:base=quantize,base.policy=snapkv,base.policy.budget=24,base.policy.window=4,base.bits=8")
    assert isinstance(stored.keys, QuantizedArray)
    plain = stored.plain()
    np.testing.assert_array_equal(plain.keys, stored.keys.dequantized())
    np.testing.assert_array_equal(plain.values, stored.values.dequantized())
    assert plain.positions is stored.positions


def test_a_prompt_of_one_token_is_held() -> None:
    entries = kvjax.prefill(decoder(), [[5]], policy="adakv:base=h2o,base.budget=24").entries
    assert isinstance(entries, Segments)
    assert [used.tolist() for used in entries.used] == [[[1, 1]]]


@pytest.mark.parametrize("window", [None, 3])
def test_what_entries_receive_is_the_same_without_logits(window: int | None) -> None:
    """One entry is empty, one follows the query of its row, and the second row has no query."""
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=(B, heads, n, D)), jnp.float32) for heads, n in ((H * G, 1), (H, M)))
    at, positions = jnp.array([[5], [-1]]), jnp.broadcast_to(jnp.array([4, 5, 1, -1, 2, 6, 3]), (B, H, M))
    options = {"scale": 0.5, "softcap": None, "window": window}
    distance = at[:, None] - positions
    sees = (positions >= 0) & (distance >= 0) & (distance < (window or M)) & (at[:, None] >= 0)
    logits = jnp.einsum("bhgd,bhmd->bhgm", q.reshape(B, H, G, D), k) * 0.5
    logits = jnp.where(sees[:, :, None], logits, -jnp.inf)
    lse = jax.nn.logsumexp(logits, axis=-1).reshape(B, H * G, 1)
    entries = Slots(k, k, positions, jnp.full((B, H), M))
    query = StepQuery(q, at, options, Reduction(rows="sum", group="mean"))

    def received(logits: Any) -> Any:
        found = SegmentAttention(q, lse, logits)
        return jax.jit(lambda: _received_by(found, query, entries, lambda x: x))()

    expected = jnp.mean(jnp.where(sees[:, :, None], jnp.exp(logits - lse.reshape(B, H, G, 1)), 0), axis=2)
    for given in (None, logits):
        np.testing.assert_allclose(received(given), expected, atol=1e-6)
    assert expected[0].any()
