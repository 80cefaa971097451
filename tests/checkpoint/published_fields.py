"""Fields of published config.json files that several of them share, and tiny sizes."""

from __future__ import annotations

from typing import Any

GENERATION: dict[str, Any] = {
    "_from_model_config": True,
    "bos_token_id": 1,
    "do_sample": True,
    "eos_token_id": [2, 3],
    "max_length": 4096,
    "temperature": 0.6,
    "top_p": 0.9,
    "transformers_version": "4.45.0.dev0",
}
SIZES = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
    "initializer_range": 0.02,
    "use_cache": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0",
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}


def of(model_type: str, architecture: str, without: str = "", **fields: Any) -> dict[str, Any]:
    kept = {name: value for name, value in SIZES.items() if name not in without.split()}
    return {"architectures": [f"{architecture}ForCausalLM"], "model_type": model_type, **kept, **fields}


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
    "rope_type": "llama3",
}
BIASES = {"attention_bias": False, "mlp_bias": False}
QWEN = {"max_window_layers": 2, "use_sliding_window": False, "sliding_window": 4096}
GEMMA = {
    "attention_bias": False,
    "cache_implementation": "hybrid",
    "head_dim": 8,
    "hidden_activation": "gelu_pytorch_tanh",
    "pad_token_id": 0,
    "query_pre_attn_scalar": 8,
    "sliding_window": 512,
}
GEMMA4 = {
    "attention_bias": False,
    "attention_k_eq_v": False,
    "dtype": "bfloat16",
    "enable_moe_block": False,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 16,
    "head_dim": 8,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "moe_intermediate_size": None,
    "num_experts": None,
    "num_global_key_value_heads": None,
    "num_kv_shared_layers": 2,
    "pad_token_id": 0,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "sliding_window": 512,
    "top_k_experts": None,
    "use_bidirectional_attention": None,
    "use_double_wide_mlp": True,
    "vocab_size_per_layer_input": 32,
}
PHI = {
    "auto_map": {
        "AutoConfig": "configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
    },
    "attention_bias": False,
    "embd_pdrop": 0.0,
    "original_max_position_embeddings": 1024,
    "pad_token_id": 0,
    "resid_pdrop": 0.0,
    "rope_scaling": None,
}
NET = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 8,
}
EXPERTS = {
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 16,
}
QWEN3_5 = {
    "attention_bias": False,
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "full_attention_interval": 4,
    "head_dim": 16,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "mamba_ssm_dtype": "float32",
    "mlp_only_layers": [],
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [1, 1, 0],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    **NET,
}
