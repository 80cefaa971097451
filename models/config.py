"""DecoderConfig: the shapes, RoPE and windows of a decoder in one hashable record.

Each family maps Hugging Face configs to it and back, on top of `base_config` and `base_hf_config`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from .fields import UnsupportedModelError, flag, integer, number, require
from .latent import Latent
from .mixture import Mixture
from .readers import Readers
from .recurrence import Recurrence, RecurrentState
from .rope import NO_ROPE, Rope
from .rope_config import rope_from_hf, rope_to_hf


class KvHeads(NamedTuple):
    """The kv heads of a layer.

    Attributes:
        number: H.
        size: D.
    """

    number: int
    size: int

    def __str__(self) -> str:
        return f"{self.number} of {self.size} channels"


@dataclass(frozen=True)
class DecoderConfig:
    """The static description of a decoder. It is hashable, so it can be a static argument of `jax.jit`.

    Attributes:
        family: the Hugging Face `model_type` that this decoder is read from and written to.
        vocab_size: V.
        hidden_size: E.
        mlp_size: F of an MLP; `mixture` has that of experts.
        num_heads: Hq, a multiple of H.
        num_kv_heads: H; `window_heads` may have another number.
        head_dim: D; likewise.
        windows: one item per layer: the sliding window in tokens (the query's own token included), or None for full
            attention.
        rope: the rotary position embedding.
        max_positions: the context length that the checkpoint was trained for (`max_position_embeddings`), in tokens.
        norm_epsilon: the epsilon of all RMS norms.
        unit_offset_norms: whether all RMS norms multiply by 1 + scale instead of scale.
        activation: of the MLP's gate; a key of ACTIVATIONS.
        tie_embeddings: whether the output matrix is the embedding matrix.
        qkv_bias: whether the query, key and value projections have biases.
        output_bias: whether the attention output projection has a bias.
        mlp_bias: whether the three MLP projections have biases.
        qk_norm: whether an RMS norm is applied to each query and key head before rotation.
        joint_qk_norm: whether that norm takes all query heads, and all key heads, as one vector.
        unrotated: the indices of the layers without RoPE.
        window_rope: the RoPE of the layers with a sliding window; None for `rope`.
        window_heads: the kv heads of the layers with a sliding window; None for `num_kv_heads` of size `head_dim`.
        value_norm: whether each value head is divided by its root mean square.
        keys_are_values: whether the values of layers without a window are their keys before norm and rotation.
        layer_scalars: whether the output of each layer is multiplied by a number of its own.
        layer_input_size: P, the channels of the input that each layer has beside the hidden states; 0 for no inputs.
        pre_norm: whether an RMS norm is applied to the input of attention and of the MLP.
        post_norm: whether an RMS norm is applied to the output of attention and of the MLP, before it is added.
        attention_scale: the factor of q k^T; None for 1 / sqrt(D).
        attention_sinks: whether each query head has a logit that joins the denominator of its softmax.
        attention_softcap: c of c tanh(x / c), which is applied to the scaled attention logits; None for no cap.
        logit_softcap: the same for the logits of tokens.
        embedding_scale: the factor of the embeddings, rounded to their dtype.
        residual_scale: the factor of what attention and the MLP add to the hidden states.
        logit_divisor: what logits are divided by.
        mixture: the experts that layers have instead of an MLP, or beside it; recurrent layers have all of them. None
            for no experts.
        latent: the sizes of attention over latents, which makes the model one of a single kv head with `latent.key_dim`
            channels; None for attention over keys and values.
        output_gate: whether contexts are multiplied by the sigmoid of a projection of the attention's input.
        recurrence: the recurrent layers of a hybrid model, which have no attention and no entries; None for no such
            layers. Layers are attention layers everywhere else, and are counted without these.
        readers: the layers behind all others that read another layer's entries, and have none; None for no such layers.
            Layers are counted without these, too.

    Raises:
        UnsupportedModelError: `num_heads` is not a multiple of the number of kv heads, `rope` or `window_rope` cannot
            rotate heads of their size, or the frequencies of `window_rope` depend on the length of a prompt.
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
    joint_qk_norm: bool = False
    unrotated: tuple[int, ...] = ()
    window_rope: Rope | None = None
    window_heads: KvHeads | None = None
    value_norm: bool = False
    keys_are_values: bool = False
    layer_scalars: bool = False
    layer_input_size: int = 0
    pre_norm: bool = True
    post_norm: bool = False
    unit_offset_norms: bool = False
    activation: str = "silu"
    attention_scale: float | None = None
    attention_sinks: bool = False
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_divisor: float = 1.0
    mixture: Mixture | None = None
    latent: Latent | None = None
    output_gate: bool = False
    recurrence: Recurrence | None = None
    readers: Readers | None = None

    def __post_init__(self) -> None:
        sliding = self.window_heads or KvHeads(self.num_kv_heads, self.head_dim)
        for kv_heads in (self.num_kv_heads, sliding.number):
            if self.num_heads % kv_heads:
                raise UnsupportedModelError(
                    f"num_attention_heads={self.num_heads} is not a multiple of num_key_value_heads={kv_heads}"
                )
        self.rope.check(self.head_dim)
        (self.window_rope or self.rope).check(sliding.size)
        if self.window_rope is not None and self.window_rope.depends_on_length:
            raise UnsupportedModelError(
                f"layers with a sliding window have RoPE with {self.window_rope}; accepted: frequencies that do "
                "not depend on the length of the prompt"
            )

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def group(self) -> int:
        """Query heads per kv head, G = Hq / H; of layers without a window if others differ."""
        return self.num_heads // self.num_kv_heads

    def heads_of(self, layer: int) -> KvHeads:
        """Returns the kv heads of a layer, by its index."""
        if self.window_heads is not None and self.windows[layer] is not None:
            return self.window_heads
        return KvHeads(self.num_kv_heads, self.head_dim)

    @property
    def kinds_of_heads(self) -> tuple[KvHeads, ...]:
        """The kv heads of each kind of layer: one item unless layers with a window have others."""
        return tuple(dict.fromkeys(map(self.heads_of, range(self.num_layers))))

    def has_values(self, layer: int) -> bool:
        """Returns whether a layer, by its index, has a projection to values."""
        return not self.keys_are_values or self.windows[layer] is not None

    def bytes_per_token(self, dtype: DTypeLike) -> int:
        """Bytes of one token's keys and values in an uncompressed cache: 2 H D of each layer, in `dtype`.

        Over latents they are H D, as a key contains the value.
        """
        numbers = sum(H * D for H, D in map(self.heads_of, range(self.num_layers)))
        return (2 if self.latent is None else 1) * numbers * jnp.dtype(dtype).itemsize

    @property
    def scale(self) -> float:
        """The softmax scale."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    def has_experts(self, layer: int) -> bool:
        """Returns whether a layer, by its index, has experts, instead of an MLP or beside it."""
        return self.mixture is not None and layer not in self.mixture.dense_layers

    @property
    def sources(self) -> tuple[int, ...]:
        """The layer that each reader reads, by its index; empty without readers."""
        return () if self.readers is None else self.readers.sources

    @property
    def num_recurrent(self) -> int:
        """The number of recurrent layers, which `num_layers` does not count."""
        return 0 if self.recurrence is None else sum(self.recurrence.before)

    def recurrent_before(self, layer: int) -> int:
        """Returns the number of recurrent layers between a layer, by its index, and the one before it."""
        return 0 if self.recurrence is None else self.recurrence.before[layer]

    def recurrent_states(self, batch: int, dtype: DTypeLike) -> tuple[tuple[RecurrentState, ...], ...]:
        """Returns the states of the recurrent layers before each layer, where texts begin."""
        if self.recurrence is None:
            return ((),) * self.num_layers
        return tuple((self.recurrence.state(batch, dtype),) * count for count in self.recurrence.before)

    def rope_of(self, layer: int) -> Rope:
        """The RoPE of a layer, by its index."""
        if layer in self.unrotated:
            return NO_ROPE
        return self.rope if self.window_rope is None or self.windows[layer] is None else self.window_rope

    def logits_of(self, layer: int) -> dict[str, Any]:
        """Returns how a layer's logits follow from queries and keys, as `AttentionLayer.logits` has it."""
        return {"scale": self.scale, "window": self.windows[layer], "softcap": self.attention_softcap}


# The activations of the MLP, by the names that configs have for them; the first one is written.
ACTIVATIONS = {
    "silu": ("silu", "swish"),
    "gelu_tanh": ("gelu_pytorch_tanh",),
    "quick_gelu": ("quick_gelu",),
}

# Fields of computations that the decoder does not implement, or only for some families, with the values that turn the
# computation off.
NOT_COMPUTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ACTIVATIONS["silu"],
    "hidden_activation": (None, *ACTIVATIONS["silu"]),
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
    "use_bidirectional_attention": (None, False),
    "is_causal": (True,),  # transformers takes null for false
    "causal": (None, True),
    "use_mrope": (None, False),
    "clip_qkv": (None,),
    "use_qk_norm": (None, False),
    "qk_layernorm": (None, False),
    "lm_head_bias": (None, False),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "swiglu_alpha": (None,),
    "swiglu_limit": (None,),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
}
MLP_BIAS: dict[str, tuple[Any, ...]] = {"mlp_bias": (None, False)}  # Llama computes it, so that it is not among these


def base_config(
    hf: Mapping[str, Any],
    architecture: str,
    windows: tuple[int | None, ...],
    rope: Rope | None = None,
    computed: Collection[str] = (),
) -> DecoderConfig:
    """Reads the fields that all Llama-like families share from a Hugging Face `config.json`.

    An absent field takes the default of transformers.

    Args:
        hf: the content of `config.json`.
        architecture: the only accepted item of `architectures`.
        windows: the sliding window of each layer.
        rope: the RoPE of a family that supports fewer types than `rope_from_hf`, or partial rotation. By default
            `rope_from_hf(hf)`.
        computed: the keys of NOT_COMPUTED and MLP_BIAS that the family reads itself.

    Raises:
        UnsupportedModelError: a field has an invalid value or asks for a computation that is not implemented.
    """
    named = hf.get("architectures") or [architecture]
    if not isinstance(named, list | tuple) or architecture not in named:
        raise UnsupportedModelError(
            f"config field architectures={hf['architectures']!r} is not supported; accepted: [{architecture!r}]"
        )
    for field, neutral in (NOT_COMPUTED | MLP_BIAS).items():
        if field not in computed:
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
    """The inverse of `base_config`. Each family adds its own fields.

    RoPE is written twice: as `rope_parameters` (transformers 5), and as `rope_theta` with `rope_scaling` (before).
    """
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
        "hidden_act": ACTIVATIONS[config.activation][0],
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_parameters": rope,
        "rope_theta": config.rope.theta,
        "rope_scaling": None if config.rope.scaling is None else rope,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,  # the defaults of transformers are beyond a small vocabulary
    }
