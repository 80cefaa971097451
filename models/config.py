"""What a decoder is: shapes, RoPE and windows, in one hashable record. Families map Hugging Face configs onto it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from .fields import UnsupportedModelError, flag, integer, number, require
from .rope import Rope
from .rope_config import rope_from_hf, rope_to_hf


@dataclass(frozen=True)
class DecoderConfig:
    """The static description of a decoder. Axes: V vocabulary, M hidden, F MLP, Hq query heads, H kv heads, D head.

    Attributes:
        family: the Hugging Face `model_type` this decoder is read from and written to.
        windows: one entry a layer: the sliding window in tokens (itself included), or None for full attention.
        max_positions: the length the checkpoint was trained for (`max_position_embeddings`).
        qkv_bias, output_bias, mlp_bias: whether the projections to q, k and v, the one back, and the MLP's have biases.
        qk_norm: whether each head of q and k is normed before rotation.
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
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModelError(
                f"num_attention_heads={self.num_heads} is not a multiple of num_key_value_heads={self.num_kv_heads}"
            )
        self.rope.check(self.head_dim)

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


# What other decoders compute and these do not, with the values at which it makes no difference.
NOT_COMPUTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "quantization_config": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "logit_scale": (None, 1.0),
    "logits_scaling": (None, 1.0),
    "embedding_multiplier": (None, 1.0),
    "residual_multiplier": (None, 1.0),
    "attention_multiplier": (None,),
    "query_pre_attn_scalar": (None,),
    "attention_chunk_size": (None,),
    "dual_chunk_attention_config": (None,),
    "no_rope_layers": (None, []),
    "use_mrope": (None, False),
    "clip_qkv": (None,),
    "use_qk_norm": (None, False),
    "qk_layernorm": (None, False),
    "lm_head_bias": (None, False),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
}


def base_config(
    hf: Mapping[str, Any], architecture: str, windows: tuple[int | None, ...], rope: Rope | None = None
) -> DecoderConfig:
    """The fields that all Llama-like families share, read from a Hugging Face `config.json`.

    Where a field is absent, its value is the one that transformers assumes. A family that knows less than every type of
    RoPE, or more than whole heads of it, gives its own. Raises UnsupportedModelError.
    """
    if architecture not in (hf.get("architectures") or [architecture]):
        raise UnsupportedModelError(
            f"config field architectures={hf['architectures']!r} is not supported; accepted: [{architecture!r}]"
        )
    for field, neutral in NOT_COMPUTED.items():
        require(hf, field, *neutral)
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
        rope=rope_from_hf(hf) if rope is None else rope,
        max_positions=integer(hf, "max_position_embeddings", 2048),
        norm_epsilon=number(hf, "rms_norm_eps", 1e-6),
        tie_embeddings=flag(hf, "tie_word_embeddings"),
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
