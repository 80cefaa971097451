"""What a decoder is: shapes, RoPE and windows, in one hashable record. Families map Hugging Face configs onto it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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


def base_config(hf: Mapping[str, Any], windows: tuple[int | None, ...]) -> DecoderConfig:
    """The fields that all Llama-like families share, read from a Hugging Face `config.json`."""
    require(hf, "hidden_act", "silu", "swish")
    missing = [
        field
        for field in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
        if not isinstance(hf.get(field), int)
    ]
    if missing:
        raise UnsupportedModelError(f"config.json lacks the integer field(s) {', '.join(missing)}")
    heads = hf["num_attention_heads"]
    return DecoderConfig(
        family=hf["model_type"],
        vocab_size=hf["vocab_size"],
        hidden_size=hf["hidden_size"],
        mlp_size=hf["intermediate_size"],
        num_heads=heads,
        num_kv_heads=hf.get("num_key_value_heads") or heads,
        head_dim=hf.get("head_dim") or hf["hidden_size"] // heads,
        windows=windows,
        rope=rope_from_hf(hf),
        max_positions=hf.get("max_position_embeddings") or 2048,
        norm_epsilon=hf.get("rms_norm_eps", 1e-6),
        tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
    )


def base_hf_config(config: DecoderConfig) -> dict[str, Any]:
    """The inverse of `base_config`; a family adds its `architectures` and what is its own."""
    return {
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
        "rope_parameters": rope_to_hf(config.rope),
        "bos_token_id": None,
        "eos_token_id": None,
    }


def rope_from_hf(hf: Mapping[str, Any]) -> Rope:
    """Reads RoPE from `rope_parameters` (transformers 5) or from `rope_theta` and `rope_scaling` (before)."""
    parameters = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    theta = float(parameters.get("rope_theta", hf.get("rope_theta", 10_000.0)))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return Rope(theta)
    if kind == "llama3":
        return Rope(
            theta,
            Llama3Scaling(
                factor=float(parameters["factor"]),
                low_frequency_factor=float(parameters["low_freq_factor"]),
                high_frequency_factor=float(parameters["high_freq_factor"]),
                original_max_positions=int(parameters["original_max_position_embeddings"]),
            ),
        )
    raise UnsupportedModelError(f"rope type {kind!r} is not supported; accepted: 'default', 'llama3'")


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
