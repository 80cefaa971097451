"""The decoder's blocks of tokens: blocks of a long prompt give the same logits as the complete prompt."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.attend.causal import causal
from kvjax.models import feed_forward as module
from tests.tiny import VOCAB, decoder


@pytest.mark.parametrize(
    ("length", "block", "loops"),
    [(24, 16, 1), (24, 10, 1), (24, 48, 0), (23, 16, 0)],
    ids=["3 x 8", "6 x 4", "all", "none fits"],
)
def test_blocks_give_the_same_logits(length: int, block: int, loops: int, monkeypatch: pytest.MonkeyPatch) -> None:
    params, tokens = decoder(), np.random.default_rng(0).integers(0, VOCAB, (2, length))
    positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)

    def logits(tokens):
        return params.logits(params(tokens, causal(positions))[0])

    expected = jax.jit(logits)(tokens)
    monkeypatch.setattr(module, "BLOCK", block)
    program = jax.make_jaxpr(lambda tokens: logits(tokens))(tokens)
    assert str(program).count("scan[") + str(program).count("while[") == loops
    np.testing.assert_allclose(jax.jit(lambda tokens: logits(tokens))(tokens), expected, rtol=1e-5, atol=1e-5)
