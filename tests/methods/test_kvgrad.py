"""KVgrad: its sensitivities against derivatives that PyTorch takes of the whole text, and its scores against NumPy.

`test_kvpress.py` compares what is retained with kvpress.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.attend.causal import causal
from kvjax.cache import Slots
from kvjax.methods.kvgrad.backwards import backwards, differentiable
from kvjax.models import AttentionLayer, Decoder, Mixture
from kvjax.parts import Attribution, Fixed, Reconstruction
from kvjax.policies import criticalkv, kvgrad
from kvjax.policy import Pass
from kvjax.reading.replays import replay, to_run
from tests import tiny
from tests.dense import assert_close
from tests.methods import allocating
from tests.methods.literal_budgets import projected
from tests.methods.reference import Reader, softmax

WITHOUT_TEXT = "score.instruction='',score.starting='',score.suffix=''"
OPTIONS = (
    f"budget=0.5,sinks=2,score.chunk=10,{WITHOUT_TEXT}",
    "budget=12,level=layer,score.chunk=10,score.instruction=(7,),score.starting='',score.suffix=''",
)
SIZE, CHUNK, SINKS = 32, 12, 3
SCORE = Attribution(SINKS, CHUNK, instruction=(7, 60, 2), starting=(9, 4), suffix=(33,))
POLICY = kvgrad(0.5, SINKS, score=SCORE)
ROWS = [np.random.default_rng(4).integers(0, tiny.VOCAB, n) for n in (30, 9, 13)]
PARAMS = tiny.decoder(4, 2, (None, None))
# Norms before and after, factors, caps, windows, sinks, biases, experts with and without a limit, recurrent layers,
# inputs of layers.
FAMILIES = (
    *("llama-group4-tied", "gemma2-group4-layers", "mixtral-group4-window", "gpt_oss", "granite", "olmo2"),
    *("qwen3_5_text-group7", "qwen3_5_moe_text-group4", "gemma4_text-group8-experts"),
)


def sensitivities(params: Decoder, rows: list[np.ndarray], texts: list[np.ndarray], policy: Any = POLICY) -> np.ndarray:
    """[L, B, W] of texts that follow rows, with padding on the left of both."""
    width = max(map(len, texts))
    _, cache = tiny.prefill(params, policy, rows, max(map(len, rows)), compress="never")
    tokens, lengths = tiny.left_pad(texts, width)
    first = np.zeros_like(lengths)

    @jax.jit
    def of(params: Decoder, cache: kvjax.KVCache, part: Pass) -> list[jax.Array]:
        seen: list[jax.Array] = []
        given = to_run(params, cache, part)

        def attend(*, instead: Any = None, measured: Any = None) -> Any:
            if measured is None:
                return given.attend(instead=instead)
            seen.append(measured)
            return lambda layer, q, k, v, entries: (q, entries)

        backwards(given._replace(attend=attend))
        return seen[::-1]

    return np.stack(of(params, cache, Pass(*map(jnp.asarray, (tokens, lengths, first, first)))))


def literal(model: Any, row: np.ndarray, text: np.ndarray) -> np.ndarray:
    """[L, W] by PyTorch, which reads the row and the text in one call: no row's token sees the text."""
    import torch

    given: list[Any] = []
    last: list[Any] = []

    def keep(kept: list[Any]) -> Any:
        def hook(module: Any, args: Any, out: Any) -> None:
            kept.append(out[0] if isinstance(out, tuple) else out)
            kept[-1].retain_grad()

        return hook

    layers = model.model.layers
    attentions = [layer.self_attn for layer in layers if hasattr(layer, "self_attn")]  # not those of recurrent layers
    hooks = [attention.register_forward_hook(keep(given)) for attention in attentions]
    hooks.append(layers[-1].register_forward_hook(keep(last)))
    model(torch.from_numpy(np.concatenate([row, text]))[None])
    for hook in hooks:
        hook.remove()
    last[0][0, len(row) :].square().sum().backward()
    return np.stack([out.grad[0, len(row) :].norm(dim=-1).numpy() for out in given])


@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.parametrize("family", FAMILIES)
def test_sensitivities_are_the_derivatives_that_pytorch_takes(family: str, tmp_path: Any) -> None:
    """Rows and texts of different lengths, of which the longer text fills more than one block of queries."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from tests.models import reference
    from tests.models.cases import CASES

    case = CASES[next(name for name in CASES if name.startswith(family))]
    model = reference.reference(*case)
    reference.save(model, case[0], tmp_path)
    params, _ = kvjax.load(tmp_path)
    rng = np.random.default_rng(1)
    rows, texts = ([rng.integers(0, reference.VOCAB, n) for n in lengths] for lengths in ((19, 8), (11, 70)))
    ours = sensitivities(params, rows, texts)
    for b, (row, text) in enumerate(zip(rows, texts, strict=True)):
        padding = ours.shape[-1] - len(text)
        assert (ours[:, b, :padding] == 0).all()
        expected = literal(model, row, text)
        assert expected.std() > 0
        typical = 5e-5 if params.config.scale == 1 else 1e-5  # softmaxes without a scale are sharp
        assert_close(ours[:, b, padding:] / expected.mean(), expected / expected.mean(), typical)


def recurrent() -> Decoder:
    """A layer of attention, then one that is recurrent and another of attention."""
    return Decoder(replace(tiny.hybrid((0, 1)).config, output_gate=False), nnx.Rngs(0))


@pytest.mark.parametrize("make", [lambda: PARAMS, pytest.param(recurrent, marks=pytest.mark.slow)])
def test_sensitivities_are_derivatives(make: Callable[[], Decoder]) -> None:
    """Those that JAX takes of the whole text, by what heads return: an output projection has a left inverse."""
    row, text, params = ROWS[0][:9], ROWS[1][:5], make()
    plain, tokens = causal(jnp.arange(14)[None]), np.concatenate([row, text])[None]

    def loss(changes: jax.Array) -> jax.Array:
        def attend(layer: Any, q: jax.Array, k: jax.Array, v: jax.Array, entries: Any) -> tuple[jax.Array, Any]:
            context, entries = plain(layer, q, k, v, entries)
            return context.at[:, :, 9:].add(changes[layer.index]), entries

        hidden, _ = params(tokens, attend)
        return jnp.sum(hidden[0, 9:] ** 2)

    D = params.config.head_dim
    gradients = np.asarray(jax.jit(jax.grad(loss))(jnp.zeros((2, 4, 5, D))), np.float64)
    ours = sensitivities(params, [row], [text])[:, 0]
    for i, layer in enumerate(params.attention_layers):
        output = np.asarray(layer.output, np.float64).reshape(4 * D, 32)
        expected = np.linalg.lstsq(output, np.moveaxis(gradients[i], 1, 2).reshape(4 * D, 5))[0]
        np.testing.assert_allclose(ours[i], np.linalg.norm(expected, axis=0), rtol=1e-3)


def test_a_pass_sees_biases_and_sinks_as_attention_does() -> None:
    """Five entries of a prompt, then two tokens of a pass; a third entry of the prompt is behind the window."""
    rng, (H, G, D, W, M) = np.random.default_rng(6), (2, 2, 4, 2, 7)
    q, k, v = (jnp.asarray(rng.normal(size=(1, heads, n, D)), jnp.float32) for heads, n in ((H * G, W), (H, M), (H, M)))
    at, bias = jnp.arange(M), jnp.asarray(rng.normal(size=(1, H, M)), jnp.float32)
    sinks = jnp.asarray(rng.normal(size=H * G) + 3, jnp.float32)
    layer = AttentionLayer(0, tiny.decoder().config.rope, 5, 0.7, jnp.zeros((H * G, D, 1)), sinks=sinks)
    held = Slots(k, v, jnp.broadcast_to(at, (1, H, M)), jnp.full((1, H), M), bias=bias)

    def expected(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """Of the pass's own keys and values; those of the prompt are constants."""
        keys, values = (
            jnp.repeat(jnp.concatenate([old[:, :, :-W], new], axis=2), G, axis=1)
            for old, new in ((held.keys, k), (held.values, v))
        )
        logits = jnp.einsum("bhnd,bhmd->bhnm", q, keys) * 0.7 + jnp.repeat(bias, G, axis=1)[:, :, None]
        distance = at[-W:, None] - at
        weights = jnp.where((distance >= 0) & (distance < 5), jnp.exp(logits), 0)
        total = jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sinks)[:, None, None]
        return jnp.einsum("bhnm,bhmd->bhnd", weights / total, values)

    def found(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return differentiable(layer, q, k, v, at[None, -W:], held)

    given = q, k[:, :, -W:], v[:, :, -W:]
    (own, back), (wanted, wanted_back) = (jax.vjp(jax.jit(run), *given) for run in (found, expected))
    assert_close(own, wanted, 1e-6)
    change = jnp.asarray(rng.normal(size=own.shape), jnp.float32)
    for mine, theirs in zip(back(change), wanted_back(change), strict=True):
        assert_close(mine, theirs, 1e-5)


def scores(b: int, text: np.ndarray, first: int, sensitivity: np.ndarray) -> np.ndarray:
    """[L, H, n] of the n entries of the chunk of row b that a text repeats, from sensitivities [L, W]."""
    row, reader = ROWS[b], Reader(PARAMS)
    n = len(row)
    last = min(first + CHUNK, n)
    reader.read(row)
    norms = projected(PARAMS, reader.values(), order=2)
    reader.read(text)
    found = np.zeros((len(reader.heads), len(reader.heads[0]), last - first))
    for layer, head in np.ndindex(found.shape[:2]):
        for query in range(n, n + len(text)):
            seen = reader.heads[layer][head].rows[query]
            keys = sorted({*range(min(SINKS, n)), *range(first, last), *range(n, query + 1)})
            weights = softmax(np.stack([seen[key][0] for key in keys], axis=-1))
            chunk = weights[:, [keys.index(key) for key in range(first, last)]]
            parts = chunk * norms[layer, head, :, first:last] * sensitivity[layer, query - n]
            found[layer, head] = np.maximum(found[layer, head], parts.max(axis=0))
    return found


@pytest.mark.slow
def test_scores_are_the_definition() -> None:
    """Chunks that not all rows have, a last one that is short, and a prompt within one chunk."""
    filled = allocating.read(PARAMS, POLICY, ROWS, SIZE)
    tokens, lengths = map(jnp.asarray, tiny.left_pad(ROWS, SIZE))
    for i, part in enumerate(SCORE.passes(tokens, lengths, SCORE.needs.texts)):
        for b, row in enumerate(ROWS):
            first = i * CHUNK
            if first >= len(row):
                continue
            text = np.asarray(part.tokens[b])[-int(part.lengths[b]) :]
            expected = scores(b, text, first, sensitivities(PARAMS, [row], [text])[:, 0])
            for layer, entries in enumerate(filled.entries):
                held = np.asarray(entries.positions[b])
                chunk = (held >= first) & (held < first + CHUNK)
                ours = np.asarray(entries.per_slot[b])[chunk].reshape(expected[layer].shape)
                assert_close(ours, expected[layer])


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (7, 1)])
def test_bfloat16_of_other_groups(heads: int, kv_heads: int) -> None:
    params = tiny.decoder(heads, kv_heads, (None,))
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    exact, rounded = (
        np.asarray(allocating.read(model, POLICY, ROWS, SIZE).entries[0].per_slot, np.float64)
        for model in (params, half)
    )
    scored = exact > 0
    assert np.isfinite(rounded).all()
    assert np.quantile(np.abs(rounded[scored] / exact[scored] - 1), 0.9) < 0.1


@pytest.mark.slow
def test_codes_are_differentiated_as_what_they_stand_for() -> None:
    """Keys and values in 8 bits change the sensitivities of a text by little."""
    rows, texts = [ROWS[0], ROWS[1]], [ROWS[2], ROWS[1]]
    stored = replace(POLICY, storage=kvjax.policies.quantize(kvjax.policies.full(), bits=8, group=4).storage)
    exact, coded = (sensitivities(PARAMS, rows, texts, policy) for policy in (POLICY, stored))
    assert 0 < np.abs(coded - exact).max() < 0.1 * exact.max()


@pytest.mark.slow
def test_experts_are_those_that_tokens_take() -> None:
    """With as many experts for each token as there are, and with fewer."""
    for taken in (1, 4):
        params = tiny.decoder(mixture=Mixture(experts=4, per_token=taken, size=24))
        answer = kvjax.generate(params, ROWS, policy=POLICY, max_new_tokens=3)
        alone = kvjax.generate(params, [ROWS[1]], policy=POLICY, max_new_tokens=3)
        assert answer.tokens[1].tolist() == alone.tokens[0].tolist()


@pytest.mark.slow
def test_a_layer_more_holds_no_activations_more(optimized: None) -> None:
    """But its hidden states, and what it is observed with. An MLP alone would hold five arrays of its width."""
    temporaries, policy = [], kvgrad(0.5, score=replace(SCORE, sinks=4, chunk=256))
    rows, width = [np.arange(512) % tiny.VOCAB], 512
    for layers in (2, 3):
        config = replace(tiny.decoder(8, 2, (None,) * layers).config, hidden_size=64, mlp_size=width)
        params = Decoder(config, nnx.Rngs(0))
        _, cache = tiny.prefill(params, policy, rows, 512, compress="never")
        tokens, lengths = map(jnp.asarray, tiny.left_pad(rows, 512))
        part = policy.score.passes(tokens, lengths, policy.score.needs.texts)[0]
        memory = jax.jit(replay).lower(params, cache, part).compile().memory_analysis()
        temporaries.append(memory.temp_size_in_bytes)
    assert temporaries[1] - temporaries[0] < 2 * 256 * width * 4


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: kvgrad(8, level="head", groups=2), "groups=2 with level='head'"),
        (lambda: kvgrad(8, recent=8), r"a budget of 8 entries: expected 13 or more"),
        (lambda: kvgrad(8, sinks=3, score=Attribution(2)), "score.sinks=2 with sinks=3: expected sinks=2"),
        (lambda: kvgrad(8, score=Reconstruction()), "expected a Attribution"),
        (lambda: criticalkv(kvgrad(8, score=SCORE, sinks=SINKS)), "Attribution"),
        (lambda: replace(kvgrad(8), budget=Fixed(8)), "^Attribution: it .* Fixed.*expected a budget that is allocated"),
        (lambda: replace(kvgrad(8), every=1), "^Attribution: it scores a prompt.*cannot be combined with every=1"),
    ],
)
def test_what_makes_no_sense_is_refused(make: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()
