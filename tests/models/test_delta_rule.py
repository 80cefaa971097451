"""The gated delta rule against its definition, token by token, in NumPy and float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.models import delta_rule

B, H, D, DV = 2, 3, 8, 6


def by_definition(q, k, v, g, b, memory):
    """S' = a S + k (b (v - a S^T k))^T and o = S'^T q, one token after another."""
    memory, out = memory.copy(), np.zeros(v.shape)
    for row in range(B):
        for head in range(H):
            for t in range(q.shape[2]):
                at = row, head, t
                decayed = np.exp(g[at]) * memory[row, head]
                error = v[at] - decayed.T @ k[at]
                memory[row, head] = decayed + np.outer(k[at], b[at] * error)
                out[at] = memory[row, head].T @ q[at]
    return out, memory


def tokens(length: int, padding: int, decay: float, alike: float = 0.0) -> list[np.ndarray]:
    """Random tokens, of which the first ones of the first row are padding, and a memory."""
    rng = np.random.default_rng(length)
    q, k = (rng.normal(size=(B, H, length, D)) + alike for _ in range(2))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    g, b = -decay * rng.exponential(size=(B, H, length)), rng.uniform(size=(B, H, length))
    g[0, :, :padding] = b[0, :, :padding] = 0
    return [q, k, rng.normal(size=(B, H, length, DV)), g, b, rng.normal(size=(B, H, D, DV))]


@pytest.mark.parametrize(
    ("length", "padding", "decay", "alike"),
    [(2, 1, 0.2, 0), (64, 64, 0.2, 0), (65, 40, 5.0, 0), (150, 70, 0.0, 0), (300, 0, 1e-3, 20.0)],
    ids=["two tokens", "all padding", "strong decay", "no decay", "keys alike"],
)
def test_chunks_are_the_recurrence(length, padding, decay, alike, monkeypatch):
    monkeypatch.setattr(delta_rule, "BLOCK", 2)  # of the longer ones, several blocks
    given = tokens(length, padding, decay, alike)
    out, memory = jax.jit(delta_rule.read_tokens)(*(jnp.asarray(x, jnp.float32) for x in given))
    expected_out, expected = by_definition(*given)
    np.testing.assert_allclose(memory, expected, atol=2e-5)
    np.testing.assert_allclose(out[1], expected_out[1], atol=2e-5 * max(1, alike))
    np.testing.assert_allclose(out[0, :, padding:], expected_out[0, :, padding:], atol=2e-5 * max(1, alike))


def test_padding_leaves_the_memory_bit_by_bit():
    given = [jnp.asarray(x, jnp.float32) for x in tokens(70, 70, 0.2)]
    _, memory = delta_rule.read_tokens(*given)
    np.testing.assert_array_equal(memory[0], given[-1][0])


def test_one_token_is_the_recurrence():
    given = tokens(1, 0, 0.2)
    *one, memory = (jnp.asarray(x, jnp.float32) for x in given)
    out, after = delta_rule.read_token(*(x[:, :, 0] for x in one), memory)
    expected_out, expected = by_definition(*given)
    np.testing.assert_allclose(out, expected_out[:, :, 0], atol=1e-5)
    np.testing.assert_allclose(after, expected, atol=1e-5)
