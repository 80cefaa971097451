"""Prompts by cuDNN: its real signature and lowering, what it is asked to compute, and what happens without it."""

from __future__ import annotations

import inspect
import warnings
from functools import partial
from importlib import import_module
from itertools import product
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as library

from benchmarks.aot.hlo import Instruction
from kvjax import pallas_kernels
from kvjax.pallas_kernels.dispatch import DeclinedError
from tests.pallas_kernels.cases import Case
from tests.pallas_kernels.checks import check_prompt, jitted, on_gpu, reference_of
from tests.pallas_kernels.ptx import accelerator

cudnn, triton, parts, dispatch = (
    import_module(f"kvjax.pallas_kernels.{name}")
    for name in ("prompt_attention.cudnn", "prompt_attention.triton", "prompt_attention.parts", "dispatch")
)
SIGNATURE = inspect.signature(library.dot_product_attention)
CALL = "__cudnn$fmhaSoftmax"


@pytest.fixture
def taken(monkeypatch):
    """cuDNN is taken to be there: programs are traced and compiled for it, and none is run."""
    monkeypatch.setattr(library, "check_cudnn_version", lambda: 91_000)
    monkeypatch.setattr(cudnn, "check_compiles", lambda *heads: None)


@pytest.fixture
def asked(taken, monkeypatch):
    """The mask types of the calls. cuDNN is replaced by the reference in float32, of the same signature.

    What cuDNN writes beyond the end of a row is NaN.
    """
    masks = []

    def attend(*args, **kwargs):
        given = SIGNATURE.bind(*args, **kwargs)
        given.apply_defaults()
        a = SimpleNamespace(**given.arguments)
        assert (a.qkv_layout, a.return_residual, a.bias, a.mask, a.q_offsets) == ("BNTH", True, None, None, None)
        masks.append(a.mask_type.name)
        N, M = a.query.shape[2], a.key.shape[2]
        lengths, held = (
            jnp.full(len(x), x.shape[2]) if given is None else given
            for x, given in ((a.query, a.q_seqlen), (a.key, a.kv_seqlen))
        )
        first = 0
        if a.mask_type.name == "PADDING":
            first = M  # all queries see all keys
        else:
            assert (N, a.kv_seqlen) == (M, a.q_seqlen)
        t = jnp.where(jnp.arange(N) < lengths[:, None], first + jnp.arange(N), -1)
        p = jnp.where(jnp.arange(M) < held[:, None], jnp.arange(M), -1)
        p = jnp.broadcast_to(p[:, None], a.key.shape[:3])
        wide = (x.astype(jnp.float32) for x in (a.query, a.key, a.value))
        out, lse = reference_of("prompt_attention")(*wide, t, p, scale=a.scale, window=a.sliding_window_length)
        beyond = (t < 0)[:, None]
        return jnp.where(beyond[..., None], jnp.nan, out).astype(a.query.dtype), jnp.where(beyond, jnp.nan, lse)

    monkeypatch.setattr(library, "dot_product_attention", attend)
    return masks


@pytest.mark.skipif(not on_gpu(), reason="cuDNN needs a GPU")
@pytest.mark.parametrize(("head_dim", "window", "group"), [*product([64, 80, 96, 128], [None, 100], [1, 4, 7])])
@pytest.mark.parametrize("slots", [0, 700])
def test_on_a_gpu(head_dim, window, group, slots, monkeypatch):
    monkeypatch.setattr(parts, "LEAST_TOKENS", 256)
    check_prompt(jitted(cudnn.prompt_attention), Case(head_dim, group, 300, 0, "bfloat16", window=window), slots)


@pytest.mark.skipif(not on_gpu(), reason="cuDNN needs a GPU")
@pytest.mark.parametrize(("head_dim", "group"), [*product([64, 80, 128], [1, 4, 7])])
def test_cached_slots_on_a_gpu(head_dim, group):
    """Heads have 700, 70 and no entries before 300 new tokens."""
    rng = np.random.default_rng(group)
    q, k, v = (
        rng.normal(size=(2, *shape, head_dim)).astype(jnp.bfloat16) for shape in ((2 * group, 300), (2, 700), (2, 700))
    )
    t = np.tile(700 + np.arange(300), (2, 1)).astype(np.int32)
    p = np.broadcast_to(np.arange(700), (2, 2, 700)).astype(np.int32).copy()
    p[1, 0, 70:] = p[1, 1] = -1
    assert cudnn.in_front(t, p)
    out, lse = jax.jit(partial(cudnn.over_slots, scale=head_dim**-0.5))(q, k, v, t, p)
    wide = (x.astype(np.float32) for x in (q, k, v))
    expected, expected_lse = reference_of("prompt_attention")(*wide, t, p, scale=head_dim**-0.5)
    seen = np.isfinite(expected_lse)
    np.testing.assert_allclose(out.astype(jnp.float32)[seen], expected[seen], rtol=2e-2, atol=1e-2)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("most", [cudnn.ROLLED_BYTES, 1])
def test_padded_rows_begin_at_the_left(asked, monkeypatch, window, most):
    """Rows are full, padded and empty; all heads at once and one kv head at a time."""
    monkeypatch.setattr(cudnn, "ROLLED_BYTES", most)
    check_prompt(jitted(cudnn.prompt_attention), Case(64, 4, 40, 0, "bfloat16", window=window), 0)
    assert asked == ["CAUSAL", "PADDING_CAUSAL"]  # both are compiled, one runs


def test_rows_without_padding_are_handed_on_as_they_are(asked, monkeypatch):
    attend = library.dot_product_attention

    def unpadded(*args, mask_type, **kwargs):
        nothing = 1 if mask_type is library.MaskType.CAUSAL else jnp.nan
        return [nothing * x for x in attend(*args, mask_type=mask_type, **kwargs)]

    monkeypatch.setattr(library, "dot_product_attention", unpadded)
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, heads, 30, 16)).astype(jnp.bfloat16) for heads in (4, 2, 2))
    t = np.arange(30) + np.array([[0], [7]])
    p = np.broadcast_to(t[:, None], (2, 2, 30))
    out, lse = jax.jit(partial(cudnn.prompt_attention, scale=0.25))(q, k, v, t, p)
    wide = (x.astype(np.float32) for x in (q, k, v))
    expected, expected_lse = reference_of("prompt_attention")(*wide, t, p, scale=0.25)
    np.testing.assert_allclose(out.astype(jnp.float32), expected, rtol=1e-2, atol=1e-2)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(("group", "window"), [(4, None), (7, 25)])
def test_a_chunk_attends_to_itself_and_to_slots_in_any_order(asked, monkeypatch, group, window):
    """Slots by Triton, interpreted. Some slots are empty, some out of the window."""
    monkeypatch.setattr(parts, "LEAST_TOKENS", 40)
    case = Case(64, group, 40, 0, "bfloat16", window=window)
    check_prompt(jitted(cudnn.prompt_attention, interpret=True), case, 50)
    assert asked


@pytest.mark.long
@pytest.mark.parametrize("case", ["in front", "padding", "order", "age"])
def test_cached_slots_before_a_chunk(asked, monkeypatch, case):
    """cuDNN takes those in the first slots, whose number differs between heads, and Triton all others."""
    monkeypatch.setattr(parts, "LEAST_TOKENS", 20)
    calls = []
    monkeypatch.setattr(
        jax.lax, "cond", lambda chosen, one, other: (calls.append(bool(chosen)), (one if chosen else other)())[1]
    )
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, *shape, 16)).astype(jnp.bfloat16) for shape in ((8, 20), (2, 50), (2, 50)))
    t = np.tile(40 + np.arange(20), (2, 1)).astype(np.int32)
    p = np.broadcast_to(np.arange(30), (2, 2, 30)).copy()
    p[1, 0, 7:] = p[1, 1] = -1  # a head without entries
    if case == "padding":
        t[0, :3] = -1
    elif case == "order":
        p[0, 0, 4] = -1
    elif case == "age":
        p[0, 1, 29] = 41
    p = np.concatenate([p, np.broadcast_to(t[:, None], (2, 2, 20))], axis=2).astype(np.int32)
    out, lse = cudnn.prompt_attention(q, k, v, t, p, scale=0.25, interpret=True)
    wide = (x.astype(np.float32) for x in (q, k, v))
    expected, expected_lse = reference_of("prompt_attention")(*wide, t, p, scale=0.25)
    np.testing.assert_allclose(out.astype(jnp.float32), expected, rtol=2e-2, atol=2e-2)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5)
    assert calls[1:] == [case == "in front"]
    assert ("PADDING" in asked) == (case == "in front")


def test_two_softmaxes_are_joined():
    """Logits of 1e4 do not matter, and the one result is exact where the other part saw nothing."""
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(6, 7)) + np.array([0, 1e4, -1e4, 0, 0, 0])[:, None]
    logits[3, :4] = logits[4, 4:] = logits[5] = -np.inf
    v = rng.normal(size=(7, 5))

    def attention(part):
        peak = logits[:, part].max(axis=1)
        weights = np.exp(logits[:, part] - np.where(np.isfinite(peak), peak, 0)[:, None])
        total = weights.sum(axis=1)
        with np.errstate(divide="ignore"):
            return np.float32(weights @ v[part] / np.maximum(total, 1e-30)[:, None]), np.float32(peak + np.log(total))

    one, other = attention(slice(4)), attention(slice(4, 7))
    out, lse = map(np.asarray, parts.joined(one, other))
    for mine, expected in zip((out, lse), attention(slice(7)), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=2e-3, atol=1e-6)  # float32 rounds a log-sum-exp of 1e4 to 1e-3
        np.testing.assert_allclose(mine[[0, 3, 4, 5]], expected[[0, 3, 4, 5]], rtol=1e-5, atol=1e-6)
    for row, (alone, alone_lse) in ((3, other), (4, one), (5, one)):
        np.testing.assert_array_equal(out[row], alone[row])
        np.testing.assert_array_equal(lse[row], alone_lse[row])


def lowered(head_dim, window, tokens=256, heads=(8, 2), batch=2, where=None):
    shapes = [
        *(jax.ShapeDtypeStruct((batch, H, tokens, head_dim), jnp.bfloat16, sharding=where) for H in (*heads, heads[1])),
        jax.ShapeDtypeStruct((batch, tokens), jnp.int32, sharding=where),
    ]
    traced = jax.jit(partial(cudnn.by_cudnn, scale=0.1, window=window)).trace(*shapes)
    return traced.lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize(("head_dim", "window"), [*product([64, 80, 96, 128], [None, 100])])
def test_the_real_call_is_lowered(taken, head_dim, window):
    """JAX's own checks and lowering, without its GPU: one call for rows without padding, and one for padded rows."""
    text = lowered(head_dim, window).as_text()
    assert text.count(f"@{CALL}(") == 2
    assert text.count("PADDING_CAUSAL") == 1
    assert text.count("sliding_window_length") == text.count(f"sliding_window_length\\22: {window or 0}") == 2


def test_the_real_call_over_slots_is_lowered(taken):
    q, k = (jax.ShapeDtypeStruct((2, heads, n, 64), jnp.bfloat16) for heads, n in ((8, 256), (2, 700)))
    t, p = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((2, 256), (2, 2, 700)))
    traced = jax.jit(partial(cudnn.over_slots, scale=0.1)).trace(q, k, k, t, p)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count(f"@{CALL}(") == text.count("PADDING") == 1
    assert "PADDING_CAUSAL" not in text


@pytest.mark.aot
@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")
def test_unpadded_rows_are_not_moved_and_padded_rows_by_a_few_heads(taken):
    """131,072 tokens of an 8B: queries take 1.07 GB, and those of a kv head 0.13 GB."""
    where = jax.sharding.SingleDeviceSharding(accelerator("h200:1"))
    program = lowered(128, None, tokens=131_072, heads=(32, 8), batch=1, where=where).compile()
    branches = {}
    for line in program.as_text().splitlines():
        if line.endswith("{") and "(" in line:
            branches[line] = kinds = []
        elif (instruction := Instruction.read(line)) is not None:
            kinds.append(CALL if CALL in line else instruction.kind)
    (unpadded,) = [kinds for kinds in branches.values() if CALL in kinds and "fusion" not in kinds]
    assert set(unpadded) <= {CALL, "parameter", "get-tuple-element", "tuple", "bitcast"}
    assert sum(CALL in kinds for kinds in branches.values()) == 2
    assert program.memory_analysis().temp_size_in_bytes < 0.7e9  # what is moved to one side and back, of one kv head


def test_what_cudnn_does_not_serve_is_left_to_triton_without_a_word(taken, monkeypatch):
    def tried(new, slots, dtype="bfloat16", bias=None):
        q, k = (jax.ShapeDtypeStruct((1, 1, n, 64), dtype) for n in (new, new + slots))
        t, p = (jax.ShapeDtypeStruct((1, *n), jnp.int32) for n in ((new,), (1, new + slots)))
        jax.eval_shape(lambda *arrays: cudnn.prompt_attention(*arrays, scale=1.0, bias=bias), q, k, k, t, p)

    monkeypatch.setattr(parts, "LEAST_TOKENS", 16)
    tried(5, 0)
    tried(16, 9)
    for arguments in ((15, 9), (5, 0, "float32"), (16, 9, "bfloat16", np.zeros((1, 1, 25), np.float32))):
        with pytest.raises(DeclinedError):
            tried(*arguments)
    monkeypatch.undo()
    if not on_gpu():  # compiled ahead
        with pytest.raises(DeclinedError):
            tried(5, 0)


def test_a_failure_of_the_compiler_hands_on_to_triton_and_is_said_once(monkeypatch):
    """The call is lowered, and XLA refuses to compile it, as it does if cuDNN has no engine for it."""
    compiled = []

    def unknown(q, k, v, positions, **options):
        compiled.append(q.shape)
        shapes = jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)
        return jax.ffi.ffi_call("no_such_target", shapes)(q, k, v)

    def by_triton(q, *arrays, interpret, **options):
        return q, q[..., 0]

    monkeypatch.setattr(dispatch, "_warned", set())
    monkeypatch.setattr(dispatch, "platform", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(platform="gpu")])
    monkeypatch.setattr(cudnn, "by_cudnn", unknown)
    monkeypatch.setattr(triton, "prompt_attention", by_triton)
    cudnn.failure.cache_clear()
    x, t = jnp.ones((1, 1, 8, 64), jnp.bfloat16), jnp.arange(8)[None]
    attend = partial(pallas_kernels.prompt_attention, x, x, x, t, t[None], scale=1.0)
    with pytest.warns(UserWarning, match=r"by cudnn \(cuDNN with heads of 64 channels: .*no_such_target") as said:
        jax.jit(lambda: [attend() for layer in range(2)])()
    attend()
    assert len(said) == len(compiled) == 1
    with warnings.catch_warnings(), pallas_kernels.use("triton"):
        warnings.simplefilter("error")
        cudnn.failure.cache_clear()
        assert attend()[0] is x
    assert len(compiled) == 1, "cuDNN is not tried where it is turned off"
    cudnn.failure.cache_clear()
