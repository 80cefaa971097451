"""Mapping Hugging Face configs of transformers 5 and earlier versions."""

import math

import pytest

from kvjax.models import Rope, UnsupportedModelError, config_from_hf, family
from kvjax.models.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    YarnScaling,
)
from tests.models.configs import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    FULL,
    GEMMA2,
    GEMMA3,
    GEMMA4,
    GLM4,
    GLM4_MOE,
    GLM4_MOE_LITE,
    GPT_OSS,
    GRANITE,
    GRANITEMOE,
    INTERNLM2,
    LINEAR,
    LLAMA,
    LLAMA3,
    LONGROPE,
    MINISTRAL,
    MINISTRAL3,
    MISTRAL,
    OLMO2,
    OLMO3,
    PHI3,
    QWEN2,
    QWEN3,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_NEXT,
    RECURRENT,
    SLIDING,
    SMOLLM3,
    YARN,
)


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


@pytest.mark.parametrize(
    ("fields", "before"),
    [
        ({}, (3,)),
        ({"full_attention_interval": 2}, (1, 1)),
        ({"layer_types": [FULL, RECURRENT, RECURRENT, FULL]}, (0, 2)),
        ({"layer_types": [FULL] * 4}, (0, 0, 0, 0)),
    ],
)
def test_recurrent_layers_of_qwen(fields, before):
    config = config_from_hf(QWEN3_5 | fields)
    assert config.recurrence.before == before
    assert (config.num_layers, config.num_layers + config.num_recurrent) == (len(before), 4)


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


def test_null_for_truncate_is_false():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    null, false, absent = (
        config_from_hf(LLAMA | {"rope_parameters": yarn | own}) for own in ({"truncate": None}, {"truncate": False}, {})
    )
    assert null == false != absent
    assert config_from_hf(LLAMA | LINEAR | {"rope_parameters": {"truncate": None}}) == config_from_hf(LLAMA | LINEAR)


@pytest.mark.parametrize("family", [GPT_OSS, MINISTRAL3])
def test_an_empty_rope_scaling_is_absent(family):
    assert config_from_hf(family | {"rope_scaling": {}}).rope == config_from_hf(family | {"rope_scaling": None}).rope


@pytest.mark.parametrize("family", [GEMMA3, OLMO3])
def test_rope_scaling_changes_the_rope_of_full_layers(family):
    """Beside `rope_parameters` by kind, whose other fields stay."""
    kinds = {FULL: {"rope_type": "default", "rope_theta": 2e6}, SLIDING: {"rope_type": "default", "rope_theta": 2e4}}
    config = config_from_hf(family | {"rope_parameters": kinds, "rope_scaling": {"rope_type": "linear", "factor": 4.0}})
    assert (config.rope, config.window_rope) == (Rope(2e6, LinearScaling(4.0)), Rope(2e4))


def test_the_theta_of_olmo3_in_old_configs_is_that_of_all_layers():
    config = config_from_hf(OLMO3 | {"rope_theta": 2e6, "rope_scaling": {"rope_type": "linear", "factor": 4.0}})
    assert (config.rope, config.window_rope) == (Rope(2e6, LinearScaling(4.0)), Rope(2e6))


@pytest.mark.parametrize(
    ("family", "field"),
    [(DEEPSEEK_V3, "norm_topk_prob"), (DEEPSEEK_V3, "rope_interleave"), (INTERNLM2, "bias"), (GLM4, "attention_bias")],
)
def test_a_flag_that_is_null_is_false(family, field):
    null = config_from_hf(family | {field: None})
    assert null == config_from_hf(family | {field: False}) != config_from_hf(family | {field: True})


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
        QWEN3_5,
        QWEN3_5 | {"layer_types": [FULL, RECURRENT, RECURRENT, FULL], "linear_conv_kernel_dim": 2},
        QWEN3_5 | {"partial_rotary_factor": 0.5, "rope_scaling": {"type": "yarn", **YARN}},
        QWEN3_5_MOE | {"num_experts": 9, "num_experts_per_tok": 4, "shared_expert_intermediate_size": 20},
        QWEN3_NEXT,
        QWEN3_NEXT | {"norm_topk_prob": False, "moe_intermediate_size": 20, "full_attention_interval": 2},
        DEEPSEEK_V2,
        DEEPSEEK_V2 | {"q_lora_rank": 8, "first_k_dense_replace": 1, "n_shared_experts": 1},
        DEEPSEEK_V3,
        DEEPSEEK_V3 | {"q_lora_rank": None, "rope_interleave": False, "n_group": 4, "topk_group": 3},
        DEEPSEEK_V3 | {"rope_scaling": {"type": "yarn", **YARN, "factor": 40.0}, "n_shared_experts": 2},
        GLM4_MOE,
        GLM4_MOE | {"use_qk_norm": True, "first_k_dense_replace": 0, "head_dim": 8, "norm_topk_prob": False},
        GLM4_MOE_LITE,
        GLM4_MOE_LITE | {"mlp_layer_types": ["sparse", "dense"], "routed_scaling_factor": 1.0},
        PHI3 | {"sliding_window": 7, "partial_rotary_factor": 0.5},
        PHI3 | {"rope_scaling": LONGROPE, "partial_rotary_factor": 0.5, "original_max_position_embeddings": 512},
        MINISTRAL | {"sliding_window": 7, "layer_types": [FULL, SLIDING]},
        MINISTRAL | {"sliding_window": None},
        MINISTRAL3,
        MINISTRAL3 | {"rope_parameters": {"rope_type": "yarn", **YARN, "llama_4_scaling_beta": 0.2}},
        SMOLLM3,
        SMOLLM3 | {"no_rope_layers": [0, 1, 1], "use_sliding_window": True, "sliding_window": 7, "mlp_bias": True},
        OLMO2 | {"attention_bias": True},
        OLMO3,
        OLMO3 | {"rope_scaling": {"type": "yarn", **YARN}, "sliding_window": 7, "layer_types": [SLIDING, FULL]},
        GLM4,
        GLM4 | {"attention_bias": False, "partial_rotary_factor": 0.25, "rope_scaling": {"type": "yarn", **YARN}},
        GEMMA2 | {"query_pre_attn_scalar": 144, "attn_logit_softcapping": None, "tie_word_embeddings": False},
        GEMMA2 | {"layer_types": [FULL, FULL], "attention_bias": True},
        GEMMA3 | {"sliding_window_pattern": 2, "rope_local_base_freq": 500.0, "final_logit_softcapping": 20.0},
        GEMMA3 | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "layer_types": [FULL, SLIDING]},
        GEMMA4,
        GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "layer_types": [SLIDING, FULL]},
        GEMMA4 | {"per_layer_config": {"1": {"head_dim": 12}}, "layer_types": [SLIDING, FULL]},
        GEMMA4 | {"hidden_size_per_layer_input": 0, "use_double_wide_mlp": True},
        GEMMA4 | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 6},
        GEMMA4 | {"layer_types": [FULL, FULL], "num_kv_shared_layers": 1, "use_double_wide_mlp": True},
        GEMMA4 | {"final_logit_softcapping": 20.0, "attention_bias": True, "layer_types": [FULL, FULL]},
        GPT_OSS,
        GPT_OSS | {"layer_types": [FULL, FULL], "attention_bias": False, "swiglu_limit": 3.0},
        GPT_OSS | {"rope_scaling": {"type": "yarn", **YARN}, "quantization_config": {"quant_method": "mxfp4"}},
        GRANITE | {"embedding_multiplier": 12, "residual_multiplier": 0.2, "logits_scaling": 8.0},
        GRANITEMOE | {"num_local_experts": 4, "attention_bias": True, "residual_multiplier": 0.2},
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
    if config.family in ("gemma3_text", "gemma4_text"):
        assert written["rope_parameters"].keys() == {FULL, SLIDING}
    if config.family == "gemma4_text":  # which supports the new form only
        assert not {"rope_theta", "rope_scaling"} & written.keys()
        return
    # Each form of RoPE must suffice without the other.
    assert config_from_hf({k: v for k, v in written.items() if k != "rope_parameters"}) == config
    assert config_from_hf({k: v for k, v in written.items() if k not in ("rope_theta", "rope_scaling")}) == config


@pytest.mark.parametrize("family", [GEMMA3, OLMO3])
def test_kinds_of_layers_in_transformers_5_0(family):
    """It writes fields of models with one kind of RoPE beside those of each kind of layer."""
    kinds = {FULL: {"rope_type": "default", "rope_theta": 2e6}, SLIDING: {"rope_type": "default", "rope_theta": 2e4}}
    written = family | {"rope_parameters": kinds | {"rope_type": "default", "rope_theta": None}}
    assert config_from_hf(written) == config_from_hf(family | {"rope_parameters": kinds})
    with pytest.raises(UnsupportedModelError, match="rope_parameters"):
        config_from_hf(family | {"rope_parameters": kinds | {"rope_type": "yarn"}})


@pytest.mark.parametrize(
    ("fields", "full"),
    [
        ({"layer_types": [SLIDING, SLIDING]}, (2, 16)),  # the last layer has full attention in any case
        ({"num_global_key_value_heads": 1}, (2, 16)),  # counts only where keys are values
        ({"num_global_key_value_heads": 1, "attention_k_eq_v": True}, (1, 16)),
        ({"per_layer_config": {}}, (2, 8)),
        ({"per_layer_config": {1: {"head_dim": 12}}}, (2, 12)),
        ({"per_layer_config": {"01": {"head_dim": 12}}}, (2, 12)),
        ({"per_layer_config": {"1": {"num_key_value_heads": 4}}}, (4, 8)),
    ],
)
def test_heads_of_gemma4(fields, full):
    config = config_from_hf(GEMMA4 | {"layer_types": [SLIDING, FULL]} | fields)
    assert (config.heads_of(0), config.heads_of(1)) == ((2, 8), full)
    assert config.windows == (512, None)
    assert config.rope_of(1) == Rope(1e6, ProportionalScaling(1.0, 0.25))


def test_proportional_rope_turns_some_pairs_with_the_frequencies_of_a_whole_head():
    rope = Rope(1e4, ProportionalScaling(2.0, 0.25))
    assert rope.frequencies(16).tolist() == pytest.approx([0.5, 0.5 * 1e4 ** (-2 / 16), *[0] * 6])
    assert rope.channels(16) == 16
