"""The text decoder of Qwen3.5: three gated delta nets before each layer of gated attention.

Attention has norms on q and k heads, RoPE on a quarter of each head, and a gate on each head's context, whose
projection shares a tensor with that of queries. All norms of hidden states and heads multiply by 1 + scale.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from .config import DecoderConfig, base_config, base_hf_config
from .fields import UnsupportedModelError, integer, layer_count, require, unsupported
from .hybrid import hybrid_weights, mlp
from .recurrence import Recurrence
from .rope import Rope
from .rope_config import rope_from_hf
from .weights import Weight

ARCHITECTURE = "Qwen3_5ForCausalLM"
LINEAR, FULL = "linear_attention", "full_attention"
SIZES = {  # the fields of `Recurrence`, with the defaults of transformers
    "key_heads": ("linear_num_key_heads", 16),
    "value_heads": ("linear_num_value_heads", 32),
    "key_dim": ("linear_key_head_dim", 128),
    "value_dim": ("linear_value_head_dim", 128),
    "taps": ("linear_conv_kernel_dim", 4),
}
MATRICES = {"inputs": "in_proj_qkv", "gate": "in_proj_z", "rate": "in_proj_b", "decay": "in_proj_a"}  # by our names
FIELDS = (
    "layer_types",
    "full_attention_interval",
    "attn_output_gate",
    "mamba_ssm_dtype",
    "mtp_num_hidden_layers",  # layers that foretell several tokens: `text_name` leaves their tensors unread
    "mtp_use_dedicated_embeddings",
    *(field for field, _ in SIZES.values()),
)
# The defaults of transformers for absent fields.
DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "partial_rotary_factor": 0.25,
}
POSITIONS = ("mrope_section", "mrope_interleaved")  # how images and films turn; all positions of a text are equal
OTHER = ("model.visual.", "mtp.")  # tensors of images and films, and of the layers that foretell several tokens


def config_from_hf(
    hf: Mapping[str, Any], architecture: str = ARCHITECTURE, computed: Collection[str] = ()
) -> DecoderConfig:
    """Maps a config. A family that adds experts names its architecture, and what it computes as `base_config` does."""
    hf = DEFAULTS | dict(hf)
    require(hf, "sliding_window", None)
    require(hf, "attention_bias", None, False)
    require(hf, "attn_output_gate", None, True)
    require(hf, "mamba_ssm_dtype", None, "float32")
    before = recurrent_before(hf)
    config = base_config(hf, architecture, (None,) * len(before), _rope(hf), computed)
    sizes = {name: integer(hf, field, default) for name, (field, default) in SIZES.items()}
    recurrence = Recurrence(before, **sizes)
    if recurrence.value_heads % recurrence.key_heads:
        raise UnsupportedModelError(
            f"linear_num_value_heads={recurrence.value_heads} is not a multiple of "
            f"linear_num_key_heads={recurrence.key_heads}"
        )
    if recurrence.taps < 2:
        raise unsupported("linear_conv_kernel_dim", recurrence.taps, "an integer >= 2")
    return replace(config, qk_norm=True, unit_offset_norms=True, output_gate=True, recurrence=recurrence)


def recurrent_before(hf: Mapping[str, Any]) -> tuple[int, ...]:
    """Reads how many recurrent layers precede each attention layer. Raises UnsupportedModelError."""
    layers, interval = layer_count(hf), integer(hf, "full_attention_interval", 4)
    default = [LINEAR if (i + 1) % interval else FULL for i in range(layers)]
    kinds = default if hf.get("layer_types") is None else hf["layer_types"]
    if not isinstance(kinds, list) or len(kinds) != layers or not {*map(str, kinds)} <= {LINEAR, FULL}:
        raise unsupported("layer_types", kinds, f"{layers} of {LINEAR!r} and {FULL!r}")
    if kinds[-1] != FULL:
        raise unsupported("layer_types", kinds, f"a last layer of {FULL!r}")
    runs = "".join("." if kind == LINEAR else "|" for kind in kinds).split("|")
    return tuple(map(len, runs[:-1]))


def _rope(hf: Mapping[str, Any]) -> Rope:
    given = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if isinstance(given, Mapping):
        given = {name: value for name, value in given.items() if name not in POSITIONS}
    return rope_from_hf(dict(hf) | {"rope_parameters": given, "rope_scaling": None}, partial=True)


def config_to_hf(config: DecoderConfig, architecture: str = ARCHITECTURE) -> dict[str, Any]:
    recurrence = config.recurrence
    assert recurrence is not None
    kinds = [kind for count in recurrence.before for kind in (*[LINEAR] * count, FULL)]
    own = {field: getattr(recurrence, name) for name, (field, _) in SIZES.items()}
    own |= {"num_hidden_layers": len(kinds), "layer_types": kinds}
    own |= {"attention_bias": False, "partial_rotary_factor": config.rope.partial_rotary_factor}
    return base_hf_config(config, architecture) | own


def text_name(name: str, config: DecoderConfig) -> str | None:
    """Returns the name in `weights` of a published tensor; None for a tensor that a text does not need."""
    return None if name.startswith(OTHER) else name.replace("model.language_model.", "model.", 1)


def weights(config: DecoderConfig) -> list[Weight]:
    return hybrid_weights(config, projections, mlp)


def projections(ours: str, theirs: str) -> list[Weight]:
    """The matrices that a recurrent layer reads hidden states with."""
    return [Weight(f"{ours}.{a}", f"{theirs}.{b}.weight", "linear") for a, b in MATRICES.items()]
