"""Mapping Hugging Face configs of transformers 5 and earlier versions, and refusing unsupported computations."""

import math

import pytest

from kvjax.models import FAMILIES, Rope, UnsupportedModelError, config_from_hf, family
from kvjax.models.rope import DynamicScaling, LinearScaling, Llama3Scaling, LongRopeScaling, YarnScaling

LLAMA = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
MISTRAL = LLAMA | {"model_type": "mistral", "num_attention_heads": 8}
QWEN2 = LLAMA | {"model_type": "qwen2", "num_key_value_heads": 2}
QWEN3 = QWEN2 | {"model_type": "qwen3"}
PHI3 = LLAMA | {"model_type": "phi3"}
MINISTRAL = MISTRAL | {"model_type": "ministral"}
SMOLLM3 = QWEN2 | {"model_type": "smollm3"}
OLMO2 = LLAMA | {"model_type": "olmo2"}
GEMMA2 = QWEN2 | {"model_type": "gemma2", "head_dim": 8}
GEMMA3 = GEMMA2 | {"model_type": "gemma3_text"}
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_key_value_heads": 2}
QWEN3_MOE = QWEN2 | {"model_type": "qwen3_moe"}
GPT_OSS = LLAMA | {"model_type": "gpt_oss", "num_key_value_heads": 2, "rope_scaling": {"type": "linear", "factor": 2.0}}
GRANITE = LLAMA | {"model_type": "granite"}
INTERNLM2 = LLAMA | {"model_type": "internlm2"}
LONGROPE = {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
FULL, SLIDING = "full_attention", "sliding_attention"
LINEAR = {"rope_scaling": {"type": "linear", "factor": 4.0}}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {
    "factor": None,
    "mscale": 2.0,
    "mscale_all_dim": 0.5,
    "beta_fast": 16,
    "beta_slow": 2,
    "truncate": False,
    "original_max_position_embeddings": 128,
}


@pytest.mark.parametrize(
    ("fields", "rope"),
    [
        ({}, Rope(10_000.0)),
        ({"rope_theta": 5e5, "rope_scaling": None}, Rope(5e5)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, Rope(5e5)),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}, Rope(5e5, Llama3Scaling(8, 1, 4, 64))),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
            Rope(5e5, Llama3Scaling(8, 1, 4, 64)),
        ),
        ({"rope_scaling": {"type": "llama3", **LLAMA3}}, Rope(10_000.0, Llama3Scaling(8, 1, 4, 64))),
        (
            {
                "max_position_embeddings": 512,
                "rope_scaling": {"type": "llama3", **LLAMA3, "original_max_position_embeddings": None},
            },
            Rope(10_000.0, Llama3Scaling(8, 1, 4, 512)),
        ),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, Rope(10_000.0, LinearScaling(4.0))),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_theta": 1e6, "max_position_embeddings": 512},
            Rope(1e6, DynamicScaling(2.0, 512)),
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
            Rope(10_000.0, YarnScaling(4.0, 0.1 * math.log(4) + 1, 32.0, 1.0, True, 128)),
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", **YARN}, "max_position_embeddings": 1024},
            Rope(10_000.0, YarnScaling(8.0, (0.2 * math.log(8) + 1) / (0.05 * math.log(8) + 1), 16.0, 2.0, False, 128)),
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", **YARN, "attention_factor": 1.5, "factor": 2}},
            Rope(10_000.0, YarnScaling(2.0, 1.5, 16.0, 2.0, False, 128)),
        ),
        (
            {
                "max_position_embeddings": 1024,
                "original_max_position_embeddings": 64,
                "rope_scaling": {"type": "su", "short_factor": [1, 1.5], "long_factor": [2, 4.0]},
            },
            Rope(10_000.0, LongRopeScaling((1.0, 1.5), (2.0, 4.0), math.sqrt(1 + math.log(16) / math.log(64)), 64)),
        ),
    ],
)
def test_rope_of_new_and_old_configs(fields, rope):
    assert config_from_hf(LLAMA | fields).rope == rope


def test_absent_and_null_fields_have_the_defaults_of_transformers():
    llama = config_from_hf(LLAMA | {"head_dim": None, "torch_dtype": "bfloat16"})
    assert (llama.num_kv_heads, llama.head_dim, llama.max_positions, llama.tie_embeddings) == (4, 4, 2048, False)
    assert llama.windows == (None, None)
    mistral = config_from_hf(MISTRAL)
    assert (mistral.num_kv_heads, mistral.max_positions, mistral.windows) == (8, 131_072, (4096, 4096))
    heads = config_from_hf(MISTRAL | {"num_attention_heads": 4, "num_key_value_heads": None, "sliding_window": None})
    assert (heads.num_kv_heads, heads.windows) == (4, (None, None))


def test_biases_and_norms_are_the_familys():
    def parts(hf):
        config = config_from_hf(hf)
        return config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm

    assert parts(LLAMA) == parts(MISTRAL) == parts(PHI3) == (False, False, False, False)
    assert parts(LLAMA | {"attention_bias": True}) == parts(INTERNLM2) == (True, True, False, False)
    assert parts(LLAMA | {"mlp_bias": True}) == (False, False, True, False)
    assert parts(INTERNLM2 | {"bias": False}) == (False, False, False, False)
    assert parts(QWEN2) == (True, False, False, False)
    assert parts(QWEN3) == (False, False, False, True)
    assert parts(QWEN3 | {"attention_bias": True}) == (True, True, False, True)


@pytest.mark.parametrize("family", [QWEN2, QWEN3])
@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({"sliding_window": 8, "max_window_layers": 0}, (None, None)),  # use_sliding_window is absent
        ({"use_sliding_window": True, "max_window_layers": 1}, (None, 4096)),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, (8, 8)),
        ({"use_sliding_window": True, "sliding_window": 8}, (None, None)),  # from layer 28 on
        ({"use_sliding_window": True, "sliding_window": 8, "layer_types": [SLIDING, FULL]}, (8, None)),
        ({"use_sliding_window": True, "sliding_window": None, "layer_types": [FULL, FULL]}, (None, None)),
    ],
)
def test_windows_of_qwen(family, fields, windows):
    assert config_from_hf(family | fields).windows == windows


def test_rope_of_phi():
    """The original length is a field of the config, by default 4,096. One inside the scaling is ignored."""
    inside = LONGROPE | {"original_max_position_embeddings": 64}
    fields = {"partial_rotary_factor": 0.5, "max_position_embeddings": 131_072, "rope_scaling": inside}
    expected = LongRopeScaling((1.0,), (2.0,), math.sqrt(1 + math.log(32) / math.log(4096)), 4096)
    assert config_from_hf(PHI3 | fields).rope == Rope(10_000.0, expected, 0.5)


@pytest.mark.parametrize(
    ("family", "fields", "same"),
    [
        (LLAMA, {"rope_parameters": {"rope_type": "default", "rope_theta": None}}, {}),
        (LLAMA, {"rope_theta": None, "rope_parameters": {"rope_theta": 500.0}}, {"rope_theta": 500.0}),
        (LLAMA, {"rope_scaling": {"type": "linear", "rope_type": None, "factor": 4.0, "beta_fast": None}}, LINEAR),
    ],
)
def test_null_in_rope_is_absent(family, fields, same):
    assert config_from_hf(family | fields) == config_from_hf(family | same)


@pytest.mark.parametrize(
    "hf",
    [
        LLAMA | {"num_key_value_heads": 2, "head_dim": 6, "tie_word_embeddings": True},
        LLAMA | {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        LLAMA | {"rope_scaling": {"type": "linear", "factor": 4.0}},
        LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
        LLAMA | {"rope_scaling": {"type": "yarn", **YARN}},
        LLAMA | {"rope_scaling": {"type": "longrope", "factor": 4, "short_factor": [1, 2], "long_factor": [3, 4]}},
        MISTRAL | {"sliding_window": 7, "rms_norm_eps": 1e-5},
        MISTRAL | {"sliding_window": None},
        LLAMA | {"attention_bias": True},
        LLAMA | {"mlp_bias": True},
        QWEN2 | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        QWEN2 | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
        QWEN2 | {"rope_scaling": {"type": "yarn", **YARN}},
        QWEN3 | {"attention_bias": True, "use_sliding_window": True, "layer_types": [SLIDING, FULL]},
        QWEN3,
        PHI3 | {"sliding_window": 7, "partial_rotary_factor": 0.5},
        PHI3 | {"rope_scaling": LONGROPE, "partial_rotary_factor": 0.5, "original_max_position_embeddings": 512},
        MINISTRAL | {"sliding_window": 7, "layer_types": [FULL, SLIDING]},
        MINISTRAL | {"sliding_window": None},
        SMOLLM3,
        SMOLLM3 | {"no_rope_layers": [0, 1, 1], "use_sliding_window": True, "sliding_window": 7, "mlp_bias": True},
        OLMO2 | {"attention_bias": True},
        GEMMA2 | {"query_pre_attn_scalar": 144, "attn_logit_softcapping": None, "tie_word_embeddings": False},
        GEMMA2 | {"layer_types": [FULL, FULL], "attention_bias": True},
        GEMMA3 | {"sliding_window_pattern": 2, "rope_local_base_freq": 500.0, "final_logit_softcapping": 20.0},
        GEMMA3 | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "layer_types": [FULL, SLIDING]},
        GPT_OSS,
        GPT_OSS | {"layer_types": [FULL, FULL], "attention_bias": False, "swiglu_limit": 3.0},
        GPT_OSS | {"rope_scaling": {"type": "yarn", **YARN}, "quantization_config": {"quant_method": "mxfp4"}},
        GRANITE | {"embedding_multiplier": 12, "residual_multiplier": 0.2, "logits_scaling": 8.0},
        INTERNLM2,
        INTERNLM2 | {"bias": False, "rope_theta": 1e6, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        INTERNLM2 | {"rope_scaling": {"type": "linear", "factor": 2.0}},
    ],
)
def test_config_written_is_read_back(hf):
    config = config_from_hf(hf)
    written = family(config.family).config_to_hf(config)
    assert config_from_hf(written) == config
    if config.family == "internlm2":  # which supports the old form only
        assert "rope_parameters" not in written
        return
    if config.family == "gemma3_text":
        assert written["rope_parameters"].keys() == {FULL, SLIDING}
    # Each form of RoPE must suffice without the other.
    assert config_from_hf({k: v for k, v in written.items() if k != "rope_parameters"}) == config
    assert config_from_hf({k: v for k, v in written.items() if k not in ("rope_theta", "rope_scaling")}) == config


def test_gemma3_of_transformers_5_0():
    """It writes fields of models with one kind of RoPE beside those of each kind of layer."""
    kinds = {FULL: {"rope_type": "default", "rope_theta": 2e6}, SLIDING: {"rope_type": "default", "rope_theta": 2e4}}
    written = GEMMA3 | {"rope_parameters": kinds | {"rope_type": "default", "rope_theta": None}}
    assert config_from_hf(written) == config_from_hf(GEMMA3 | {"rope_parameters": kinds})
    with pytest.raises(UnsupportedModelError, match="rope_parameters"):
        config_from_hf(GEMMA3 | {"rope_parameters": kinds | {"rope_type": "yarn"}})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"model_type": "gpt2"},
            "model_type 'gpt2' is not supported; accepted: gemma2, gemma3_text, gpt_oss, granite, internlm2",
        ),
        ({"model_type": "gpt2"}, "Beyond Llama, its config has: nothing"),
        (
            {
                "model_type": "new",
                "layer_norm_eps": 1e-5,
                "num_experts": 8,
                "qk_layernorm": True,
                "mlp_only_layers": [],
            },
            "Beyond Llama, its config has: layer_norm_eps=1e-05, num_experts=8, qk_layernorm=True",
        ),
        ({"model_type": "phi3moe"}, "qwen2, qwen3"),
        ({"model_type": None}, "model_type 'None'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures="),
        ({"attention_bias": 1}, "attention_bias=1"),
        ({"mlp_bias": "yes"}, "mlp_bias='yes'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings=1"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ({"logits_scaling": 8.0}, "logits_scaling=8.0"),
        ({"num_local_experts": 8}, "num_local_experts=8"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"sliding_window": 8}, "sliding_window=8"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types="),
        ({"quantization_config": {"bits": 4}}, "quantization_config="),
        ({"vocab_size": None}, "vocab_size=None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps='small'"),
        ({"num_attention_heads": 5}, "head_dim is absent"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"head_dim": 5}, "head_dim=5 gives 5 channels to rotate"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"rope_scaling": {"type": "proportional", "factor": 2.0}}, "rope_type='proportional'"),
        ({"rope_scaling": {"type": ["linear"]}}, "rope_type=['linear']"),
        ({"rope_scaling": {"type": "linear"}}, "factor=None"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0, "alpha": 1.0}}, "alpha"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "head_dim": 2}, "too small for rope type 'dynamic'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": 1}}, "truncate=1"),
        ({"rope_scaling": {"type": "longrope", "short_factor": 1.0, "long_factor": [1.0]}}, "short_factor=1.0"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [1.0]}},
            "long_factor has 1 numbers; accepted: 2",
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "factor": None}}, "factor=None"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"rope_scaling": 2.0}, "rope_scaling=2.0"),
        ({"rope_theta": -1}, "rope_theta=-1"),
    ],
)
def test_unsupported_fields_are_named(fields, message):
    with pytest.raises(UnsupportedModelError) as caught:
        config_from_hf(LLAMA | fields)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        (MISTRAL, {"sliding_window": 0}, "sliding_window=0"),
        (MISTRAL, {"attention_bias": True}, "attention_bias=True"),
        (MISTRAL, {"layer_types": ["sliding_attention", "full_attention"]}, "layer_types="),
        (MISTRAL, {"architectures": ["MistralModel"]}, "architectures="),
        (QWEN2, {"attention_bias": False}, "attention_bias=False"),
        (QWEN2, {"layer_types": [SLIDING, FULL]}, "needs use_sliding_window"),
        (QWEN2, {"layer_types": [FULL]}, "accepted: 2 of"),
        (QWEN2, {"layer_types": [FULL, "chunked_attention"]}, "layer_types="),
        (QWEN2, {"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers=-1"),
        (QWEN2, {"use_mrope": True}, "use_mrope=True"),
        (QWEN2, {"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk_attention_config="),
        (QWEN3, {"head_dim": None}, "head_dim=None"),
        (QWEN3, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        (PHI3, {"attention_bias": True}, "attention_bias=True"),
        (PHI3, {"partial_rotary_factor": 2.0}, "partial_rotary_factor=2.0"),
        (PHI3, {"partial_rotary_factor": 0.25}, "head_dim=4 with partial_rotary_factor=0.25 gives 1 channels"),
        (PHI3, {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_type='yarn'"),
        (PHI3, {"rope_scaling": LONGROPE | {"short_mscale": 1.1}}, "short_mscale"),
        (PHI3, {"rope_scaling": LONGROPE}, "short_factor has 1 numbers; accepted: 2"),
        (PHI3, {"lm_head_bias": True}, "lm_head_bias=True"),
        (INTERNLM2, {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "accepted: 'default', 'linear', 'dynamic'"),
        (MINISTRAL, {"layer_types": [FULL, "chunked_attention"]}, "layer_types="),
        (MINISTRAL, {"attention_bias": True}, "attention_bias=True"),
        (SMOLLM3, {"no_rope_layers": [1]}, "no_rope_layers=[1]"),
        (SMOLLM3, {"no_rope_layers": [1, 2]}, "accepted: 2 of 0 and 1"),
        (SMOLLM3, {"layer_types": [FULL, SLIDING]}, "needs use_sliding_window"),
        (OLMO2, {"sliding_window": 8}, "sliding_window=8"),
        (OLMO2, {"clip_qkv": 8.0}, "clip_qkv=8.0"),
        (MIXTRAL, {"num_local_experts": 0}, "num_local_experts=0"),
        (MIXTRAL, {"num_experts_per_tok": 9}, "num_experts_per_tok=9 is more than num_local_experts=8"),
        (MIXTRAL, {"attention_bias": True}, "attention_bias=True"),
        (MIXTRAL, {"layer_types": [FULL, SLIDING]}, "layer_types="),
        (QWEN3_MOE, {"num_experts": 4}, "num_experts_per_tok=8 is more than num_experts=4"),
        (
            QWEN3_MOE,
            {"mlp_only_layers": [2]},
            "mlp_only_layers=[2] is not supported; accepted: a list of layers in 0 .. 1",
        ),
        (QWEN3_MOE, {"mlp_only_layers": 1}, "mlp_only_layers=1"),
        (QWEN3_MOE, {"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
        (QWEN3_MOE, {"norm_topk_prob": 1}, "norm_topk_prob=1"),
        (QWEN3_MOE, {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        (GPT_OSS, {"swiglu_alpha": 1.0}, "swiglu_alpha=1.0"),
        (GPT_OSS, {"swiglu_limit": 0}, "swiglu_limit=0"),
        (GPT_OSS, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config={'quant_method': 'fp8'}"),
        (GPT_OSS, {"quantization_config": "mxfp4"}, "quantization_config='mxfp4'"),
        (GPT_OSS, {"num_experts_per_tok": 200}, "num_experts_per_tok=200 is more than num_local_experts=128"),
        (GPT_OSS, {"layer_types": [SLIDING]}, "accepted: 2 of"),
        (GPT_OSS, {"mlp_bias": True}, "mlp_bias=True"),
        (GPT_OSS, {"attention_bias": 1}, "attention_bias=1"),
        (MIXTRAL, {"swiglu_limit": 7.0}, "swiglu_limit=7.0"),
        (MIXTRAL, {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config="),
        (GRANITE, {"residual_multiplier": 0.0}, "residual_multiplier=0.0"),
        (GRANITE, {"num_local_experts": 8}, "num_local_experts=8"),
        (LLAMA, {"embedding_multiplier": 2.0}, "embedding_multiplier=2.0"),
        (LLAMA, {"no_rope_layers": [1, 0]}, "no_rope_layers=[1, 0]"),
        (GEMMA2, {"hidden_activation": "silu"}, "hidden_activation='silu'"),
        (GEMMA2, {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        (GEMMA2, {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping=0.0"),
        (GEMMA2, {"layer_types": [FULL]}, "accepted: 2 of"),
        (GEMMA3, {"attn_logit_softcapping": 5.0}, "attn_logit_softcapping=5.0"),
        (GEMMA3, {"rope_parameters": {"rope_type": "default"}}, "rope_parameters="),
        (GEMMA3, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
        (LLAMA, {"hidden_activation": "gelu_pytorch_tanh"}, "hidden_activation='gelu_pytorch_tanh'"),
        (INTERNLM2, {"head_dim": 8}, "head_dim=8"),
        (INTERNLM2, {"bias": "no"}, "bias='no'"),
    ],
)
def test_fields_that_a_family_does_not_support(family, fields, message):
    with pytest.raises(UnsupportedModelError) as caught:
        config_from_hf(family | fields)
    assert message in str(caught.value)


SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
UNKNOWN = {"scale_emb": 12, "rope_interleaved": True, "norm_type": "layernorm", "is_causal": False}
NOT_NUMBERS = {
    "rope_theta": float("inf"),
    "rms_norm_eps": float("nan"),
    "rope_scaling": {"type": "linear", "factor": 1e39},
}


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_family_refuses_fields_that_it_does_not_know(name):
    hf = FAMILIES[name].config_to_hf(config_from_hf(SMALL | {"model_type": name}))
    config_from_hf(hf | {"unknown": None, "also_unknown": False, "torch_dtype": "bfloat16", "unsloth_fixed": True})
    for field, value in UNKNOWN.items():
        with pytest.raises(UnsupportedModelError, match=f"{field}={value!r}"):
            config_from_hf(hf | {field: value})


@pytest.mark.parametrize("field", NOT_NUMBERS)
def test_numbers_are_within_the_range_of_float32(field):
    with pytest.raises(UnsupportedModelError, match="a positive number of float32's range"):
        config_from_hf(SMALL | {"model_type": "llama", field: NOT_NUMBERS[field]})
