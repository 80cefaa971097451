"""Llama 2, 3 and 3.1 (arXiv 2307.09288, 2407.21783): config mapping and tensor names in Hugging Face checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from .config import DecoderConfig, base_config, base_hf_config
from .fields import flag, layer_count, require
from .weights import FusedRows, Weight, linear_weights

ARCHITECTURE = "LlamaForCausalLM"
FIELDS = ("sliding_window", "layer_types")


def config_from_hf(
    hf: Mapping[str, Any], architecture: str = ARCHITECTURE, computed: Collection[str] = ()
) -> DecoderConfig:
    """Maps a config. A family that adds to Llama names its architecture, and what it computes as `base_config` does."""
    bias = flag(hf, "attention_bias")
    return replace(
        base_config(hf, architecture, windows=no_windows(hf), computed={"mlp_bias", *computed}),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=flag(hf, "mlp_bias"),
    )


def no_windows(hf: Mapping[str, Any]) -> tuple[None, ...]:
    """The sliding windows of a family that has none. Raises UnsupportedModelError if a config asks for one."""
    require(hf, "sliding_window", None)
    layers = layer_count(hf)
    require(hf, "layer_types", None, ["full_attention"] * layers)
    return (None,) * layers


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    own = {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}
    return base_hf_config(config, ARCHITECTURE) | own


def weights(config: DecoderConfig) -> list[Weight]:
    """The weights of most families. The config decides which biases and norms are among them."""
    table = [
        Weight("embed", "model.embed_tokens.weight", "embedding"),
        Weight("norm.scale", "model.norm.weight", "vector"),
    ]
    if not config.tie_embeddings:
        table.append(Weight("unembed", "lm_head.weight", "linear"))
    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        table += [
            *linear_weights(f"{ours}.attention.query", f"{theirs}.self_attn.q_proj", config.qkv_bias),
            *linear_weights(f"{ours}.attention.key", f"{theirs}.self_attn.k_proj", config.qkv_bias),
            *linear_weights(
                f"{ours}.attention.output", f"{theirs}.self_attn.o_proj", config.output_bias, layout="linear_from_heads"
            ),
            *linear_weights(f"{ours}.mlp.gate", f"{theirs}.mlp.gate_proj", config.mlp_bias),
            *linear_weights(f"{ours}.mlp.up", f"{theirs}.mlp.up_proj", config.mlp_bias),
            *linear_weights(f"{ours}.mlp.down", f"{theirs}.mlp.down_proj", config.mlp_bias),
        ]
        if config.has_values(i):
            table += linear_weights(f"{ours}.attention.value", f"{theirs}.self_attn.v_proj", config.qkv_bias)
        norms = layer_norms(config)
        if config.qk_norm:
            norms |= {"attention.query_norm": "self_attn.q_norm", "attention.key_norm": "self_attn.k_norm"}
        table += [Weight(f"{ours}.{a}.scale", f"{theirs}.{b}.weight", "vector") for a, b in norms.items()]
        if config.layer_scalars:
            table.append(Weight(f"{ours}.scalar", f"{theirs}.layer_scalar", "vector"))
    return table


def renamed_weights(
    config: DecoderConfig, names: Mapping[str, str], rows: Mapping[str, FusedRows] | None = None
) -> list[Weight]:
    """The weights of a family whose tensors have other names than Llama's, or hold several parameters.

    Args:
        config: of the model.
        names: the family's name of each module that has another one, by Llama's. Those of layers are without the layer.
        rows: the rows of each module that shares a tensor, by Llama's name.
    """
    table = []
    for weight in weights(config):
        full, _, kind = weight.name.rpartition(".")
        module = full.split(".", 3)[-1] if full.startswith("model.layers.") else full
        name = f"{full.removesuffix(module)}{names.get(module, module)}.{kind}"
        table.append(replace(weight, name=name, rows=(rows or {}).get(module)))
    return table


def gate_up_rows(size: int) -> dict[str, FusedRows]:
    """The rows of a tensor with the gate and then the up matrix of an MLP of so many columns."""
    return {"mlp.gate_proj": FusedRows(0, size, 2 * size), "mlp.up_proj": FusedRows(size, 2 * size, 2 * size)}


def layer_norms(config: DecoderConfig) -> dict[str, str]:
    """The norms of a layer's hidden states, by their names here and in the checkpoint.

    With norms on both sides of attention and MLP, `post_attention_layernorm` is what its name says. Without norms after
    them, it is the norm before the MLP.
    """
    names: dict[str, str] = {}
    if config.pre_norm:
        mlp = "pre_feedforward_layernorm" if config.post_norm else "post_attention_layernorm"
        names |= {"attention_norm": "input_layernorm", "mlp_norm": mlp}
    if config.post_norm:
        names |= {
            "attention_post_norm": "post_attention_layernorm",
            "mlp_post_norm": "post_feedforward_layernorm",
        }
    return names
