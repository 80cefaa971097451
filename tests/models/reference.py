"""Random transformers models and their checkpoints. An InternLM2 is a Llama whose weights are fused on saving."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

VOCAB = 100
ONES = ("norm.weight", "norm_1.weight", "norm_2.weight", "router.scale", "per_expert_scale")


def skip_unknown(model_type: str) -> None:
    """Skips a test of a family that this version of transformers does not have yet."""
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")


def reference(model_type: str, fields: dict) -> Any:
    """Returns a random model whose logits range over several units.

    With the usual standard deviation of 0.02 all logits would be close to zero.
    """
    torch.manual_seed(0)
    if model_type == "internlm2":  # transformers does not implement it
        fields = {"attention_bias" if name == "bias" else name: value for name, value in fields.items()}
        model_type = "llama"
    skip_unknown(model_type)
    defaults = {"num_hidden_layers": 1, "max_position_embeddings": 256, "initializer_range": 0.15}
    config = transformers.AutoConfig.for_model(
        model_type,
        vocab_size=VOCAB,
        intermediate_size=48,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **defaults | fields,
    )
    model = transformers.AutoModelForCausalLM.from_config(
        config,
        dtype=torch.float32,
        attn_implementation="eager",  # SDPA, the default of some versions, leaves out Gemma 2's softcap
    ).eval()
    limit_swiglu(model)
    for name, parameter in model.named_parameters():
        if name.endswith(ONES):  # ones by default, which would hide a missing or swapped norm
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        if name.endswith("sinks"):  # close to 0 by default
            torch.nn.init.normal_(parameter)
        if name.endswith("bias"):  # zeros by default
            torch.nn.init.normal_(parameter, std=0.3)
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):  # zeros by default
            torch.nn.init.normal_(buffer, std=0.3)
        if name.endswith("layer_scalar"):  # ones by default
            torch.nn.init.uniform_(buffer, 0.5, 1.5)
    return model


def limit_swiglu(model: Any) -> None:
    """Sets gpt-oss's limit to that of its config. transformers 5.0 has 7.0, whatever the config says."""
    for module in model.modules():
        if hasattr(model.config, "swiglu_limit") and hasattr(module, "limit"):
            module.limit = model.config.swiglu_limit


def read(path: Path) -> Any:
    """Returns the checkpoint of `path` as transformers reads it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    limit_swiglu(model)
    return model


def save(model: Any, model_type: str, path: Path) -> None:
    """Writes the checkpoint of a model of `reference`."""
    if model_type == "internlm2":
        save_internlm2(model, path)
    else:
        model.save_pretrained(path)


def save_internlm2(model: Any, path: Path) -> None:
    """Writes a transformers Llama as an InternLM2 checkpoint."""
    config, state = model.config, {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    hf = {
        "architectures": ["InternLM2ForCausalLM"],
        "model_type": "internlm2",
        "vocab_size": VOCAB,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "bias": config.attention_bias,
        "rope_theta": config.rope_parameters["rope_theta"],
        "rope_scaling": None,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attn_implementation": "eager",
    }
    if config.rope_parameters["rope_type"] != "default":
        hf["rope_scaling"] = {"type": config.rope_parameters["rope_type"], "factor": config.rope_parameters["factor"]}
    D, group = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    tensors = {
        "model.tok_embeddings.weight": state["model.embed_tokens.weight"],
        "model.norm.weight": state["model.norm.weight"],
    }
    if not config.tie_word_embeddings:
        tensors["output.weight"] = state["lm_head.weight"]
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}"
        for kind in ("weight", "bias") if config.attention_bias else ("weight",):
            q, k, v = (state[f"{layer}.self_attn.{x}_proj.{kind}"] for x in "qkv")
            parts = []
            for head in range(config.num_key_value_heads):
                parts += [q[head * group * D : (head + 1) * group * D]]
                parts += [k[head * D : (head + 1) * D], v[head * D : (head + 1) * D]]
            tensors[f"{layer}.attention.wqkv.{kind}"] = np.concatenate(parts)
            tensors[f"{layer}.attention.wo.{kind}"] = state[f"{layer}.self_attn.o_proj.{kind}"]
        for ours, theirs in (
            ("feed_forward.w1", "mlp.gate_proj"),
            ("feed_forward.w3", "mlp.up_proj"),
            ("feed_forward.w2", "mlp.down_proj"),
            ("attention_norm", "input_layernorm"),
            ("ffn_norm", "post_attention_layernorm"),
        ):
            tensors[f"{layer}.{ours}.weight"] = state[f"{layer}.{theirs}.weight"]
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(hf))
    save_file(tensors, path / "model.safetensors")


def fix_frequencies(model: Any, length: int) -> Any:
    """Fixes the RoPE frequencies of a model to those of prompts of this length, for all later calls."""
    rotation = model.model.rotary_emb
    if rotation.rope_type in ("dynamic", "longrope"):
        kind = model.config.rope_parameters["rope_type"]
        compute = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[kind]
        rotation.inv_freq, rotation.attention_scaling = compute(model.config, "cpu", seq_len=length)
        rotation.rope_type = "linear"  # transformers does not recompute the frequencies of this type
    return model


def logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(tokens)).logits.float().numpy()


def greedy(model: Any, tokens: np.ndarray, new: int) -> np.ndarray:
    with torch.no_grad():
        sequences = model.generate(torch.from_numpy(tokens), max_new_tokens=new, do_sample=False).numpy()
    assert sequences.shape == (tokens.shape[0], tokens.shape[1] + new)
    return sequences[:, tokens.shape[1] :]
