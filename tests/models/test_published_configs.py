"""The configs of published models: the fields that describe the model, as their authors wrote them."""

import math

import pytest

from kvjax.checkpoint.parameters import Blank
from kvjax.models import Mixture, Recurrence, config_from_hf

FULL, SLIDING = "full_attention", "sliding_attention"
SMOLLM3 = {
    "model_type": "smollm3",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
}


def test_phi_4_mini():
    """The fields of microsoft/Phi-4-mini-instruct that describe the model."""
    factors = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    config = config_from_hf(
        {
            "architectures": ["Phi3ForCausalLM"],
            "model_type": "phi3",
            "vocab_size": 200_064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 32,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "attention_bias": False,
            "mlp_bias": False,
            "lm_head_bias": False,
            "full_attn_mod": 1,
            "interpolate_factor": 1,
            "hidden_act": "silu",
            "max_position_embeddings": 131_072,
            "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 0.75,
            "rope_theta": 10_000.0,
            "rope_scaling": {"type": "longrope", **factors},
            "sliding_window": 262_144,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
        }
    )
    assert (config.head_dim, config.rope.channels(config.head_dim), config.tie_embeddings) == (128, 96, True)
    assert config.windows == (262_144,) * 32


@pytest.mark.parametrize("model_type", ["mistral", "ministral"])
def test_ministral_8b(model_type):
    """mistralai/Ministral-8B-Instruct-2410: first a Mistral with a window in all layers, later with types of layers."""
    hf = {
        "model_type": model_type,
        "architectures": [f"{model_type.capitalize()}ForCausalLM"],
        "vocab_size": 131_072,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 32_768,
        "rope_theta": 1e8,
        "rms_norm_eps": 1e-5,
        "sliding_window": 32_768,
    }
    kinds = {"layer_types": [FULL, SLIDING, SLIDING, SLIDING] * 9} if model_type == "ministral" else {}
    windows = (None, 32_768, 32_768, 32_768) * 9 if kinds else (32_768,) * 36
    assert config_from_hf(hf | kinds).windows == windows


def test_gemma_3_1b():
    """The fields of google/gemma-3-1b-it as they were first published."""
    config = config_from_hf(
        {
            "model_type": "gemma3_text",
            "architectures": ["Gemma3ForCausalLM"],
            "vocab_size": 262_144,
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 26,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256,
            "rope_theta": 1_000_000,
            "rope_local_base_freq": 10_000,
            "rope_scaling": None,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
            "max_position_embeddings": 32_768,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "cache_implementation": "hybrid",
        }
    )
    assert config.windows == (512, 512, 512, 512, 512, None) * 4 + (512, 512)
    assert [config.rope_of(i).theta for i in (4, 5)] == [1e4, 1e6]
    assert (config.scale, config.embedding_scale, config.tie_embeddings) == (1 / 16, 1152**0.5, True)


def test_gemma_4_e2b():
    """The fields of google/gemma-4-E2B-it that describe its text decoder and differ from the defaults."""
    sizes = {"hidden_size": 1536, "intermediate_size": 6144, "num_attention_heads": 8, "num_key_value_heads": 1}
    config = config_from_hf(
        {"model_type": "gemma4_text", "num_hidden_layers": 35, "vocab_size": 262_144, "num_kv_shared_layers": 20}
        | {"layer_types": ([SLIDING] * 4 + [FULL]) * 7, "use_double_wide_mlp": True, "final_logit_softcapping": 30.0}
        | sizes
    )
    assert config.windows == (512, 512, 512, 512, None) * 3
    assert config.readers == ((13, 13, 13, 13, 14) * 4, 12_288)
    assert (config.mlp_size, config.layer_input_size, config.kinds_of_heads) == (6144, 256, ((1, 256), (1, 512)))
    assert config.bytes_per_token("bfloat16") == 2 * 2 * (12 * 256 + 3 * 512)


def test_qwen3_30b_a3b():
    """The fields of Qwen/Qwen3-30B-A3B that describe the model, and those that transformers writes for them."""
    hf = {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40_960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1_000_000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151_936,
    }
    config = config_from_hf(hf)
    assert config.mixture == Mixture(128, 8, 768)
    sizes = Blank.of(config).shapes
    assert sum(map(math.prod, sizes.values())) == 30_532_122_624
    written = {name: value for name, value in hf.items() if name != "num_experts"} | {"num_local_experts": 128}
    assert config_from_hf(written) == config


def test_mixtral_8x7b():
    """The fields of mistralai/Mixtral-8x7B-v0.1 that describe the model."""
    config = config_from_hf(
        {
            "model_type": "mixtral",
            "architectures": ["MixtralForCausalLM"],
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "max_position_embeddings": 32_768,
            "num_attention_heads": 32,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "output_router_logits": False,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1_000_000.0,
            "router_aux_loss_coef": 0.02,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "vocab_size": 32_000,
        }
    )
    assert config.mixture == Mixture(8, 2, 14_336)
    assert sum(map(math.prod, Blank.of(config).shapes.values())) == 46_702_792_704


def test_qwen3_5_35b_a3b():
    """The fields of Qwen/Qwen3.5-35B-A3B that describe the model, whose text decoder alone is read."""
    text = {
        "model_type": "qwen3_5_moe_text",
        "attention_bias": False,
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", FULL] * 10,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262_144,
        "mlp_only_layers": [],
        "moe_intermediate_size": 512,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 16,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "output_router_logits": False,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10_000_000,
            "rope_type": "default",
        },
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": False,
        "vocab_size": 248_320,
    }
    config = config_from_hf(
        {
            "model_type": "qwen3_5_moe",
            "architectures": ["Qwen3_5MoeForConditionalGeneration"],
            "image_token_id": 248_056,
            "text_config": text,
            "tie_word_embeddings": False,
            "video_token_id": 248_057,
            "vision_config": {"depth": 27, "model_type": "qwen3_5_moe"},
            "vision_end_token_id": 248_054,
            "vision_start_token_id": 248_053,
        }
    )
    assert config.mixture == Mixture(256, 8, 512, shared=512)
    assert config.recurrence == Recurrence((3,) * 10, 16, 32, 128, 128, 4)
    assert sum(map(math.prod, Blank.of(config).shapes.values())) / 1e9 == pytest.approx(35, abs=0.5)


def test_qwen3_next_80b_a3b():
    """The fields of Qwen/Qwen3-Next-80B-A3B-Instruct that describe the model."""
    config = config_from_hf(
        {
            "model_type": "qwen3_next",
            "architectures": ["Qwen3NextForCausalLM"],
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "full_attention_interval": 4,
            "head_dim": 256,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "intermediate_size": 5120,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_value_head_dim": 128,
            "max_position_embeddings": 262_144,
            "mlp_only_layers": [],
            "moe_intermediate_size": 512,
            "norm_topk_prob": True,
            "num_attention_heads": 16,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "num_hidden_layers": 48,
            "num_key_value_heads": 2,
            "output_router_logits": False,
            "partial_rotary_factor": 0.25,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 10_000_000,
            "router_aux_loss_coef": 0.001,
            "shared_expert_intermediate_size": 512,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
            "vocab_size": 151_936,
        }
    )
    assert config.mixture == Mixture(512, 10, 512, shared=512)
    assert config.recurrence == Recurrence((3,) * 12, 16, 32, 128, 128, 4)
    assert sum(map(math.prod, Blank.of(config).shapes.values())) / 1e9 == pytest.approx(80, abs=0.5)


@pytest.mark.parametrize(("layers", "experts", "billions"), [(24, 32, 20.91), (36, 128, 116.83)])
def test_gpt_oss(layers, experts, billions):
    """The fields of openai/gpt-oss-20b and -120b that describe the model. The paper states the sizes (table 1)."""
    config = config_from_hf(
        {
            "model_type": "gpt_oss",
            "architectures": ["GptOssForCausalLM"],
            "attention_bias": True,
            "experts_per_token": 4,
            "head_dim": 64,
            "hidden_act": "silu",
            "hidden_size": 2880,
            "initial_context_length": 4096,
            "intermediate_size": 2880,
            "layer_types": [SLIDING, FULL] * (layers // 2),
            "max_position_embeddings": 131_072,
            "num_attention_heads": 64,
            "num_experts_per_tok": 4,
            "num_hidden_layers": layers,
            "num_key_value_heads": 8,
            "num_local_experts": experts,
            "quantization_config": {
                "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
                "quant_method": "mxfp4",
            },
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "rope_type": "yarn",
                "truncate": False,
            },
            "rope_theta": 150_000,
            "sliding_window": 128,
            "swiglu_limit": 7.0,
            "tie_word_embeddings": False,
            "vocab_size": 201_088,
        }
    )
    assert config.mixture == Mixture(experts, 4, 2880, biased=True, limit=7.0)
    assert config.windows == (128, None) * (layers // 2)
    assert config.rope.attention_factor == pytest.approx(0.1 * math.log(32) + 1)
    assert sum(map(math.prod, Blank.of(config).shapes.values())) / 1e9 == pytest.approx(billions, abs=5e-3)


def test_layers_without_rope():
    config = config_from_hf(SMOLLM3)
    assert [str(config.rope_of(i)) for i in range(3, 5)] == ["none", "base 2,000,000"]
    assert config.unrotated == (3, 7)
