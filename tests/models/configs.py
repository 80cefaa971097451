"""The smallest config.json of each family, and forms of RoPE."""

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
MINISTRAL3 = MISTRAL | {"model_type": "ministral3"}
SMOLLM3 = QWEN2 | {"model_type": "smollm3"}
OLMO2 = LLAMA | {"model_type": "olmo2"}
OLMO3 = LLAMA | {"model_type": "olmo3"}
GLM4 = QWEN2 | {"model_type": "glm4", "head_dim": 8}
GEMMA2 = QWEN2 | {"model_type": "gemma2", "head_dim": 8}
GEMMA3 = GEMMA2 | {"model_type": "gemma3_text"}
GEMMA4 = GEMMA2 | {"model_type": "gemma4_text", "global_head_dim": 16, "hidden_size_per_layer_input": 4}
GEMMA4 |= {"vocab_size_per_layer_input": 32}
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_key_value_heads": 2}
QWEN3_5 = QWEN2 | {"model_type": "qwen3_5_text", "num_hidden_layers": 4, "head_dim": 16}
QWEN3_5_MOE = QWEN3_5 | {"model_type": "qwen3_5_moe_text"}
QWEN3_NEXT = QWEN3_5 | {"model_type": "qwen3_next"}
QWEN3_MOE = QWEN2 | {"model_type": "qwen3_moe"}
GPT_OSS = LLAMA | {"model_type": "gpt_oss", "num_key_value_heads": 2, "rope_scaling": {"type": "linear", "factor": 2.0}}
LATENT = {"kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 10}
DEEPSEEK_V2 = LLAMA | LATENT | {"model_type": "deepseek_v2", "num_experts_per_tok": 6}
DEEPSEEK_V3 = LLAMA | LATENT | {"model_type": "deepseek_v3", "n_routed_experts": 16, "first_k_dense_replace": 1}
GLM4_MOE = QWEN2 | {"model_type": "glm4_moe"}
GLM4_MOE_LITE = LLAMA | LATENT | {"model_type": "glm4_moe_lite"}
GRANITE = LLAMA | {"model_type": "granite"}
GRANITEMOE = LLAMA | {"model_type": "granitemoe"}
INTERNLM2 = LLAMA | {"model_type": "internlm2"}
# Fields of which transformers' defaults serve few: no number, inputs for a large vocabulary, and odd channels.
NEEDED = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "gemma4_text": {"hidden_size_per_layer_input": 0},
    "glm4_moe": {"head_dim": 128},
}
LONGROPE = {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
FULL, SLIDING, RECURRENT = "full_attention", "sliding_attention", "linear_attention"
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
