"""Configs of Hugging Face that ask for a computation that no family has are refused."""

import pytest

from kvjax.models import FAMILIES, UnsupportedModelError, config_from_hf
from tests.models.configs import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    FULL,
    GEMMA2,
    GEMMA3,
    GLM4,
    GLM4_MOE,
    GLM4_MOE_LITE,
    GPT_OSS,
    GRANITE,
    GRANITEMOE,
    INTERNLM2,
    LLAMA,
    LLAMA3,
    LONGROPE,
    MINISTRAL,
    MINISTRAL3,
    MISTRAL,
    MIXTRAL,
    NEEDED,
    OLMO2,
    OLMO3,
    PHI3,
    QWEN2,
    QWEN3,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_MOE,
    QWEN3_NEXT,
    RECURRENT,
    SLIDING,
    SMOLLM3,
)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"model_type": "gpt2"},
            "model_type 'gpt2' is not supported; accepted: deepseek_v2, deepseek_v3, gemma2, gemma3_text, glm4, ",
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
        (MINISTRAL3, {"rope_parameters": {"rope_type": "default"}}, "rope_type='default'"),
        (MINISTRAL3, {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "llama_4_scaling_beta"),
        (MINISTRAL3, {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "llama_4_scaling_beta"),
        (OLMO2, {"sliding_window": 8}, "sliding_window=8"),
        (OLMO2, {"clip_qkv": 8.0}, "clip_qkv=8.0"),
        (OLMO3, {"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters="),
        (OLMO3, {"layer_types": ["chunked", "full_attention"]}, "layer_types="),
        (OLMO3, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
        (GLM4, {"sliding_window": 8}, "sliding_window=8"),
        (GLM4, {"partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5"),
        (MIXTRAL, {"num_local_experts": 0}, "num_local_experts=0"),
        (MIXTRAL, {"num_experts_per_tok": 9}, "num_experts_per_tok=9 is more than num_local_experts=8"),
        (MIXTRAL, {"attention_bias": True}, "attention_bias=True"),
        (MIXTRAL, {"layer_types": [FULL, SLIDING]}, "layer_types="),
        (QWEN3_5, {"layer_types": [FULL] * 3}, "accepted: 4 of 'linear_attention' and 'full_attention'"),
        (QWEN3_5, {"layer_types": [FULL, FULL, FULL, SLIDING]}, "layer_types="),
        (QWEN3_5, {"layer_types": [FULL, FULL, FULL, RECURRENT]}, "accepted: a last layer of 'full_attention'"),
        (QWEN3_5, {"num_hidden_layers": 5}, "accepted: a last layer of 'full_attention'"),
        (QWEN3_5, {"full_attention_interval": 0}, "full_attention_interval=0"),
        (QWEN3_5, {"attn_output_gate": False}, "attn_output_gate=False"),
        (QWEN3_5, {"attention_bias": True}, "attention_bias=True"),
        (QWEN3_5, {"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype='bfloat16'"),
        (QWEN3_5, {"linear_num_value_heads": 24}, "linear_num_value_heads=24 is not a multiple"),
        (QWEN3_5, {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim=1"),
        (QWEN3_5, {"linear_key_head_dim": 0}, "linear_key_head_dim=0"),
        (QWEN3_5, {"num_experts": 4}, "num_experts=4"),
        (DEEPSEEK_V2, {"topk_method": "group_limited_greedy"}, "topk_method='group_limited_greedy'"),
        (DEEPSEEK_V2, {"routed_scaling_factor": 16.0}, "routed_scaling_factor=16.0"),
        (DEEPSEEK_V2, {"norm_topk_prob": True}, "norm_topk_prob=True"),
        (DEEPSEEK_V2, {"rope_interleave": True}, "rope_interleave=True"),
        (DEEPSEEK_V2, {"num_experts_per_tok": None}, "num_experts_per_tok=None"),
        (DEEPSEEK_V3, {"attention_bias": True}, "attention_bias=True"),
        (DEEPSEEK_V3, {"num_key_value_heads": 2}, "num_key_value_heads=2"),
        (DEEPSEEK_V3, {"head_dim": 10}, "head_dim=10"),
        (DEEPSEEK_V3, {"qk_head_dim": 4}, "qk_head_dim=4"),
        (DEEPSEEK_V3, {"kv_lora_rank": 0}, "kv_lora_rank=0"),
        (DEEPSEEK_V3, {"rope_interleave": 1}, "rope_interleave=1"),
        (DEEPSEEK_V3, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
        (DEEPSEEK_V3, {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        (DEEPSEEK_V3, {"topk_method": "greedy"}, "topk_method='greedy'"),
        (DEEPSEEK_V3, {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        (DEEPSEEK_V3, {"first_k_dense_replace": -1}, "first_k_dense_replace=-1"),
        (DEEPSEEK_V3, {"n_group": 3}, "n_group=3 and topk_group=4 do not divide n_routed_experts=16"),
        (DEEPSEEK_V3, {"n_group": 16}, "n_group=16 and topk_group=4 do not divide n_routed_experts=16"),
        (DEEPSEEK_V3, {"topk_group": 1}, "num_experts_per_tok=8 is more than the experts of topk_group=1 groups"),
        (GLM4_MOE, {"use_qk_norm": 1}, "use_qk_norm=1"),
        (GLM4_MOE, {"mlp_bias": True}, "mlp_bias=True"),
        (GLM4_MOE_LITE, {"mlp_layer_types": ["dense"]}, "mlp_layer_types=['dense']"),
        (GLM4_MOE_LITE, {"mlp_layer_types": ["dense", "full"]}, "mlp_layer_types=['dense', 'full']"),
        (QWEN3_5_MOE, {"norm_topk_prob": False}, "norm_topk_prob=False"),
        (QWEN3_5_MOE, {"num_experts": 4}, "num_experts_per_tok=8 is more than num_experts=4"),
        (QWEN3_5_MOE, {"num_local_experts": 4}, "num_local_experts=4"),
        (QWEN3_5_MOE, {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size=0"),
        (QWEN3_5_MOE, {"attention_bias": True}, "attention_bias=True"),
        (QWEN3_NEXT, {"mlp_only_layers": [1]}, "mlp_only_layers=[1]"),
        (QWEN3_NEXT, {"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        (QWEN3_NEXT, {"norm_topk_prob": 1}, "norm_topk_prob=1"),
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
        (GRANITEMOE, {"num_experts_per_tok": 9}, "num_experts_per_tok=9"),
        (GRANITEMOE, {"logits_scaling": 0.0}, "logits_scaling=0.0"),
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
    "num_key_value_heads": 4,
}
UNKNOWN = {"scale_emb": 12, "rope_interleaved": True, "norm_type": "layernorm", "is_causal": False}
NOT_NUMBERS = {
    "rope_theta": float("inf"),
    "rms_norm_eps": float("nan"),
    "rope_scaling": {"type": "linear", "factor": 1e39},
}


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_family_refuses_fields_that_it_does_not_know(name):
    hf = FAMILIES[name].config_to_hf(config_from_hf(SMALL | {"model_type": name} | NEEDED.get(name, {})))
    config_from_hf(hf | {"unknown": None, "also_unknown": False, "torch_dtype": "bfloat16", "unsloth_fixed": True})
    for field, value in UNKNOWN.items():
        with pytest.raises(UnsupportedModelError, match=f"{field}={value!r}"):
            config_from_hf(hf | {field: value})


@pytest.mark.parametrize("field", NOT_NUMBERS)
def test_numbers_are_within_the_range_of_float32(field):
    with pytest.raises(UnsupportedModelError, match="a positive number of float32's range"):
        config_from_hf(SMALL | {"model_type": "llama", field: NOT_NUMBERS[field]})
