"""Runs one token per row through the layers that read other layers' entries.

No later token needs anything of these layers. So of a prompt only the last token runs through them: it attends to the
entries that the last token met in the layer that is read, before any of them is evicted. The token of a step attends to
what that layer retains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from kvjax.cache import Entries
from kvjax.mesh.experts import over_experts
from kvjax.models import AttentionLayer, Decoder, of_layer
from kvjax.runtime.clock import Run, run_at_once

from .call import Call, in_rows


def through_readers(
    params: Decoder,
    x: Float[Array, "B 1 E"],
    given: Float[Array, "B 1 L P"] | None,
    entries: Mapping[int, Entries],
    rows: dict[str, Any],
    *,
    facts: Sequence[AttentionLayer],
    call: Call,
    run: Run = run_at_once,
) -> Float[Array, "B 1 E"]:
    """Returns the hidden states of one token per row behind the readers of a model.

    Args:
        given: the inputs of all layers, where layers have them.
        entries: those of each layer that is read, by its index.
        facts: of all layers with entries, from `facts_of`.
        call: with `Borrowing`, which takes `rows`.
        run: how programs are run.
    """
    for i, (layer, source) in enumerate(zip(params.readers, params.config.sources, strict=True), len(params.layers)):
        x = run(read_along, layer, np.int32(i), x, given, entries[source], rows, facts=facts[source], call=call)
    return x


@partial(jax.jit, static_argnames=("facts", "call"))
def read_along(
    layer: Any,
    index: Int[Array, ""],
    x: Float[Array, "B 1 E"],
    given: Float[Array, "B 1 L P"] | None,
    entries: Entries,
    rows: dict[str, Any],
    *,
    facts: AttentionLayer,
    call: Call,
) -> Float[Array, "B 1 E"]:
    """Returns the hidden states behind a reader, from its index and the entries and facts of the layer it reads."""
    record = replace(facts, **layer.attention.weights)
    x, _ = layer(x, record, call.attend(**rows), entries, over_experts(call.mesh), of_layer(given, index))
    return in_rows(x, call.mesh)


@partial(jax.jit, static_argnames="mesh")
def last_tokens(
    x: Float[Array, "B N E"], given: Float[Array, "B N L P"] | None, rows: dict[str, Any], *, mesh: Mesh | None
) -> tuple[Float[Array, "B 1 E"], Float[Array, "B 1 L P"] | None, dict[str, Any]]:
    """Returns the last of N tokens of each row: its hidden state, its inputs, and the arguments of `Borrowing`."""
    own = {"positions": rows["next_position"] - 1, "incoming": rows["lengths"] > 0}
    return in_rows((x[:, -1:], None if given is None else given[:, -1:], own), mesh)
