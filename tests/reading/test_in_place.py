"""A chunk between the first and the last writes the slots of its own tokens, and no array of all slots."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import kvjax
from benchmarks.aot.hlo import Loop
from benchmarks.aot.lower import lower_prefill
from kvjax.attend import received
from kvjax.models import DecoderConfig, Rope
from kvjax.pallas_kernels.prompt_attention import parts, xla

pytestmark = pytest.mark.skipif(
    jax.default_backend() == "cpu" and jax.__version_info__ < (0, 11),
    reason="for CPUs, XLA of jax 0.10 copies arrays that are donated",
)
TOKENS, CHUNK = 640, 16
SHAPE = DecoderConfig("llama", 100, 64, 96, 2, 2, 64, (None,) * 2, Rope(10_000.0), 4096)
SLOTS = TOKENS - CHUNK  # bucket(640) is 768
KEYS = SHAPE.num_kv_heads * SHAPE.head_dim * SLOTS * 4


def rewrites(policy: str) -> list[str]:
    """Arrays of the size of a layer's keys that the program of a chunk between writes in full."""
    programs = lower_prefill(
        SHAPE,
        kvjax.policies.parse(policy),
        mesh=kvjax.make_mesh(),
        batch=1,
        length=TOKENS,
        new_tokens=8,
        chunk=CHUNK,
        dtype=jnp.float32,
    )
    between = programs["_read_layers 1"].compile()
    return Loop.whole(between.as_text()).rewrites(KEYS)


@pytest.mark.long
@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("policy", ["full", pytest.param("snapkv:budget=48,window=8", marks=pytest.mark.slow)])
def test_a_chunk_between_writes_no_array_of_all_slots(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention takes the slots and the new tokens in two parts, as on GPUs with cuDNN and on TPUs."""

    def attention(q, k, v, q_positions, k_positions, **options):
        def own(q, k, v, positions):
            at = jnp.broadcast_to(positions[:, None], k.shape[:3])
            return xla.prompt_attention(q, k, v, positions, at, **options)

        def cached(*arrays):
            return xla.prompt_attention(*arrays, **options)

        options.pop("bias")
        return parts.in_parts(own, cached, q, k, v, q_positions, k_positions)

    monkeypatch.setattr(received, "prompt_attention", attention)
    assert rewrites(policy) == []


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("policy", ["full", "h2o:budget=48", "morphkv:budget=48,window=4"])
def test_kernels_of_one_part_take_slots_and_tokens_in_one_array(policy: str) -> None:
    """A layer's keys and values are put together once, and nothing is written back."""
    assert len(rewrites(policy)) <= 3
