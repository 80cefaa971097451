"""Fields of config.json that the tiny models of several families share."""

# hidden size, query heads, kv heads
GROUP1 = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4}
GROUP4 = {"hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 2}
GROUP5 = {"hidden_size": 40, "num_attention_heads": 5, "num_key_value_heads": 1}
GROUP7 = {"hidden_size": 56, "num_attention_heads": 14, "num_key_value_heads": 2}
GROUP8 = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 1}
TIED = {"tie_word_embeddings": True}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LOCAL = {"rope_type": "default", "rope_theta": 100.0}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 8.0, "original_max_position_embeddings": 32}
GROWING = YARN | {"llama_4_scaling_beta": 0.5}
MSCALE = {"mscale": 2.0, "mscale_all_dim": 0.5, "beta_fast": 8.0, "beta_slow": 0.5, "truncate": False}
PARTIAL = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
SLIDING, FULL, RECURRENT = "sliding_attention", "full_attention", "linear_attention"
NETS = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "initializer_range": 0.06,  # with 0.15 the two forms of transformers, in chunks and by token, differ by 1.2e-4
}
LATENT = {"kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 10, "v_head_dim": 14}
GROUPED = {
    "n_routed_experts": 12,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.5,
}
BESIDE = {
    "num_hidden_layers": 2,
    "layer_types": [SLIDING, FULL],
    "sliding_window": 9,
    "head_dim": 8,
    "global_head_dim": 8,
    "attention_k_eq_v": True,
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 3,
    "moe_intermediate_size": 24,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 100,
}
READERS = {
    "num_hidden_layers": 5,
    "layer_types": [FULL, SLIDING, FULL, SLIDING, FULL],
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 9,
    "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": 100,
}
MIXED = {"layer_types": [FULL, SLIDING]}
SHORT = {"max_position_embeddings": 32}
FACTORS = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.22,
    "logits_scaling": 3.0,
}


def longrope(pairs: int, original: int, **fields) -> dict:
    """LongRoPE fields. The two lists of factors differ so much that a test with the wrong one fails."""
    factors = {"short_factor": [1 + 0.1 * i for i in range(pairs)], "long_factor": [2.0 + i for i in range(pairs)]}
    return {
        "rope_parameters": {"rope_type": "longrope", "rope_theta": 10_000.0, **factors, **fields},
        "original_max_position_embeddings": original,
    }
