"""The configs of published models: the fields that describe the model, as their authors wrote them."""

import pytest

from kvjax.models import config_from_hf

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


def test_layers_without_rope():
    config = config_from_hf(SMOLLM3)
    assert [str(config.rope_of(i)) for i in range(3, 5)] == ["none", "base 2,000,000"]
    assert config.unrotated == (3, 7)
