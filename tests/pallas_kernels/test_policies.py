"""Policies with any backend give the tokens of the definitions. Kernels are compiled on a GPU, else interpreted."""

from dataclasses import replace
from functools import cache
from itertools import cycle, product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from benchmarks.aot.hlo import COLLECTIVES
from kvjax.models import Decoder
from kvjax.pallas_kernels import slot_attention, top_tokens, use, window_scores
from tests.conftest import POLICIES as ALL_POLICIES
from tests.pallas_kernels.checks import on_gpu
from tests.products import part
from tests.tiny import VOCAB, decoder

# These use kernels in other ways: scores of all queries, extra rows, a bias, segments. SnapKV's scores of a window are
# used below, after chunks and turns, and TOVA's fold of what a step's slots receive is H2O's of another kind. AdaKV has
# segments as DynamicKV does; those of all heads share a lane.
POLICIES = (
    "snapkv:budget=16,window=4",
    "tova:budget=16",
    "dynamickv:budget=16,window=4",
    "h2o:budget=16",
    "morphkv:budget=16,window=10",
    "kvmerger:budget=16,recent=4,merge.heavy=2,merge.theta=None,merge.count_bias=True",
    "adakv:base=snapkv,base.budget=16,base.window=4",
)
QUANTIZED = tuple(
    f"quantize:policy={policy}"
    for policy in (
        "snapkv,policy.budget=16,policy.window=4,bits=8",
        "adakv,policy.base=snapkv,policy.base.budget=16,policy.base.window=4,bits=4",
    )
)
KERNELS = ("default",) if on_gpu() else ("xla", "triton-interpret", "mosaic_tpu-interpret")
CHOSEN = [*zip((*POLICIES[3:], *QUANTIZED), cycle(KERNELS), strict=False), (POLICIES[4], KERNELS[-1])]


@cache
def wide(layers: int) -> Decoder:
    """A decoder with heads that fill a TPU's vector lanes."""
    return Decoder(replace(decoder().config, windows=(None,) * layers, head_dim=128), nnx.Rngs(0), jnp.float32)


@cache
def tokens_of(policy: str, kernels: str) -> np.ndarray:
    """Segments and codes need wide heads. Layers of DynamicKV compete."""
    params = wide(1) if policy.startswith(("quantize", "adakv")) else wide(2) if "dynamickv" in policy else decoder()
    prompts = np.random.default_rng(0).integers(0, VOCAB, (2, 30))
    options = {"policy": kvjax.policies.parse(policy), "max_new_tokens": 6}
    with use(kernels):
        return kvjax.generate(params, prompts, **options).tokens


@pytest.mark.long
@pytest.mark.slow(first=1)
@pytest.mark.filterwarnings("error::UserWarning")  # dispatch would warn of a fallback
@pytest.mark.parametrize(
    ("policy", "kernels"),
    part(
        product((*(ALL_POLICIES if on_gpu() else POLICIES), *QUANTIZED), KERNELS),
        product((*ALL_POLICIES, *QUANTIZED), KERNELS) if on_gpu() else CHOSEN,
    ),
)
def test_the_same_tokens(policy: str, kernels: str) -> None:
    np.testing.assert_array_equal(tokens_of(policy, kernels), tokens_of(policy, "reference"))


@pytest.mark.long
@pytest.mark.slow(first=1)
@pytest.mark.filterwarnings("error::UserWarning")  # dispatch would warn of a fallback
@pytest.mark.parametrize("policy", [*POLICIES, *QUANTIZED])
def test_the_same_tokens_by_mosaic_gpu(policy: str) -> None:
    """It serves numbers of 16 bits."""
    config = replace(decoder().config, windows=(None,) * 2, head_dim=64)
    params = Decoder(config, nnx.Rngs(0), jnp.float16)
    prompts = np.random.default_rng(0).integers(0, VOCAB, (2, 30))
    tokens = []
    for choice in ("reference", "mosaic_gpu" if on_gpu() else "mosaic_gpu-interpret"):
        with use(choice):
            tokens.append(kvjax.generate(params, prompts, policy=policy, max_new_tokens=6).tokens)
    np.testing.assert_array_equal(*tokens)


@pytest.mark.slow
@pytest.mark.filterwarnings("error::UserWarning")  # dispatch would warn of a fallback
@pytest.mark.parametrize("kernels", KERNELS)
def test_the_same_tokens_after_chunks_and_turns(kernels: str) -> None:
    prompts = np.random.default_rng(0).integers(0, VOCAB, (2, 24))
    tokens = []
    for choice in ("reference", kernels):
        with use(choice):
            read = kvjax.prefill(decoder(), prompts, policy="snapkv:budget=16,window=4", chunk=16)
            tokens.append(kvjax.generate(decoder(), prompts[:, :7], cache=read, max_new_tokens=4).tokens)
    np.testing.assert_array_equal(*tokens)


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
@pytest.mark.parametrize("kernels", KERNELS)
def test_kernels_on_a_mesh(kernels: str) -> None:
    """Kernels in `shard_map` give the same results and communicate nothing."""
    rng = np.random.default_rng(1)
    B, H, G, S, D = 2, 2, 2, 20, 16
    q = rng.normal(size=(B, H * G, 1, D)).astype(np.float32)
    k, v = rng.normal(size=(2, B, H, S, D)).astype(np.float32)
    p, t = rng.integers(-1, 30, (B, H, S)).astype(np.int32), np.full((B, 1), 25, np.int32)

    def step(q, k, v, p, t):
        out, lse = slot_attention(q, k, v, t, p, scale=0.3)[:2]
        scores = window_scores(q, k, t, p, lse=lse, scale=0.3)
        return out, scores, top_tokens(scores, jnp.arange(S) + 0 * p, jnp.full(p.shape[:2], 5), size=6)

    head, row = jax.P("data", "model"), jax.P("data")
    mapped = jax.shard_map(
        step,
        mesh=kvjax.make_mesh(data=2, model=2, devices=jax.devices()[:4]),
        in_specs=(head, head, head, head, row),
        out_specs=head,
        check_vma=False,
    )
    with use(kernels):
        compiled = jax.jit(mapped).lower(q, k, v, p, t).compile()
    assert not [name for name in COLLECTIVES if f" {name}(" in compiled.as_text()]
    with use("reference"):
        expected = jax.jit(step)(q, k, v, p, t)
    for ours, theirs in zip(compiled(q, k, v, p, t), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
