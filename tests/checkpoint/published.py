"""Configs with the fields that published checkpoints have, and tiny sizes."""

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


def _of(model_type: str, architecture: str, without: str = "", **fields: Any) -> dict[str, Any]:
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
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama-2-7b": _of("llama", "Llama", "rope_theta", pretraining_tp=1, rope_scaling=None, pad_token_id=0),
    "Llama-3.1-8B-Instruct": _of(
        "llama", "Llama", eos_token_id=[2, 3, 4], pretraining_tp=1, rope_scaling=LLAMA3, **BIASES
    )
    | {"rope_theta": 500000.0},
    "Llama-3.2-1B": _of("llama", "Llama", head_dim=8, pretraining_tp=1, rope_scaling=LLAMA3, **BIASES)
    | {"tie_word_embeddings": True},
    "SmolLM2-135M-Instruct": _of(
        "llama",
        "Llama",
        is_llama_config=True,
        pad_token_id=2,
        pretraining_tp=1,
        rope_interleaved=False,
        rope_scaling=None,
        **{"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}}},
        **BIASES,
    )
    | {"tie_word_embeddings": True},
    "unsloth fine-tune": _of("llama", "Llama", unsloth_fixed=True, unsloth_version="2024.9", _name_or_path="some/base"),
    "Qwen2.5-0.5B-Instruct": _of("qwen2", "Qwen2", **QWEN) | {"tie_word_embeddings": True},
    "Qwen2.5-7B-Instruct": _of("qwen2", "Qwen2", **QWEN),
    "Qwen3-0.6B": _of("qwen3", "Qwen3", attention_bias=False, head_dim=8, rope_scaling=None, **QWEN)
    | {"sliding_window": None, "tie_word_embeddings": True},
    "Qwen3-30B-A3B": _of(
        "qwen3_moe",
        "Qwen3Moe",
        attention_bias=False,
        decoder_sparse_step=1,
        head_dim=8,
        mlp_only_layers=[],
        moe_intermediate_size=16,
        norm_topk_prob=True,
        num_experts=4,
        num_experts_per_tok=2,
        output_router_logits=False,
        rope_scaling=None,
        router_aux_loss_coef=0.001,
        **QWEN,
    )
    | {"sliding_window": None},
    "Mistral-7B-v0.1": _of("mistral", "Mistral", "attention_dropout", sliding_window=4096),
    "Mistral-7B-Instruct-v0.3": _of("mistral", "Mistral", sliding_window=None),
    "Mistral-Nemo-Instruct": _of("mistral", "Mistral", head_dim=16, sliding_window=None),
    "Ministral-8B-Instruct": _of("mistral", "Mistral", head_dim=8, sliding_window=32),
    "Mixtral-8x7B-v0.1": _of(
        "mixtral",
        "Mixtral",
        num_experts_per_tok=2,
        num_local_experts=4,
        output_router_logits=False,
        router_aux_loss_coef=0.02,
        sliding_window=None,
    ),
    "gemma-2-2b-it": _of(
        "gemma2",
        "Gemma2",
        "tie_word_embeddings",
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        sliding_window_size=512,
        **GEMMA,
    )
    | {"eos_token_id": [2, 3], "hidden_act": "gelu_pytorch_tanh"},
    "gemma-3-1b-it": _of(
        "gemma3_text",
        "Gemma3",
        "tie_word_embeddings hidden_act",
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        rope_local_base_freq=10000,
        rope_scaling=None,
        sliding_window_pattern=2,
        **GEMMA,
    )
    | {"rope_theta": 1000000},
    "Phi-3-mini-4k-instruct": _of("phi3", "Phi3", sliding_window=2047, **PHI),
    "Phi-4-mini-instruct": _of(
        "phi3",
        "Phi3",
        full_attn_mod=1,
        interpolate_factor=1,
        lm_head_bias=False,
        mlp_bias=False,
        partial_rotary_factor=0.75,
        sliding_window=262144,
        **PHI | {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 3, "long_factor": [2.0] * 3}},
    )
    | {"tie_word_embeddings": True},
    "gpt-oss-20b": _of(
        "gpt_oss",
        "GptOss",
        "torch_dtype bos_token_id",
        attention_bias=True,
        experts_per_token=2,
        head_dim=8,
        initial_context_length=1024,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_experts_per_tok=2,
        num_local_experts=4,
        output_router_logits=False,
        pad_token_id=3,
        quantization_config={"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
        rope_scaling={
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
            "rope_type": "yarn",
            "truncate": False,
        },
        router_aux_loss_coef=0.9,
        sliding_window=128,
        swiglu_limit=7.0,
    ),
    "OLMo-2-1124-7B": _of("olmo2", "Olmo2", attention_bias=False, pad_token_id=0, rope_scaling=None),
    "Olmo-3-7B-Instruct": _of(
        "olmo3",
        "Olmo3",
        attention_bias=False,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
        pad_token_id=1,
        rope_scaling={
            "attention_factor": 1.2079441541679836,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "yarn",
        },
        sliding_window=4096,
    ),
    "GLM-4-9B-0414": _of("glm4", "Glm4", attention_bias=True, pad_token_id=0, partial_rotary_factor=0.5),
    "granite-3.1-3b-a800m-instruct": _of(
        "granitemoe",
        "GraniteMoe",
        attention_bias=False,
        attention_multiplier=0.015625,
        embedding_multiplier=12.0,
        logits_scaling=6.0,
        num_experts_per_tok=2,
        num_local_experts=4,
        output_router_logits=False,
        pad_token_id=0,
        residual_multiplier=0.22,
        rope_scaling=None,
        router_aux_loss_coef=0.0,
    )
    | {"attention_dropout": 0.1, "tie_word_embeddings": True},
    "granite-3.1-2b-instruct": _of(
        "granite",
        "Granite",
        attention_multiplier=0.25,
        embedding_multiplier=12.0,
        logits_scaling=8.0,
        pad_token_id=0,
        residual_multiplier=0.22,
        rope_scaling=None,
        **BIASES,
    )
    | {"attention_dropout": 0.1, "tie_word_embeddings": True},
    "Ministral-3-3B-Instruct": _of(
        "ministral3",
        "Ministral3",
        pad_token_id=11,
        rope_parameters={
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 16.0,
            "llama_4_scaling_beta": 0.1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 1024,
            "rope_theta": 1000000.0,
            "rope_type": "yarn",
        },
        sliding_window=None,
    ),
    "SmolLM3-3B": _of(
        "smollm3",
        "SmolLM3",
        layer_types=["full_attention"] * 4,
        max_window_layers=28,
        no_rope_layer_interval=4,
        no_rope_layers=[1, 1, 1, 0],
        pad_token_id=3,
        pretraining_tp=2,
        rope_scaling=None,
        sliding_window=None,
        use_sliding_window=False,
        **BIASES,
    ),
    "internlm2-chat-7b": _of(
        "internlm2",
        "InternLM2",
        "attention_dropout",
        attn_implementation="eager",
        auto_map={"AutoConfig": "configuration_internlm2.InternLM2Config"},
        bias=False,
        pad_token_id=2,
        rope_scaling={"type": "dynamic", "factor": 2.0},
    ),
}
