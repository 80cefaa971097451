"""A row without a token in a decode step keeps the state of its score, bit by bit, while others go on."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache import Slots
from kvjax.models import AttentionLayer
from kvjax.parts import (
    AccumulatedAttention,
    ExpectedAttention,
    GlobalAttention,
    HiddenChange,
    LastAttention,
    LearnedScore,
    Neglect,
    NoisyAttention,
    QueryHeadAttention,
    RecurrenceInterval,
    ValueCapacity,
    Votes,
)
from kvjax.policies import parse
from kvjax.policy import Attended, LayerShape, Score
from tests.methods import one_layer

B, H, G, M, D, E = 2, 2, 2, 6, 4, 5
SCORES: dict[str, Score] = {
    type(score).__name__: score
    for score in (
        *(ExpectedAttention(sinks=0), GlobalAttention(2, 0.5, 0.5, 0.5), HiddenChange(3), LastAttention()),
        *(LearnedScore("kvzap"), Neglect(8), NoisyAttention(noise="none"), QueryHeadAttention(AccumulatedAttention())),
        *(RecurrenceInterval(0.1), ValueCapacity(sinks=0), Votes(8), parse("morphkv:budget=9,window=2").score),
    )
}


@jax.jit
def observed() -> dict[str, tuple[Any, Any]]:
    """The states per slot and per row before and after a step in which row 0 alone has a token, at position 5."""
    rng = np.random.default_rng(0)
    q, k, v, hidden, received = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((B, H * G, 1, D), (B, H, M, D), (B, H, M, D), (B, 1, E), (B, H, M))
    )
    positions = jnp.broadcast_to(jnp.array([[[*range(6)]], [[*range(5), -1]]]), (B, H, M))
    gates: Any = {"kvzap": lambda hidden: jnp.full((B, H, 1), 7.0)}
    layer = AttentionLayer(0, one_layer.ROPE, None, 0.5, jnp.zeros((H * G, D, E)), hidden=hidden, gates=gates)
    at, lse = jnp.array([[5], [-1]]), jnp.array([[[1.0]] * H * G, [[-jnp.inf]] * H * G])
    states = {}
    for name, score in SCORES.items():
        needs = score.needs
        wish = needs.received
        shown = None if wish is None or not wish.shown("steps") else jax.nn.softmax(received) * (at >= 0)[..., None]
        given = {"hidden": hidden, "received": shown, "decoding": True, "lengths": jnp.array([1, 0]), "layer": layer}
        state = score.init(LayerShape(B, H * G, H, D, jnp.dtype("float32"), E, M))
        before = jax.tree.map(jnp.ones_like, state)
        entries = Slots(k, v, positions, jnp.full((B, H), M), *before)
        states[name] = before, score.observe(entries, Attended(q, at, lse, **given))
    return states


def test_the_state_of_a_row_that_waits_stays() -> None:
    for name, pair in observed().items():
        before, after = map(jax.tree.leaves, pair)
        assert len(before) == len(after), name
        for one, other in zip(before, after, strict=True):
            np.testing.assert_array_equal(one[1], other[1], err_msg=name)
        assert any((one[0] != other[0]).any() for one, other in zip(before, after, strict=True)), name
