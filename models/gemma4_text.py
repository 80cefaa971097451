"""Gemma 4's text decoder: kv heads by kind of layer, norms of values, and a scalar per layer.

Layers with full attention may have kv heads of another number and size than those with a window, and may take values
from the projection of keys. Layers may have inputs of their own, and the last ones may read the entries of others.
Layers may have experts beside their MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import qwen2
from .config import ACTIVATIONS, DecoderConfig, KvHeads, base_config, base_hf_config
from .fields import flag, integer, layer_count, number, require, unsupported
from .gemma3_text import KINDS, by_kind_to_hf, rope_by_kind
from .llama import weights as llama_weights
from .mixtral import expert_counts
from .mixture import Mixture
from .readers import Readers
from .rope import ProportionalScaling, Rope
from .rope_config import rope_from_hf
from .stacked import StackedLinear
from .weights import FusedRows, Weight

ARCHITECTURE = "Gemma4ForCausalLM"
# What is not computed, with the values that turn it off.
REFUSED: dict[str, tuple[Any, ...]] = {
    "rope_scaling": (None,),  # transformers ignores it
    "rope_theta": (None,),
}
BY_KIND = ("attention_k_eq_v", "global_head_dim", "num_global_key_value_heads", "per_layer_config")
MIXTURE = ("enable_moe_block", "top_k_experts", "moe_intermediate_size")
READERS = ("num_kv_shared_layers", "use_double_wide_mlp")
INPUTS = ("hidden_size_per_layer_input", "vocab_size_per_layer_input")
FIELDS = ("sliding_window", "layer_types", *BY_KIND, *INPUTS, *READERS, *MIXTURE, *REFUSED)
COMPUTED = ("num_experts", "final_logit_softcapping", "hidden_act", "hidden_activation", "use_bidirectional_attention")
KEYS = ("attention.key", "attention.value")  # the parameters that readers have not
PERIOD = 6  # one layer of so many has full attention
OTHER = ("model.vision_tower.", "model.embed_vision.", "model.audio_tower.", "model.embed_audio.")  # not of a text
# The defaults of transformers for absent fields.
DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
}
ROPE = {
    qwen2.FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    qwen2.SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}


def config_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    hf = DEFAULTS | dict(hf)
    for field, accepted in REFUSED.items():
        require(hf, field, *accepted)
    require(hf, "hidden_act", None, *ACTIVATIONS["gelu_tanh"], "gelu")  # transformers computes `hidden_activation`
    require(hf, "hidden_activation", None, *ACTIVATIONS["gelu_tanh"])
    require(hf, "use_bidirectional_attention", None, False, "vision")  # tokens of images alone see later ones
    kinds = hf.get("layer_types")
    if kinds is None:
        kinds = [qwen2.SLIDING if (i + 1) % PERIOD else qwen2.FULL for i in range(layer_count(hf))]
    if isinstance(kinds, list):  # transformers gives the last layer full attention in any case
        kinds = [*kinds[:-1], qwen2.FULL]
    windows = qwen2.layer_windows(hf | {"use_sliding_window": True, "layer_types": kinds})
    full, sliding = (_rope(fields) for fields in rope_by_kind(hf | {"rope_parameters": _by_kind(hf)}, {}, {}))
    heads, readers = _full_heads(hf, windows), _readers(hf, windows)
    own = windows if readers is None else windows[: -len(readers.sources)]
    config = base_config(
        hf | {"num_key_value_heads": heads.number, "head_dim": heads.size}, ARCHITECTURE, own, full, COMPUTED
    )
    bias, cap = flag(hf, "attention_bias"), hf.get("final_logit_softcapping")
    return replace(
        config,
        window_rope=sliding,
        window_heads=_sliding_heads(hf),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        value_norm=True,
        keys_are_values=flag(hf, "attention_k_eq_v"),
        layer_scalars=True,
        layer_input_size=_input_size(hf),
        post_norm=True,
        activation="gelu_tanh",
        attention_scale=1.0,
        embedding_scale=config.hidden_size**0.5,
        logit_softcap=None if cap is None else number(hf, "final_logit_softcapping"),
        mixture=_mixture(hf),
        readers=readers,
    )


def _mixture(hf: Mapping[str, Any]) -> Mixture | None:
    """Reads the experts that layers have beside their MLP. In their absence, transformers reads no other field."""
    if not flag(hf, "enable_moe_block"):
        return None
    experts, per_token = expert_counts(hf, "num_experts", "top_k_experts")
    return Mixture(experts, per_token, integer(hf, "moe_intermediate_size"), beside_mlp=True)


def _readers(hf: Mapping[str, Any], windows: tuple[int | None, ...]) -> Readers | None:
    """Reads which layers have no keys and values: the last ones, each of which reads the last of its kind before."""
    wide, shared = flag(hf, "use_double_wide_mlp"), hf.get("num_kv_shared_layers")
    if shared in (None, 0):
        return None
    count = integer(hf, "num_kv_shared_layers")
    last = {window: i for i, window in enumerate(windows[:-count])}
    if set(last) != set(windows):
        raise unsupported("num_kv_shared_layers", shared, "a number that leaves a layer of each kind before these")
    sources = tuple(last[window] for window in windows[-count:])
    return Readers(sources, integer(hf, "intermediate_size") * (2 if wide else 1))


def _input_size(hf: Mapping[str, Any]) -> int:
    """Reads the number of channels of each layer's inputs, whose table has a row for each token."""
    if not hf["hidden_size_per_layer_input"]:
        return 0
    require(hf, "vocab_size_per_layer_input", integer(hf, "vocab_size"))
    return integer(hf, "hidden_size_per_layer_input")


def _sliding_heads(hf: Mapping[str, Any]) -> KvHeads:
    return KvHeads(integer(hf, "num_key_value_heads", integer(hf, "num_attention_heads")), integer(hf, "head_dim"))


def _full_heads(hf: Mapping[str, Any], windows: tuple[int | None, ...]) -> KvHeads:
    """Reads the kv heads of layers with full attention, which have the same by either form of config.

    `per_layer_config` has what differs in some layers. In its absence `global_head_dim` and, where keys are values,
    `num_global_key_value_heads` say so.
    """
    sliding, by_layer = _sliding_heads(hf), hf.get("per_layer_config")
    if by_layer is None:
        shared = flag(hf, "attention_k_eq_v")
        count = integer(hf, "num_global_key_value_heads", sliding.number) if shared else sliding.number
        return KvHeads(count, integer(hf, "global_head_dim"))
    if by_layer == {}:  # no layer differs
        return sliding
    full = [i for i, window in enumerate(windows) if window is None]
    names = {"head_dim", "num_key_value_heads"}
    own = list(by_layer.values()) if isinstance(by_layer, Mapping) else []
    layers = sorted(int(i) if str(i).isdecimal() else -1 for i in by_layer) if own else []  # "05" or "5"
    if not own or layers != full or not all(x == own[0] and x and set(x) <= names for x in own):
        raise unsupported(
            "per_layer_config", by_layer, f"equal mappings with some of {sorted(names)} for layers {full}"
        )
    return KvHeads(integer(own[0], "num_key_value_heads", sliding.number), integer(own[0], "head_dim", sliding.size))


def _by_kind(hf: Mapping[str, Any]) -> Any:
    given = hf.get("rope_parameters") or {}
    return ROPE | dict(given) if isinstance(given, Mapping) and set(given) <= set(ROPE) else given


def _rope(fields: Mapping[str, Any]) -> Rope:
    """Reads the RoPE of a kind of layer."""
    own = fields["rope_parameters"]
    if not isinstance(own, Mapping) or own.get("rope_type") != ProportionalScaling.rope_type:
        return rope_from_hf(fields, KINDS)
    fraction = number(own, "partial_rotary_factor", 1.0)
    if fraction > 1:
        raise unsupported("partial_rotary_factor", fraction, "a number in (0, 1]")
    others = {name: value for name, value in own.items() if name not in ("factor", "partial_rotary_factor")}
    unscaled = rope_from_hf({"rope_parameters": others | {"rope_type": "default"}})
    return replace(unscaled, scaling=ProportionalScaling(number(own, "factor", 1.0), fraction))


def _whole(config: DecoderConfig) -> DecoderConfig:
    """Returns the config of a model whose readers have keys and values, too."""
    return replace(config, windows=config.windows + tuple(config.windows[i] for i in config.sources), readers=None)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    whole, sliding, readers = _whole(config), config.window_heads, config.readers
    own = qwen2.kinds_to_hf(whole)
    assert sliding is not None
    full = {"head_dim": config.head_dim, "num_key_value_heads": config.num_kv_heads}
    written = base_hf_config(whole, ARCHITECTURE) | {
        "num_key_value_heads": sliding.number,
        "head_dim": sliding.size,
        "global_head_dim": config.head_dim,
        "num_global_key_value_heads": config.num_kv_heads,
        "per_layer_config": {str(i): full for i, window in enumerate(whole.windows) if window is None},
        "attention_k_eq_v": config.keys_are_values,
        "hidden_activation": ACTIVATIONS[config.activation][0],
        "attention_bias": config.qkv_bias,
        "sliding_window": own["sliding_window"] or DEFAULTS["sliding_window"],
        "layer_types": own["layer_types"],
        "final_logit_softcapping": config.logit_softcap,
        "hidden_size_per_layer_input": config.layer_input_size,
        "vocab_size_per_layer_input": config.vocab_size,
        "enable_moe_block": config.mixture is not None,
        "num_experts": None if config.mixture is None else config.mixture.experts,
        "top_k_experts": None if config.mixture is None else config.mixture.per_token,
        "moe_intermediate_size": None if config.mixture is None else config.mixture.size,
        "num_kv_shared_layers": len(config.sources),
        "use_double_wide_mlp": readers is not None and readers.mlp_size != config.mlp_size,
        "rope_parameters": by_kind_to_hf(config),
    }
    return {name: value for name, value in written.items() if name not in ("rope_theta", "rope_scaling", "hidden_act")}


def weights(config: DecoderConfig) -> list[Weight]:
    first, table = config.num_layers, []
    for weight in _whole_weights(_whole(config)):
        block, i, rest = [*weight.path.split(".", 2), "", ""][:3]
        if block != "layers" or int(i) < first:
            table.append(weight)
        elif not rest.startswith(KEYS):
            table.append(replace(weight, path=f"readers.{int(i) - first}.{rest}"))
    return table


def _whole_weights(config: DecoderConfig) -> list[Weight]:
    """The weights of a model in which all layers have keys and values."""
    table = llama_weights(config)
    if config.mixture is not None:
        for i in range(config.num_layers):
            table += _expert_weights(f"layers.{i}.experts", f"model.layers.{i}", config.mixture.size)
    if not config.layer_input_size:
        return table
    table += [
        Weight("inputs.embed", "model.embed_tokens_per_layer.weight", "embedding"),
        Weight("inputs.projection", "model.per_layer_model_projection.weight", "linear"),
        Weight("inputs.norm.scale", "model.per_layer_projection_norm.weight", "vector"),
    ]
    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}.input", f"model.layers.{i}"
        table += [
            Weight(f"{ours}.gate", f"{theirs}.per_layer_input_gate.weight", "linear"),
            Weight(f"{ours}.projection", f"{theirs}.per_layer_projection.weight", "linear"),
            Weight(f"{ours}.norm.scale", f"{theirs}.post_per_layer_input_norm.weight", "vector"),
        ]
    return table


def _expert_weights(ours: str, theirs: str, size: int) -> list[Weight]:
    """The weights of a layer's experts and of the norms around them."""
    fused, post = f"{theirs}.experts.gate_up_proj", f"{theirs}.post_feedforward_layernorm"
    return [
        Weight(f"{ours}.router", f"{theirs}.router.proj.weight", "linear"),
        Weight(f"{ours}.router_scale", f"{theirs}.router.scale", "vector"),
        Weight(f"{ours}.factor", f"{theirs}.router.per_expert_scale", "vector"),
        StackedLinear(f"{ours}.gate", fused, rows=FusedRows(0, size, 2 * size)),
        StackedLinear(f"{ours}.up", fused, rows=FusedRows(size, 2 * size, 2 * size)),
        StackedLinear(f"{ours}.down", f"{theirs}.experts.down_proj"),
        Weight(f"{ours}.norm.scale", f"{theirs}.pre_feedforward_layernorm_2.weight", "vector"),
        Weight(f"{ours}.mlp_post_norm.scale", f"{post}_1.weight", "vector"),
        Weight(f"{ours}.post_norm.scale", f"{post}_2.weight", "vector"),
    ]


def text_name(name: str, config: DecoderConfig) -> str | None:
    """Returns the name in `weights` of a published tensor; None for a tensor that a text does not need.

    These are those of images and sounds, and the keys and values of layers that read another layer's.
    """
    if name.startswith(OTHER):
        return None
    own = name.replace("model.language_model.", "model.", 1)
    unread = (f"model.layers.{config.num_layers + i}.self_attn.{x}" for i in range(len(config.sources)) for x in "kv")
    return None if own.startswith(tuple(f"{start}_{what}" for start in unread for what in ("proj.", "norm."))) else own
