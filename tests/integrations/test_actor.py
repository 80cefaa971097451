"""The decoder as a model of tunix's: what its trainer computes, from tokens between padding. tunix is not needed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.integrations.tunix import KVJaxActor
from kvjax.integrations.tunix.names import tempered, view_of
from kvjax.models import Decoder
from tests.tiny import VOCAB, decoder, full_logits, hybrid

LENGTHS, BEFORE, SIZE = (5, 9, 3), (4, 0, 6), 12
ROWS = [np.random.default_rng(n).integers(1, VOCAB, n) for n in LENGTHS]


def padded() -> tuple[np.ndarray, ...]:
    """Tokens with padding on both sides, and positions and mask as tunix derives them from the tokens."""
    tokens = np.zeros((len(ROWS), SIZE), np.int32)
    for line, row, first in zip(tokens, ROWS, BEFORE, strict=True):
        line[first : first + len(row)] = row
    valid = tokens != 0
    positions = np.maximum(np.cumsum(valid, axis=1) - 1, 0)
    return tokens, positions, np.tril(np.ones((SIZE, SIZE), bool)) & valid[:, None, :]


@pytest.mark.parametrize("windows", [(None, None), (3, None)], ids=["full", "window"])
def test_padding_on_both_sides_changes_no_logits(windows: tuple[int | None, ...]) -> None:
    params = decoder(windows=windows)
    tokens, positions, mask = padded()
    logits, cache = nnx.jit(KVJaxActor(params))(tokens, positions, None, mask)
    assert cache is None
    for found, expected, first in zip(logits, full_logits(params, ROWS, SIZE), BEFORE, strict=True):
        np.testing.assert_allclose(found[first : first + len(expected)], expected, atol=1e-5)


@pytest.mark.long
def test_gradients_are_finite_and_padding_has_none() -> None:
    tokens, positions, mask = padded()
    valid = (tokens != 0)[..., None]

    @nnx.jit
    @nnx.grad
    def gradients(actor: KVJaxActor) -> jax.Array:
        return jnp.sum(jnp.where(valid, actor(tokens, positions, None, mask)[0], 0) ** 2)

    found = gradients(KVJaxActor(decoder(windows=(None, None))))
    assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(found))
    assert not np.any(np.asarray(found.decoder.embed[...])[0])  # the padding's embedding


def test_what_cannot_be_an_actor_is_refused() -> None:
    with pytest.raises(ValueError, match="family 'qwen3_5_text' with recurrent layers: expected attention in all"):
        KVJaxActor(hybrid())
    with pytest.raises(ValueError, match="was given a cache: expected rollout_engine=KVJaxRollout"):
        KVJaxActor(decoder())(*padded()[:2], {}, None)
    with pytest.raises(ValueError, match="an actor of type Decoder: expected a KVJaxActor, or one of tunix's Llama3"):
        view_of(decoder())


def test_a_view_has_the_arrays_that_the_actor_has_then() -> None:
    actor = KVJaxActor(Decoder(decoder().config, nnx.Rngs(0)))
    view = view_of(actor)
    assert all(a is b for a, b in zip(jax.tree.leaves(view()), jax.tree.leaves(actor), strict=True))
    nnx.update(actor, jax.tree.map(lambda x: x + 1, nnx.state(actor)))
    assert all(a is b for a, b in zip(jax.tree.leaves(view()), jax.tree.leaves(actor), strict=True))


def test_an_actor_shares_the_arrays_of_its_decoder_and_is_saved_as_one(tmp_path: Path) -> None:
    params = decoder(windows=(None, None))
    actor = KVJaxActor(params)
    assert all(a is b for a, b in zip(jax.tree.leaves(actor), jax.tree.leaves(params), strict=True))
    assert {str(spec) for spec in jax.tree.leaves(nnx.get_partition_spec(nnx.state(actor)))} <= {"P()"}
    kvjax.save_hf(actor.decoder, tmp_path / "model")
    loaded, _ = kvjax.load(tmp_path / "model")
    assert all((a == b).all() for a, b in zip(jax.tree.leaves(loaded), jax.tree.leaves(params), strict=True))


@pytest.mark.parametrize("fields", [{}, {"logit_softcap": 3.0, "logit_divisor": 0.5}], ids=["plain", "capped"])
def test_a_temperature_divides_logits_behind_the_soft_cap(fields: dict) -> None:
    params = Decoder(replace(decoder().config, **fields), nnx.Rngs(0))
    cooled = tempered(params, 0.5)
    (expected,), (found,) = (full_logits(each, ROWS[:1], SIZE) for each in (params, cooled))
    np.testing.assert_allclose(found, expected / 0.5, rtol=1e-5, atol=1e-6)
    assert cooled.embed[...] is params.embed[...]


@pytest.mark.long
def test_generated_log_probabilities_have_the_temperature() -> None:
    params = tempered(decoder(), 0.7)
    said = kvjax.generate(params, [ROWS[0].tolist()], max_new_tokens=4, log_probs=True, eos=())
    whole = np.concatenate([ROWS[0], said.tokens[0]])
    (logits,) = full_logits(decoder(), [whole], SIZE)
    expected = jax.nn.log_softmax(logits[len(ROWS[0]) - 1 : -1] / 0.7)
    assert said.log_probs is not None
    np.testing.assert_allclose(said.log_probs[0], expected[np.arange(4), said.tokens[0]], atol=1e-5)
