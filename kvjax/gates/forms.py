"""Defines the gates of each method: the tensors of each layer, and the scores that follow from them.

Gates of a method score hidden states, are numbers per head, or are learned tokens with adapters of the layers that run
them. `FORMS` lists the methods. Tensors have the names, shapes and [out, in] layout of the released PyTorch modules, so
that released files need no conversion beyond safetensors. The adapters' names are those of PEFT.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.models.norm import rms_normed

from .adapters import adapter_shapes

Tensors: TypeAlias = Mapping[str, Array]
Shapes: TypeAlias = dict[str, tuple[int, ...]]

EPSILON = 1e-6  # of the norms in Fast KVzip's gates


@dataclass(frozen=True)
class Form:
    """Gates of a method.

    Attributes:
        sizes: the integers in config.json that fix the shapes, each with whether it may be absent.
        shapes: the shape of each tensor of a layer, by the sizes.
        score: maps the tensors of a layer and hidden states to a float32 score per kv head and token. None: the tensors
            are numbers per head or adapters, which no hidden state enters.
        signed: whether scores may be negative.
        learned: the shape of the learned tokens, by the sizes; None if there are none. They are a tensor `tokens` of
            the first layer, whose other tensors, as those of all layers, are adapters.
    """

    sizes: dict[str, bool]
    shapes: Callable[[Mapping[str, int | None]], Shapes]
    score: Callable[[Tensors, Float[Array, "B N E"]], Float[Array, "B H N"]] | None
    signed: bool = False
    learned: Callable[[Mapping[str, int | None]], tuple[int, ...]] | None = None

    @property
    def attached(self) -> bool:
        """Tells whether the gates lie beside the parameters of a model. Others belong to a policy."""
        return self.score is not None or self.learned is not None

    def shapes_of(self, index: int, sizes: Mapping[str, int | None]) -> Shapes:
        """Returns the shape of each tensor of the layer with this index."""
        own = self.shapes(sizes)
        return own if index or self.learned is None else {**own, "tokens": self.learned(sizes)}


def _kvzap_shapes(sizes: Mapping[str, int | None]) -> Shapes:
    E, H, F = sizes["input_dim"], sizes["output_dim"], sizes["hidden_dim"]
    assert E is not None
    assert H is not None
    if F is None:
        return {"weight": (H, E), "bias": (H,)}
    return {"0.weight": (F, E), "0.bias": (F,), "2.weight": (H, F), "2.bias": (H,)}


def _kvzap(tensors: Tensors, hidden: Float[Array, "B N E"]) -> Float[Array, "B H N"]:
    """A linear map, or two with a GELU between them."""
    if "weight" in tensors:
        out = _linear(hidden, tensors["weight"], tensors["bias"])
    else:
        inner = jax.nn.gelu(_linear(hidden, tensors["0.weight"], tensors["0.bias"]), approximate=False)
        out = _linear(inner.astype(hidden.dtype), tensors["2.weight"], tensors["2.bias"])
    return jnp.swapaxes(out, 1, 2)


def _linear(
    x: Float[Array, "B N I"], weight: Float[Array, "O I"], bias: Float[Array, "O"] | None = None
) -> Float[Array, "B N O"]:
    """`x @ weight.T + bias` in float32."""
    product = jnp.einsum("BNI,OI->BNO", x, weight, preferred_element_type=jnp.float32)
    return product if bias is None else product + bias.astype(jnp.float32)


def _fastkvzip_shapes(sizes: Mapping[str, int | None]) -> Shapes:
    E, H, G, C, S = (sizes[name] or 0 for name in ("input_dim", "nhead", "ngroup", "output_dim", "sink"))
    return {
        "q_proj.weight": (H * G * C, E),
        "q_proj.bias": (H * G * C,),
        "k_proj.weight": (H * C, E),
        "q_norm.weight": (C,),
        "k_norm.weight": (C,),
        "k_base": (H, 1, S, C),
        "b": (H, 1, G),
    }


def _fastkvzip(tensors: Tensors, hidden: Float[Array, "B N E"]) -> Float[Array, "B H N"]:
    """The weight of a token's key against S learned keys under the token's own queries; the mean over the group."""
    base = tensors["k_base"][:, 0].astype(jnp.float32)
    H, _, C = base.shape
    q = _linear(hidden, tensors["q_proj.weight"], tensors["q_proj.bias"]).reshape(*hidden.shape[:2], H, -1, C)
    k = _linear(hidden, tensors["k_proj.weight"]).reshape(*hidden.shape[:2], H, C)
    q, k = _normed(q, tensors["q_norm.weight"]), _normed(k, tensors["k_norm.weight"])
    own = jnp.einsum("BNHC,BNHGC->BHNG", k, q) * C**-0.5 + tensors["b"].astype(jnp.float32)
    others = jnp.einsum("HSC,BNHGC->BHNGS", base, q) * C**-0.5
    return jnp.mean(jax.nn.sigmoid(own - jax.nn.logsumexp(others, axis=-1)), axis=-1)


def _normed(x: Float[Array, "... C"], scale: Float[Array, "C"]) -> Float[Array, "... C"]:
    """The root-mean-square norm."""
    return rms_normed(x, EPSILON) * scale.astype(jnp.float32)


LEARNED = Form(
    {name: name == "mlp_dim" for name in ("input_dim", "query_dim", "kv_dim", "mlp_dim", "rank", "tokens")},
    adapter_shapes,
    None,
    learned=lambda sizes: (sizes["tokens"] or 0, sizes["input_dim"] or 0),
)
FORMS = {
    "kvzap": Form({"input_dim": False, "output_dim": False, "hidden_dim": True}, _kvzap_shapes, _kvzap, signed=True),
    "fastkvzip": Form(
        {name: False for name in ("input_dim", "nhead", "ngroup", "output_dim", "sink")}, _fastkvzip_shapes, _fastkvzip
    ),
    "duo_attention": Form({"output_dim": False}, lambda sizes: {"gates": (sizes["output_dim"] or 0,)}, None),
    "lookaheadkv": LEARNED,
    "restorekv": LEARNED,
}
