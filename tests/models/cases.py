"""Tiny models of every family: `(model_type, fields of config.json)` by name, for comparisons with transformers.

The lengths that the tests read and decode are above 32 and below 128 positions.
"""

from tests.models.fields import (
    BESIDE,
    DYNAMIC,
    FACTORS,
    FULL,
    GROUP1,
    GROUP4,
    GROUP5,
    GROUP7,
    GROUP8,
    GROUPED,
    GROWING,
    LATENT,
    LINEAR,
    LLAMA3,
    LOCAL,
    MIXED,
    MSCALE,
    NETS,
    PARTIAL,
    READERS,
    RECURRENT,
    SHORT,
    SLIDING,
    TIED,
    YARN,
    longrope,
)

CASES = {
    "llama-group1": ("llama", GROUP1 | {"num_hidden_layers": 2}),
    "llama-group4-tied": ("llama", GROUP4 | TIED | {"num_hidden_layers": 2}),
    "llama-group7-head_dim": ("llama", GROUP7 | {"head_dim": 10}),
    "llama-group8-bias": ("llama", GROUP8 | {"attention_bias": True, "mlp_bias": True}),
    "llama-llama3": ("llama", GROUP4 | {"head_dim": 16, "rope_parameters": LLAMA3}),
    "llama-linear": ("llama", GROUP5 | {"rope_parameters": LINEAR}),
    "llama-dynamic": ("llama", GROUP4 | {"rope_parameters": DYNAMIC, "max_position_embeddings": 32}),
    "llama-dynamic-short": ("llama", GROUP4 | {"rope_parameters": DYNAMIC, "max_position_embeddings": 128}),
    "llama-yarn": ("llama", GROUP1 | {"head_dim": 16, "rope_parameters": YARN}),
    "llama-yarn-mscale": ("llama", GROUP1 | {"head_dim": 16, "rope_parameters": YARN | MSCALE}),
    "mistral-window": ("mistral", GROUP4 | {"sliding_window": 9, "num_hidden_layers": 2}),
    "mistral-window-tied": ("mistral", GROUP7 | TIED | {"head_dim": 16, "sliding_window": 16}),
    "mistral-full": ("mistral", GROUP1 | {"sliding_window": None, "rms_norm_eps": 1e-5}),
    "qwen2-group7": ("qwen2", GROUP7 | {"rope_parameters": YARN}),
    "qwen2-layers-tied": (
        "qwen2",
        GROUP5
        | TIED
        | {"num_hidden_layers": 2, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3-head_dim": ("qwen3", GROUP4 | {"head_dim": 16, "use_sliding_window": False}),
    "qwen3-layers-bias-tied": (
        "qwen3",
        GROUP8
        | TIED
        | {"num_hidden_layers": 2, "head_dim": 10, "attention_bias": True}
        | {"use_sliding_window": True, "sliding_window": 9, "layer_types": [SLIDING, FULL]},
    ),
    "qwen3_5_text-group4-layers": ("qwen3_5_text", GROUP4 | NETS | {"num_hidden_layers": 4, "head_dim": 16}),
    "qwen3_5_text-group7-mixed-tied": (
        "qwen3_5_text",
        GROUP7
        | TIED
        | NETS
        | {"num_hidden_layers": 4, "head_dim": 16, "layer_types": [FULL, RECURRENT, RECURRENT, FULL]}
        | {"linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_conv_kernel_dim": 3}
        | {"linear_key_head_dim": 6, "linear_value_head_dim": 10, "rope_parameters": PARTIAL},
    ),
    "qwen3_5_moe_text-group4": (
        "qwen3_5_moe_text",
        GROUP4
        | NETS
        | {"num_hidden_layers": 2, "head_dim": 16, "layer_types": [RECURRENT, FULL], "num_experts": 6}
        | {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 20},
    ),
    "qwen3_5_moe_text-group7-tied": (
        "qwen3_5_moe_text",
        GROUP7
        | TIED
        | NETS
        | {"num_hidden_layers": 2, "head_dim": 16, "layer_types": [FULL, FULL], "num_experts": 5}
        | {"num_experts_per_tok": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 20},
    ),
    "qwen3_next-group4": (
        "qwen3_next",
        GROUP4
        | NETS
        | {"num_hidden_layers": 2, "head_dim": 16, "layer_types": [RECURRENT, FULL], "num_experts": 6}
        | {"num_experts_per_tok": 3, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 20},
    ),
    "qwen3_next-group7-tied": (
        "qwen3_next",
        GROUP7
        | TIED
        | NETS
        | {"num_hidden_layers": 2, "head_dim": 16, "layer_types": [RECURRENT, FULL], "num_experts": 5}
        | {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24}
        | {"linear_num_value_heads": 6, "norm_topk_prob": False, "rope_parameters": PARTIAL},
    ),
    "deepseek_v2-yarn": (
        "deepseek_v2",
        LATENT
        | {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2}
        | {"q_lora_rank": None, "first_k_dense_replace": 1, "n_routed_experts": 6, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 24, "n_shared_experts": 1}
        | {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}},
    ),
    "deepseek_v3-groups": (
        "deepseek_v3",
        LATENT
        | GROUPED
        | {"hidden_size": 40, "num_attention_heads": 5, "num_key_value_heads": 5, "num_hidden_layers": 3}
        | {"q_lora_rank": 12, "first_k_dense_replace": 1, "n_shared_experts": 2},
    ),
    "deepseek_v3-yarn-tied": (
        "deepseek_v3",
        LATENT
        | TIED
        | {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": None}
        | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}, "rope_interleave": False}
        | {"first_k_dense_replace": 1},
    ),
    "glm4_moe_lite-layers": (
        "glm4_moe_lite",
        LATENT
        | {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 3}
        | {"q_lora_rank": 20, "mlp_layer_types": ["sparse", "dense", "sparse"], "n_routed_experts": 6}
        | {"num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": False},
    ),
    "glm4_moe-group4-norm": (
        "glm4_moe",
        GROUP4 | GROUPED | {"num_hidden_layers": 2, "head_dim": 16, "first_k_dense_replace": 1, "use_qk_norm": True},
    ),
    "glm4_moe-group7-bias-tied": (
        "glm4_moe",
        GROUP7
        | TIED
        | {"head_dim": 8, "first_k_dense_replace": 0, "attention_bias": True, "n_routed_experts": 5}
        | {"num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
    "phi3-group1": ("phi3", GROUP1 | {"num_hidden_layers": 2}),
    "phi3-partial-window-tied": (
        "phi3",
        GROUP8 | TIED | {"sliding_window": 9, "partial_rotary_factor": 0.5, "rope_parameters": PARTIAL},
    ),
    "phi3-longrope": ("phi3", GROUP4 | {"hidden_size": 64} | longrope(4, 32)),
    "phi3-longrope-short": ("phi3", GROUP5 | longrope(4, 128)),
    "phi3-longrope-partial": (
        "phi3",
        GROUP4 | {"hidden_size": 64, "partial_rotary_factor": 0.5} | longrope(2, 32, partial_rotary_factor=0.5),
    ),
    "internlm2-group1-bias": ("internlm2", GROUP1 | {"bias": True, "num_hidden_layers": 2}),
    "internlm2-group4-linear-tied": ("internlm2", GROUP4 | TIED | {"bias": False, "rope_parameters": LINEAR}),
    "internlm2-group7-dynamic": (
        "internlm2",
        GROUP7 | {"bias": False, "rope_parameters": DYNAMIC, "max_position_embeddings": 32},
    ),
    "ministral-layers": ("ministral", GROUP4 | {"num_hidden_layers": 2, "head_dim": 8, "sliding_window": 9} | MIXED),
    "ministral-window": ("ministral", GROUP1 | {"head_dim": 16, "sliding_window": 9}),
    "ministral3-group4-tied": (
        "ministral3",
        GROUP4 | TIED | {"num_hidden_layers": 2, "head_dim": 16, "rope_parameters": GROWING},
    ),
    "ministral3-group7-window": (
        "ministral3",
        GROUP7 | {"head_dim": 10, "sliding_window": 9, "rope_parameters": GROWING | MSCALE},
    ),
    "smollm3-layers-tied": (
        "smollm3",
        GROUP4 | TIED | {"num_hidden_layers": 2, "no_rope_layers": [1, 0]} | {"rope_parameters": DYNAMIC, **SHORT},
    ),
    "smollm3-window-bias": (
        "smollm3",
        GROUP7
        | {"num_hidden_layers": 2, "no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 9}
        | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    ),
    "gemma2-group4-layers": (
        "gemma2",
        GROUP4
        | {"num_hidden_layers": 2, "head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 9}
        | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 10.0},
    ),
    "gemma2-group1-bias-untied": (
        "gemma2",
        GROUP1
        | {"head_dim": 10, "attention_bias": True, "tie_word_embeddings": False, "layer_types": [FULL]}
        | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": None},
    ),
    "gemma3_text-group4-layers": (
        "gemma3_text",
        GROUP4
        | {"num_hidden_layers": 2, "head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 9}
        | {"rope_parameters": {FULL: LINEAR, SLIDING: LOCAL}, "layer_types": [SLIDING, FULL]},
    ),
    "gemma3_text-group8-bias-untied": (
        "gemma3_text",
        GROUP8 | {"head_dim": 10, "attention_bias": True, "tie_word_embeddings": False, "sliding_window": 9},
    ),
    "gemma4_text-group4-kinds": (
        "gemma4_text",
        GROUP4
        | {"num_hidden_layers": 3, "head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 1}
        | {"layer_types": [SLIDING, FULL, FULL], "sliding_window": 9, "attention_k_eq_v": True}
        | {"final_logit_softcapping": 10.0, "hidden_size_per_layer_input": 0},
    ),
    "gemma4_text-group7-bias-untied": (
        "gemma4_text",
        GROUP7
        | {"num_hidden_layers": 2, "head_dim": 10, "global_head_dim": 8, "layer_types": [SLIDING, FULL]}
        | {"sliding_window": 9, "attention_bias": True, "tie_word_embeddings": False}
        | {"rope_parameters": {FULL: LINEAR, SLIDING: LOCAL}, "hidden_size_per_layer_input": 0},
    ),
    "gemma4_text-group8-experts": ("gemma4_text", GROUP8 | BESIDE),
    "gemma4_text-group4-readers": ("gemma4_text", GROUP4 | READERS),
    "mixtral-group4-window": (
        "mixtral",
        GROUP4 | {"num_hidden_layers": 2, "num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 9},
    ),
    "mixtral-group7-tied": ("mixtral", GROUP7 | TIED | {"num_local_experts": 4, "num_experts_per_tok": 1}),
    "qwen3_moe-group8-layers": (
        "qwen3_moe",
        GROUP8
        | {"num_hidden_layers": 4, "head_dim": 10, "num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": True}
        | {"moe_intermediate_size": 24, "mlp_only_layers": [0, 3], "attention_bias": True},
    ),
    "qwen3_moe-group1-step-window-tied": (
        "qwen3_moe",
        GROUP1
        | TIED
        | {"num_hidden_layers": 2, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        | {"decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 9},
    ),
    "gpt_oss-group4-layers": (
        "gpt_oss",
        GROUP4
        | {"num_hidden_layers": 2, "head_dim": 16, "sliding_window": 9, "swiglu_limit": 0.7}
        | {"num_local_experts": 5, "num_experts_per_tok": 3, "rope_parameters": YARN | {"truncate": False}},
    ),
    "gpt_oss-group7-tied": (
        "gpt_oss",
        GROUP7
        | TIED
        | {"head_dim": 8, "layer_types": [FULL], "attention_bias": False, "rope_parameters": LINEAR}
        | {"num_local_experts": 4, "num_experts_per_tok": 1},
    ),
    "gpt_oss-group1-window": (
        "gpt_oss",
        GROUP1 | {"head_dim": 8, "sliding_window": 9, "num_local_experts": 4, "num_experts_per_tok": 4},
    ),
    "olmo2-group1": ("olmo2", GROUP1 | {"num_hidden_layers": 2}),
    "olmo2-group4-bias-tied": ("olmo2", GROUP4 | TIED | {"attention_bias": True, "rope_parameters": YARN}),
    "olmo3-group4-layers": (
        "olmo3",
        GROUP4
        | {"num_hidden_layers": 2, "sliding_window": 9, "layer_types": [SLIDING, FULL]}
        | {"rope_parameters": {FULL: YARN, SLIDING: LOCAL}},
    ),
    "olmo3-group7-bias-tied": ("olmo3", GROUP7 | TIED | {"attention_bias": True, "sliding_window": 9}),
    "granitemoe-group4-tied": (
        "granitemoe",
        GROUP4 | TIED | FACTORS | {"num_hidden_layers": 2, "num_local_experts": 5, "num_experts_per_tok": 3},
    ),
    "granitemoe-group7-bias": (
        "granitemoe",
        GROUP7 | FACTORS | {"attention_bias": True, "num_local_experts": 4, "num_experts_per_tok": 1},
    ),
    "glm4-group4-tied": ("glm4", GROUP4 | TIED | {"num_hidden_layers": 2, "head_dim": 16}),
    "glm4-group7-whole-heads": (
        "glm4",
        GROUP7 | {"head_dim": 10, "attention_bias": False, "rope_parameters": PARTIAL | {"partial_rotary_factor": 1.0}},
    ),
    "granite-group4-tied": ("granite", GROUP4 | TIED | FACTORS | {"num_hidden_layers": 2}),
    "granite-group7-bias": ("granite", GROUP7 | FACTORS | {"attention_bias": True, "mlp_bias": True}),
}

# One of each way to rotate and to mask the keys of earlier tokens, of every family.
DECODED = (
    "llama-group7-head_dim",
    "llama-dynamic",
    "llama-dynamic-short",
    "llama-yarn-mscale",
    "mistral-window",
    "qwen2-layers-tied",
    "qwen3-layers-bias-tied",
    "qwen3_5_text-group4-layers",
    "qwen3_5_text-group7-mixed-tied",
    "qwen3_5_moe_text-group4",
    "qwen3_next-group4",
    "deepseek_v3-groups",
    "glm4_moe_lite-layers",
    "glm4_moe-group4-norm",
    "phi3-partial-window-tied",
    "phi3-longrope",
    "internlm2-group1-bias",
    "ministral-layers",
    "ministral3-group4-tied",
    "smollm3-layers-tied",
    "smollm3-window-bias",
    "olmo2-group4-bias-tied",
    "olmo3-group4-layers",
    "glm4-group4-tied",
    "granite-group4-tied",
    "granitemoe-group4-tied",
    "gemma2-group4-layers",
    "gemma3_text-group4-layers",
    "gemma4_text-group4-kinds",
    "gemma4_text-group4-readers",
    "gemma4_text-group8-experts",
    "mixtral-group4-window",
    "qwen3_moe-group8-layers",
    "gpt_oss-group4-layers",
)
# Every family, and every term that is rounded: biases, norms of heads, tied embeddings, scaled and partial rotations.
ROUNDED = (
    "llama-group8-bias",
    "llama-yarn-mscale",
    "mistral-window-tied",
    "qwen2-group7",
    "qwen3-layers-bias-tied",
    "qwen3_5_text-group4-layers",
    "qwen3_5_text-group7-mixed-tied",
    "qwen3_5_moe_text-group4",
    "qwen3_next-group4",
    "deepseek_v3-groups",
    "glm4_moe_lite-layers",
    "glm4_moe-group4-norm",
    "phi3-longrope-partial",
    "internlm2-group1-bias",
    "ministral3-group4-tied",
    "smollm3-window-bias",
    "olmo2-group4-bias-tied",
    "olmo3-group4-layers",
    "glm4-group4-tied",
    "granite-group4-tied",
    "granitemoe-group4-tied",
    "gemma2-group4-layers",
    "gemma3_text-group8-bias-untied",
    "gemma4_text-group7-bias-untied",
    "gemma4_text-group8-experts",
    "gemma4_text-group4-readers",
    "mixtral-group4-window",
    "qwen3_moe-group8-layers",
    "gpt_oss-group4-layers",
)
