"""DeepSeek-V3 (arXiv 2412.19437): attention over latents, and experts that are chosen by independent scores.

The first layers have an MLP. The others have experts, beside an MLP that all tokens share. Published checkpoints also
hold layers that foretell several tokens, whose tensors are left unread.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .config import DecoderConfig, base_config, base_hf_config
from .fields import UnsupportedModelError, flag, integer, layer_count, number, require, unsupported
from .latent import Latent
from .mixtral import expert_counts, weights_named
from .mixture import Mixture
from .qwen3_moe import EXPERTS
from .rope_config import rope_from_hf
from .routing import JUDGES, SigmoidRouting
from .weights import FusedRows, Weight, mlp_weights

__all__ = ["EXPERTS"]
ARCHITECTURE = "DeepseekV3ForCausalLM"
SIZES = {  # of attention, with the defaults of transformers
    "rank": ("kv_lora_rank", 512),
    "rotated": ("qk_rope_head_dim", 64),
    "unrotated": ("qk_nope_head_dim", 128),
    "value": ("v_head_dim", 128),
}
ATTENTION = (*(field for field, _ in SIZES.values()), "q_lora_rank", "qk_head_dim", "rope_interleave")
MIXTURE = (
    *("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"),
    *("n_group", "topk_group", "routed_scaling_factor", "topk_method", "scoring_func"),
    *("first_k_dense_replace", "moe_layer_freq", "aux_loss_alpha", "seq_aux", "ep_size"),
    *("num_nextn_predict_layers", "num_mtp_layers"),  # layers that foretell several tokens
)
FIELDS = (*ATTENTION, *MIXTURE)
# The defaults of transformers for absent fields. An explicit null of `q_lora_rank` means no latent of queries.
DEFAULTS = {
    "max_position_embeddings": 4096,
    "q_lora_rank": 1536,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
}


def config_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    hf = DEFAULTS | dict(hf)
    return replace(config_over_latents(hf, ARCHITECTURE), mixture=mixture_from_hf(hf, first_layers(hf)))


def config_over_latents(
    hf: Mapping[str, Any], architecture: str, sizes: Mapping[str, tuple[str, int]] = SIZES
) -> DecoderConfig:
    """Maps all but the experts. Raises UnsupportedModelError."""
    require(hf, "sliding_window", None)
    require(hf, "attention_bias", None, False)
    heads = integer(hf, "num_attention_heads")
    require(hf, "num_key_value_heads", None, heads)
    own = {name: integer(hf, field, default) for name, (field, default) in sizes.items()}
    rank = None if hf["q_lora_rank"] is None else integer(hf, "q_lora_rank")
    latent = Latent(**own, query_rank=rank, paired=flag(hf, "rope_interleave", True), growth=_growth(hf))
    require(hf, "head_dim", None, latent.rotated)
    require(hf, "qk_head_dim", None, latent.head_dim)
    rope = rope_from_hf(hf, ("default", "linear", "llama3", "yarn"))
    one_head = {"head_dim": latent.key_dim, "num_key_value_heads": 1}
    rope = replace(rope, partial_rotary_factor=latent.rotated_fraction)
    config = base_config(dict(hf) | one_head, architecture, (None,) * layer_count(hf), rope)
    return replace(config, latent=latent, attention_scale=latent.scale)


def _growth(hf: Mapping[str, Any]) -> float:
    """Reads the factor of the square root of the logits' scale, of which YaRN's fields say how far contexts grow."""
    fields = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if not isinstance(fields, Mapping) or not fields.get("mscale_all_dim"):
        return 1.0
    return 0.1 * number(fields, "mscale_all_dim") * math.log(max(number(fields, "factor"), 1.0)) + 1.0


def first_layers(hf: Mapping[str, Any]) -> tuple[int, ...]:
    """Reads which layers have an MLP in place of experts: the first ones. Raises UnsupportedModelError."""
    require(hf, "moe_layer_freq", None, 1)
    count = hf["first_k_dense_replace"]
    if type(count) is not int or count < 0:
        raise unsupported("first_k_dense_replace", count, "an integer >= 0")
    return tuple(range(min(count, layer_count(hf))))


def mixture_from_hf(hf: Mapping[str, Any], dense_layers: tuple[int, ...]) -> Mixture:
    """Reads the experts. Raises UnsupportedModelError."""
    require(hf, "scoring_func", None, "sigmoid")
    require(hf, "topk_method", None, "noaux_tc")
    experts, per_token = expert_counts(hf, "n_routed_experts")
    groups, taken = integer(hf, "n_group"), integer(hf, "topk_group")
    if experts % groups or taken > groups or (taken < groups and experts < JUDGES * groups):
        raise UnsupportedModelError(
            f"config fields n_group={groups} and topk_group={taken} do not divide n_routed_experts={experts}; "
            f"accepted: groups of equal size, at least {JUDGES} experts, and at most all groups"
        )
    if per_token > taken * (experts // groups):
        raise UnsupportedModelError(
            f"config field num_experts_per_tok={per_token} is more than the experts of topk_group={taken} groups"
        )
    size = integer(hf, "moe_intermediate_size")
    return Mixture(
        experts,
        per_token,
        size,
        normalized=flag(hf, "norm_topk_prob", True),
        dense_layers=dense_layers,
        shared=size * integer(hf, "n_shared_experts"),
        shared_gate=False,
        sigmoid=SigmoidRouting(groups, taken, number(hf, "routed_scaling_factor")),
    )


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    assert config.mixture is not None
    dense = {"first_k_dense_replace": len(config.mixture.dense_layers)}
    return latents_to_hf(config, ARCHITECTURE) | mixture_to_hf(config.mixture) | dense


def latents_to_hf(config: DecoderConfig, architecture: str) -> dict[str, Any]:
    """The inverse of `config_over_latents`."""
    latent = config.latent
    assert latent is not None
    written = base_hf_config(replace(config, rope=replace(config.rope, partial_rotary_factor=1.0)), architecture)
    if latent.growth != 1:
        factor = config.rope.scaling.factor  # type: ignore[union-attr]
        growth = (latent.growth - 1) / (0.1 * math.log(factor))
        for name in ("rope_parameters", "rope_scaling"):
            written[name] = written[name] | {"mscale_all_dim": growth}
    own = {field: getattr(latent, name) for name, (field, _) in SIZES.items()}
    own |= {"q_lora_rank": latent.query_rank, "rope_interleave": latent.paired}
    return written | own | {"head_dim": latent.rotated, "num_key_value_heads": config.num_heads}


def mixture_to_hf(mixture: Mixture) -> dict[str, Any]:
    """The inverse of `mixture_from_hf`, but for the layers without experts."""
    assert mixture.sigmoid is not None
    return experts_to_hf(mixture) | {
        "norm_topk_prob": mixture.normalized,
        "n_group": mixture.sigmoid.groups,
        "topk_group": mixture.sigmoid.groups_per_token,
        "routed_scaling_factor": mixture.sigmoid.scale,
    }


def experts_to_hf(mixture: Mixture) -> dict[str, Any]:
    """The numbers and sizes of experts, as all models with a shared MLP without a gate write them."""
    assert mixture.shared is not None
    return {
        "n_routed_experts": mixture.experts,
        "n_shared_experts": mixture.shared // mixture.size,
        "num_experts_per_tok": mixture.per_token,
        "moe_intermediate_size": mixture.size,
    }


def text_name(name: str, config: DecoderConfig) -> str | None:
    """Returns the name of a published tensor; None for one of the layers that foretell several tokens."""
    _, _, layer = name.partition("model.layers.")
    index = layer.partition(".")[0]
    return None if index.isdecimal() and int(index) >= config.num_layers else name


def weights(config: DecoderConfig) -> list[Weight]:
    table = [weight for weight in with_experts(config) if ".attention." not in weight.path]
    for i in range(config.num_layers):
        table += _attention(config, f"layers.{i}.attention", f"model.layers.{i}.self_attn")
    return table


def with_experts(config: DecoderConfig) -> list[Weight]:
    """The weights of Llama, with experts and the MLP that they share in the layers that have them."""
    assert config.mixture is not None
    table = weights_named(config, EXPERTS)
    for i in range(config.num_layers):
        if config.has_experts(i):
            ours, theirs = f"layers.{i}", f"model.layers.{i}.mlp"
            table += mlp_weights(f"{ours}.shared", f"{theirs}.shared_experts")
            if config.mixture.sigmoid is not None:
                bias = f"{theirs}.gate.e_score_correction_bias"
                table.append(Weight(f"{ours}.experts.router_bias", bias, "vector", wide=True))
    return table


def _attention(config: DecoderConfig, ours: str, theirs: str) -> list[Weight]:
    """The weights of a layer's attention. Three tensors hold two parameters each, one of them for every head."""
    latent = config.latent
    assert latent is not None
    R, C, P, V = latent.rank, latent.rotated, latent.unrotated, latent.value
    paired = C if latent.paired else 0
    down, up = f"{theirs}.kv_a_proj_with_mqa.weight", f"{theirs}.kv_b_proj.weight"
    query = f"{theirs}.q_proj.weight" if latent.query_rank is None else f"{theirs}.q_b_proj.weight"
    table = [
        Weight(f"{ours}.query", query, "linear", FusedRows(0, P, P + C)),
        Weight(f"{ours}.query_rotated", query, "linear", FusedRows(P, P + C, P + C), paired=paired),
        Weight(f"{ours}.down", down, "linear", FusedRows(0, R, R + C)),
        Weight(f"{ours}.key_rotated", down, "linear", FusedRows(R, R + C, R + C), paired=paired),
        Weight(f"{ours}.norm.scale", f"{theirs}.kv_a_layernorm.weight", "vector"),
        Weight(f"{ours}.key", up, "linear", FusedRows(0, P, P + V)),
        Weight(f"{ours}.value", up, "linear", FusedRows(P, P + V, P + V)),
        Weight(f"{ours}.output", f"{theirs}.o_proj.weight", "linear_from_heads"),
    ]
    if latent.query_rank is not None:
        table.append(Weight(f"{ours}.query_down", f"{theirs}.q_a_proj.weight", "linear"))
        table.append(Weight(f"{ours}.query_norm.scale", f"{theirs}.q_a_layernorm.weight", "vector"))
    return table
