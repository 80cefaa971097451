"""The decoder of an actor: tunix's models by the names of their parameters, whose layouts are those of kvjax."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from kvjax.attend.causal import causal
from kvjax.checkpoint.parameters import Blank
from kvjax.checks import LARGEST
from kvjax.models import Card, Decoder, DecoderConfig, Rope

from .actor import KVJaxActor

OUTSIDE = {"embed": "embedder.input_embedding", "norm.scale": "final_norm.w", "unembed": "lm_head.w"}
IN_LAYER = {
    "attention_norm.scale": "input_layernorm.w",
    "attention.query": "attn.q_proj.w",
    "attention.key": "attn.k_proj.w",
    "attention.value": "attn.v_proj.w",
    "attention.output": "attn.o_proj.w",
    "attention.query_bias": "attn.q_bias",
    "attention.key_bias": "attn.k_bias",
    "attention.value_bias": "attn.v_bias",
    "attention.query_norm.scale": "attn.q_norm.w",
    "attention.key_norm.scale": "attn.k_norm.w",
    "mlp_norm.scale": "post_attention_layernorm.w",
    "mlp.gate": "mlp.gate_proj.kernel",
    "mlp.up": "mlp.up_proj.kernel",
    "mlp.down": "mlp.down_proj.kernel",
}


class Family(NamedTuple):
    """The reading of the configs of one of tunix's models.

    Attributes:
        name: the family of kvjax.
        tied: the config's field that says whether the embedding is the output matrix.
        theta: the base of RoPE; None for the config's.
        flags: the fields of `DecoderConfig` that the family sets.
    """

    name: str
    tied: str
    theta: float | None = None
    flags: Mapping[str, Any] = MappingProxyType({})


# Llama3 and Qwen3 of tunix 0.1.7 rotate with this base, whatever `rope_theta` says.
FAMILIES = {
    "Llama3": Family("llama", "weight_tying", theta=1e6),
    "Qwen2": Family("qwen2", "use_tied_embedding", flags={"qkv_bias": True}),
    "Qwen3": Family("qwen3", "use_tied_embedding", theta=1e6, flags={"qk_norm": True}),
}


def view_of(actor: nnx.Module) -> Callable[[], Decoder]:
    """Returns a function that returns the actor as a decoder, whose arrays are those that the actor has then.

    An array is copied only where shapes differ: the biases of Qwen2, which tunix flattens.

    Raises:
        ValueError: the actor is of another class, or has parameters that kvjax's decoder of this family has not, such
            as those of LoRA.
    """
    if isinstance(actor, KVJaxActor):
        return lambda: nnx.merge(*nnx.split(actor.decoder))
    found = next((each.__name__ for each in type(actor).__mro__ if each.__name__ in FAMILIES), None)
    if found is None:
        raise ValueError(
            f"an actor of type {type(actor).__name__}: expected a KVJaxActor, or one of tunix's {', '.join(FAMILIES)}"
        )
    blank = Blank.of(_config(FAMILIES[found], actor))
    shapes = blank.shapes
    names = {path: their_name(path) for path in shapes}
    if unknown := sorted(_arrays(actor).keys() ^ set(names.values())):
        raise ValueError(
            f"{found}: {unknown[0]} and {len(unknown) - 1} other parameters are in one of tunix's model and kvjax's "
            "alone: expected an actor without experts and without LoRA"
        )

    def view() -> Decoder:
        arrays = _arrays(actor)
        return blank.filled({path: arrays[theirs].reshape(shapes[path]) for path, theirs in names.items()})

    return view


def tempered(decoder: Decoder, temperature: float) -> Decoder:
    """Returns a decoder with the same arrays, whose logits are divided by a temperature > 0.

    With the divisor d and the soft cap c of a family, c tanh(x / (d c)) / T = e tanh(x / (d T e)) for e = c / T.
    The result has no card, because tunix's trainer suppresses no tokens.
    """
    made = nnx.merge(*nnx.split(decoder))
    config, cap = decoder.config, decoder.config.logit_softcap
    made.card = Card()
    made.config = replace(
        config,
        logit_divisor=config.logit_divisor * temperature,
        logit_softcap=None if cap is None else cap / temperature,
    )
    return made


def check_same(actor: nnx.Module, decoder: Decoder) -> None:
    """Compares log-probabilities of the actor and of its decoder at distant positions.

    Raises:
        ValueError: they differ, by the mean over eight tokens and the vocabulary, by more than arithmetic does. The
            model that samples would not be the model that is trained.
    """
    tokens = jnp.arange(8)[None] % decoder.config.vocab_size
    positions, mask = 37 * jnp.arange(8)[None], jnp.tril(jnp.ones((1, 8, 8), bool))

    @nnx.jit
    def theirs(actor: nnx.Module) -> Array:
        return jax.nn.log_softmax(actor(tokens, positions, None, mask)[0].astype(jnp.float32))

    @jax.jit
    def ours(decoder: Decoder) -> Array:
        return jax.nn.log_softmax(decoder.logits(decoder(tokens, causal(positions))[0]))

    expected, found = np.asarray(theirs(actor)), np.asarray(ours(decoder))
    allowed = 0.05 * float(expected.std())  # bfloat16 differs by about 0.01
    if not (apart := float(np.abs(found - expected).mean())) <= allowed:
        raise ValueError(
            f"the log-probabilities of the actor {type(actor).__name__} and of kvjax's {decoder.config.family} with "
            f"{decoder.config.rope} differ by {apart:.2g}: expected at most {allowed:.2g}; this version of tunix "
            "computes another model"
        )


def _config(family: Family, actor: Any) -> DecoderConfig:
    theirs = actor.config
    return DecoderConfig(
        family=family.name,
        vocab_size=theirs.vocab_size,
        hidden_size=theirs.embed_dim,
        mlp_size=theirs.hidden_dim,
        num_heads=theirs.num_heads,
        num_kv_heads=theirs.num_kv_heads,
        head_dim=theirs.head_dim,
        windows=(None,) * theirs.num_layers,
        rope=Rope(float(theirs.rope_theta) if family.theta is None else family.theta),
        max_positions=LARGEST,  # tunix states none
        norm_epsilon=theirs.norm_eps,
        tie_embeddings=getattr(theirs, family.tied),
        **family.flags,
    )


def their_name(path: str) -> str:
    """The name in tunix's model of a parameter of kvjax."""
    if path in OUTSIDE:
        return OUTSIDE[path]
    layers, index, rest = path.split(".", 2)
    return f"{layers}.{index}.{IN_LAYER[rest]}"


def _arrays(actor: nnx.Module) -> dict[str, Array]:
    """The arrays of a module by path."""
    return {".".join(map(str, path)): variable[...] for path, variable in nnx.to_flat_state(nnx.state(actor))}
