"""Each family's table of weights: saved parameters load equal, on one device and on meshes that split tensors."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.checkpoint import load, save_hf
from kvjax.models import FAMILIES, Decoder, config_from_hf

HF = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "attention_bias": True,
    "head_dim": 4,
}
EXPERTS = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
EXPERTS |= {"first_k_dense_replace": 1}
LATENTS = {"attention_bias": None, "num_key_value_heads": None, "head_dim": None, "kv_lora_rank": 6, "v_head_dim": 10}
LATENTS |= {"qk_rope_head_dim": 4, "qk_nope_head_dim": 5, "q_lora_rank": 7} | EXPERTS
# The fields that differ from HF. None removes a field that the family does not support.
OWN = {
    "deepseek_v2": LATENTS | {"n_group": None, "topk_group": None},
    "deepseek_v3": LATENTS,
    "gemma2": {},
    "gemma3_text": {"sliding_window_pattern": 2},
    "gemma4_text": {"sliding_window": 5, "head_dim": 6, "global_head_dim": 4, "hidden_size_per_layer_input": 6}
    | {"vocab_size_per_layer_input": 24, "num_hidden_layers": 4, "num_kv_shared_layers": 2}
    | {"attention_k_eq_v": True, "layer_types": ["sliding_attention", "full_attention"] * 2}
    | {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 20},
    "glm4": {},
    "glm4_moe": EXPERTS | {"use_qk_norm": True},
    "glm4_moe_lite": LATENTS | {"first_k_dense_replace": None, "mlp_layer_types": ["sparse", "dense"]},
    "gpt_oss": {"num_local_experts": 8, "sliding_window": 5},
    "granite": {"mlp_bias": True, "residual_multiplier": 0.5},
    "granitemoe": {"num_local_experts": 8, "residual_multiplier": 0.5},
    "internlm2": {"head_dim": None, "attention_bias": None, "bias": True},
    "llama": {"mlp_bias": True},
    "ministral": {"attention_bias": None},
    "ministral3": {"attention_bias": None},
    "mistral": {"attention_bias": None},
    "mixtral": {"attention_bias": None, "num_local_experts": 8},
    "phi3": {"head_dim": None, "attention_bias": None},
    "qwen2": {},
    "qwen3": {},
    "qwen3_5_text": {"attention_bias": None, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}
    | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 5},
    "qwen3_5_moe_text": {"attention_bias": None, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}
    | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 5}
    | {"num_experts": 8, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 12},
    "qwen3_next": {"attention_bias": None, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}
    | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 5}
    | {"num_experts": 16, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 12},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "mlp_only_layers": [1]},
    "olmo2": {"head_dim": None},
    "olmo3": {"head_dim": None, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "smollm3": {"head_dim": None, "mlp_bias": True, "no_rope_layers": [1, 0]},
}


def random(model_type: str) -> Decoder:
    """Returns a decoder in which all parameters differ, biases and norms included."""
    hf = {"model_type": model_type} | HF | OWN[model_type]
    params = nnx.eval_shape(lambda: Decoder(config_from_hf(hf), nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape).astype(np.float32)), params)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_saved_parameters_load_equal(model_type, tmp_path):
    """On one device, on two that divide the kv heads, and on four that hold replicas of kv heads."""
    params = random(model_type)
    save_hf(params, tmp_path)
    written = dict(nnx.to_flat_state(nnx.state(params)))
    for model in (None, 2, 4):
        read, _ = load(tmp_path, mesh=None if model is None else kvjax.make_mesh(data=1, model=model))
        assert read.config == params.config
        again = dict(nnx.to_flat_state(nnx.state(read)))
        assert written.keys() == again.keys()
        for path, parameter in written.items():
            np.testing.assert_array_equal(again[path][...], parameter[...], err_msg=f"model={model}, {path}")
