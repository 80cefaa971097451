"""What a decoder is: shapes, RoPE and windows, in one hashable record. Families map Hugging Face configs onto it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from .rope import Llama3Scaling, Rope


class UnsupportedModelError(ValueError):
    """A config asks for an architecture or a computation that this library does not implement."""


@dataclass(frozen=True)
class DecoderConfig:
    """The static description of a decoder. Axes: V vocabulary, M hidden, F MLP, Hq query heads, H kv heads, D head.

    Attributes:
        family: the Hugging Face `model_type` this decoder is read from and written to.
        windows: one entry a layer: the sliding window in tokens (itself included), or None for full attention.
        max_positions: the length the checkpoint was trained for (`max_position_embeddings`).
    """

    family: str
    vocab_size: int
    hidden_size: int
    mlp_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    rope: Rope
    max_positions: int
    norm_epsilon: float = 1e-6
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModelError(
                f"num_attention_heads={self.num_heads} is not a multiple of num_key_value_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise UnsupportedModelError(f"head_dim={self.head_dim} is odd; RoPE rotates pairs of channels")

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def group(self) -> int:
        """Query heads per kv head, G = Hq / H."""
        return self.num_heads // self.num_kv_heads

    def bytes_per_token(self, dtype: DTypeLike) -> int:
        """Bytes that one token's keys and values take in an uncompressed cache: 2 L H D times the size of a number."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * jnp.dtype(dtype).itemsize

    @property
    def scale(self) -> float:
        """The softmax scale, 1 / sqrt(D)."""
        return self.head_dim**-0.5


def require(hf: Mapping[str, Any], field: str, *accepted: Any) -> None:
    """Raises UnsupportedModelError if `field` of a Hugging Face config is present and not one of `accepted`."""
    if field in hf and hf[field] not in accepted:
        raise UnsupportedModelError(
            f"config field {field}={hf[field]!r} is not supported for model_type={hf.get('model_type')!r}; "
            f"accepted: {', '.join(repr(value) for value in accepted)}"
        )


def integer(hf: Mapping[str, Any], field: str, default: int | None = None) -> int:
    """A positive integer; `default` where the field is absent or null. Raises UnsupportedModelError."""
    value: Any = default if hf.get(field) is None else hf[field]
    if type(value) is not int or value < 1:
        raise UnsupportedModelError(f"config field {field}={value!r} is not supported; accepted: a positive integer")
    return value


def number(hf: Mapping[str, Any], field: str, default: float | None = None) -> float:
    """A positive number; `default` where the field is absent or null. Raises UnsupportedModelError."""
    value: Any = default if hf.get(field) is None else hf[field]
    if type(value) not in (int, float) or not value > 0:
        raise UnsupportedModelError(f"config field {field}={value!r} is not supported; accepted: a positive number")
    return float(value)


def base_config(hf: Mapping[str, Any], architecture: str, windows: tuple[int | None, ...]) -> DecoderConfig:
    """The fields that all Llama-like families share, read from a Hugging Face `config.json`.

    Where a field is absent, its value is the one that transformers assumes.
    """
    if architecture not in (hf.get("architectures") or [architecture]):
        raise UnsupportedModelError(
            f"config field architectures={hf['architectures']!r} is not supported; accepted: [{architecture!r}]"
        )
    require(hf, "hidden_act", "silu", "swish")
    require(hf, "quantization_config", None)
    heads = integer(hf, "num_attention_heads")
    hidden = integer(hf, "hidden_size")
    if hf.get("head_dim") is None and hidden % heads:
        raise UnsupportedModelError(
            f"config field head_dim is absent and hidden_size={hidden} is not a multiple of num_attention_heads={heads}"
        )
    return DecoderConfig(
        family=hf["model_type"],
        vocab_size=integer(hf, "vocab_size"),
        hidden_size=hidden,
        mlp_size=integer(hf, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=integer(hf, "num_key_value_heads", heads),
        head_dim=integer(hf, "head_dim", hidden // heads),
        windows=windows,
        rope=rope_from_hf(hf),
        max_positions=integer(hf, "max_position_embeddings", 2048),
        norm_epsilon=number(hf, "rms_norm_eps", 1e-6),
        tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
    )


def base_hf_config(config: DecoderConfig, architecture: str) -> dict[str, Any]:
    """The inverse of `base_config`; a family adds what is its own. RoPE stands there in both forms, old and new."""
    rope = rope_to_hf(config.rope)
    return {
        "architectures": [architecture],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.mlp_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_parameters": rope,
        "rope_theta": config.rope.theta,
        "rope_scaling": None if config.rope.scaling is None else rope,
        "bos_token_id": None,
        "eos_token_id": None,
    }


# What each rope type may say beside its name and base.
ROPE_FIELDS = {
    "default": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def rope_from_hf(hf: Mapping[str, Any]) -> Rope:
    """Reads RoPE from `rope_parameters` (transformers 5) or from `rope_theta` and `rope_scaling` (before).

    Where both stand in a file, `rope_scaling` wins, as in transformers. Raises UnsupportedModelError for a rope type
    or a field of it that is not implemented, one that applies RoPE to a part of each head included.
    """
    require(hf, "partial_rotary_factor", None, 1.0)
    fields = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if not isinstance(fields, Mapping):
        raise UnsupportedModelError(f"config field rope_scaling={fields!r} is not supported; accepted: a mapping")
    require(fields, "partial_rotary_factor", None, 1.0)
    theta = number(fields, "rope_theta", number(hf, "rope_theta", 10_000.0))
    kind = fields.get("rope_type", fields.get("type", "default"))
    if kind not in tuple(ROPE_FIELDS):
        accepted = ", ".join(map(repr, ROPE_FIELDS))
        raise UnsupportedModelError(f"config field rope_type={kind!r} is not supported; accepted: {accepted}")
    unknown = sorted(set(fields) - {"rope_type", "type", "rope_theta", "partial_rotary_factor", *ROPE_FIELDS[kind]})
    if unknown:
        raise UnsupportedModelError(f"config field(s) {', '.join(unknown)} are not supported for rope_type={kind!r}")
    if kind == "default":
        return Rope(theta)
    trained = integer(fields, "original_max_position_embeddings", integer(hf, "max_position_embeddings", 2048))
    scaling = Llama3Scaling(
        factor=number(fields, "factor"),
        low_frequency_factor=number(fields, "low_freq_factor"),
        high_frequency_factor=number(fields, "high_freq_factor"),
        original_max_positions=integer(hf, "original_max_position_embeddings", trained),
    )
    if not scaling.low_frequency_factor < scaling.high_frequency_factor:
        raise UnsupportedModelError("rope type 'llama3' needs low_freq_factor < high_freq_factor")
    return Rope(theta, scaling)


def rope_to_hf(rope: Rope) -> dict[str, Any]:
    """The inverse of `rope_from_hf`, as transformers 5 writes it."""
    if rope.scaling is None:
        return {"rope_type": "default", "rope_theta": rope.theta}
    return {
        "rope_type": "llama3",
        "rope_theta": rope.theta,
        "factor": rope.scaling.factor,
        "low_freq_factor": rope.scaling.low_frequency_factor,
        "high_freq_factor": rope.scaling.high_frequency_factor,
        "original_max_position_embeddings": rope.scaling.original_max_positions,
    }
