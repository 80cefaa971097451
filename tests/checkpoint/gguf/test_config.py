"""The config of a GGUF file: RoPE in all its forms, partial rotation, and metadata that is refused."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from kvjax.checkpoint.gguf.config import hf_config
from kvjax.models import UnsupportedModelError, config_from_hf
from kvjax.models.rope import LinearScaling, Llama3Scaling, LongRopeScaling, Rope, YarnScaling

KEYS = {
    "context_length": 2048,
    "block_count": 2,
    "embedding_length": 32,
    "feed_forward_length": 64,
    "attention.head_count": 4,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
SHAPES = {"token_embd.weight": (40, 32), "output.weight": (40, 32)}


def config(arch="llama", tensors=None, missing=(), **keys):
    tensors = tensors or {}
    own = KEYS | {key.replace("__", "."): value for key, value in keys.items()}
    metadata = {f"{arch}.{key}": value for key, value in own.items() if key not in missing}
    shapes = SHAPES | {name: tensor.shape for name, tensor in tensors.items()}
    return config_from_hf(hf_config({"general.architecture": arch} | metadata, shapes, tensors.__getitem__))


def test_absent_keys():
    plain = config()
    assert (plain.vocab_size, plain.num_kv_heads, plain.head_dim) == (40, 4, 8)
    assert plain.rope == Rope(10_000.0)
    assert plain.norm_epsilon == 1e-5
    assert config(attention__sliding_window=0).family == "llama"
    assert config("phi3", attention__sliding_window=0).windows == (None, None)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3_stores_its_scaling_as_a_tensor(factor):
    scaling = Llama3Scaling(factor, 1.0, 4.0, 8192)
    plain = Rope(500_000.0).frequencies(128)
    divisors = (plain / scaling(plain, 500_000.0)).astype(np.float32)
    keys = {"embedding_length": 512, "rope__freq_base": 500_000.0}
    assert config(tensors={"rope_freqs.weight": divisors}, **keys).rope == Rope(500_000.0, scaling)
    assert config(tensors={"rope_freqs.weight": np.ones(64, np.float32)}, **keys).rope == Rope(500_000.0)
    for wrong in (divisors[:-1], divisors * np.linspace(1, 1.01, 64, dtype=np.float32)):
        with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight holds other numbers than Llama 3's"):
            config(tensors={"rope_freqs.weight": wrong}, **keys)


def test_linear_and_yarn():
    assert config(rope__scaling__type="linear", rope__scaling__factor=2.0).rope.scaling == LinearScaling(2.0)
    assert config(rope__scale_linear=4.0).rope.scaling == LinearScaling(4.0)
    assert config(rope__scaling__factor=4.0).rope.scaling == LinearScaling(4.0)  # llama.cpp's default type
    assert config(rope__scaling__type="none", rope__scaling__factor=4.0).rope.scaling is None
    yarn = config(rope__scaling__type="yarn", rope__scaling__factor=4.0, rope__scaling__original_context_length=512)
    assert isinstance(yarn.rope.scaling, YarnScaling)
    assert yarn.rope.scaling.original_max_position_embeddings == 512
    assert yarn.rope.scaling.attention_factor == pytest.approx(0.1 * np.log(4) + 1)


@pytest.mark.parametrize("times", [1.0, 0.5])
def test_the_attention_factor_of_a_file_multiplies_that_of_yarn(times):
    """As in llama.cpp, which always multiplies q and k by 0.1 ln(factor) + 1 as well."""
    keys = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__attn_factor": times}
    assert config(**keys).rope.attention_factor == pytest.approx(times * (0.1 * np.log(4) + 1))


def test_llama_3s_tensor_beside_another_scaling_is_refused():
    keys = {"embedding_length": 512, "rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
    ones = np.ones(64, np.float32)
    assert isinstance(config(tensors={"rope_freqs.weight": ones}, **keys).rope.scaling, YarnScaling)
    plain = Rope(10_000.0).frequencies(128)
    divisors = (plain / Llama3Scaling(8.0, 1.0, 4.0, 8192)(plain, 10_000.0)).astype(np.float32)
    with pytest.raises(UnsupportedModelError, match="type='yarn' is not supported; accepted: none, beside the tensor"):
        config(tensors={"rope_freqs.weight": divisors}, **keys)


def test_phi_stores_longrope_as_tensors_and_may_rotate_a_part():
    long, short = np.array([1, 2, 4], np.float32), np.array([1, 1, 2], np.float32)
    phi = config(
        "phi3",
        {"rope_factors_long.weight": long, "rope_factors_short.weight": short},
        rope__dimension_count=6,
        rope__scaling__attn_factor=1.25,
        rope__scaling__original_context_length=512,
    )
    assert phi.rope == Rope(10_000.0, LongRopeScaling((1.0, 1.0, 2.0), (1.0, 2.0, 4.0), 1.25, 512), 0.75)


def test_gemma_divides_queries_by_the_head_size_except_in_the_largest_models():
    window = {"attention__sliding_window": 9, "attention__key_length": 16}
    small, large = (config("gemma3", **window, block_count=count) for count in (12, 62))
    assert (small.scale, large.scale) == (16**-0.5, 8**-0.5)
    assert small.windows == (9, 9, 9, 9, 9, None) * 2
    assert (small.rope, small.window_rope) == (Rope(10_000.0), Rope(10_000.0))
    older = config("gemma2", **window)
    assert (older.attention_softcap, older.logit_softcap, older.windows) == (50.0, 30.0, (9, None))


@pytest.mark.parametrize(
    ("arch", "keys", "message"),
    [
        (
            "gemma",
            {},
            "general.architecture='gemma' is not supported; accepted: gemma2, gemma3, internlm2, llama, phi3, qwen2",
        ),
        (
            "llama",
            {"missing": ("block_count", "context_length")},
            "its metadata lacks llama.context_length, llama.block_count",
        ),
        ("llama", {"expert_count": 8}, "llama.expert_count=8 is not supported; accepted: 0"),
        ("llama", {"attn_logit_softcapping": 5.0}, "attn_logit_softcapping=5.0 is not supported; accepted keys"),
        ("gemma3", {"attn_logit_softcapping": 5.0}, "attn_logit_softcapping=5.0 is not supported"),
        ("gemma3", {}, "needs use_sliding_window and sliding_window"),
        ("llama", {"logit_scale": 0.5}, "llama.logit_scale=0.5 is not supported; accepted keys after llama.:"),
        (
            "llama",
            {"attention__head_count": [4, 2]},
            r"llama.attention.head_count=\[4, 2\] is not supported; accepted: an",
        ),
        ("llama", {"attention__value_length": 4}, "value_length=4 is not supported; accepted: the head size, 8"),
        ("llama", {"rope__dimension_count": 4}, "rope.dimension_count=4 is not supported; accepted: the head size, 8"),
        ("phi3", {"rope__dimension_count": 9}, "rope.dimension_count=9 is not supported; accepted: the head size, 8"),
        ("qwen2", {"attention__sliding_window": 9}, "qwen2.attention.sliding_window=9 is not supported; accepted: 0"),
        (
            "llama",
            {"rope__scaling__type": "su"},
            "rope.scaling.type='su' is not supported; accepted: none, linear, yarn",
        ),
        ("llama", {"rope__scaling__attn_factor": 1.2}, "attn_factor=1.2 is not supported; accepted: 1, unless"),
        (
            "llama",
            {"rope__scaling__type": "yarn", "rope__scaling__factor": "4", "rope__scaling__attn_factor": 2.0},
            "rope.scaling.factor='4' is not supported; accepted: a positive number",
        ),
        ("phi3", {"rope__scaling__type": "longrope"}, "longrope' needs the tensors rope_factors_short.weight and"),
        (
            "llama",
            {"feed_forward_length": "64"},
            "intermediate_size='64' is not supported; accepted: a positive integer",
        ),
    ],
)
def test_metadata_that_is_refused(arch, keys, message):
    with pytest.raises(UnsupportedModelError, match=message):
        config(arch, **keys)


def test_all_architectures_are_known_to_the_library():
    from kvjax.checkpoint.gguf.config import ARCHITECTURES

    assert set(ARCHITECTURES) <= set(gguf.MODEL_ARCH_NAMES.values())
