"""Mixtures of experts: every way to compute one gives the definition's result. Checkpoints have them in two forms."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import kvjax
from kvjax.checkpoint import CheckpointError, load, restore, save
from kvjax.mesh.experts import mixed, over_experts
from kvjax.mesh.sharding import fit_mesh
from kvjax.models import ExpertWeights, Mixture, densely, routed
from kvjax.models.feed_forward import ACTIVATIONS
from tests.models.fields import BESIDE, NETS
from tests.pallas_kernels.checks import of_platform
from tests.products import each_once
from tests.tiny import decoder

SIZES = [(1, 1, 1, 1), (1, 1, 8, 3), (2, 5, 4, 4), (3, 20, 4, 2), (2, 1, 16, 3), (1, 7, 32, 2)]
E, F = 24, 20
BIASED = {"biased": True, "limit": 0.5}


def problem(batch: int, tokens: int, mixture: Mixture) -> tuple[jax.Array, ExpertWeights]:
    """Hidden states and weights. A column of the router draws most tokens to one expert, so that others have none."""
    rng, X = np.random.default_rng(tokens), mixture.experts
    x = rng.normal(size=(batch, tokens, E)) + 1
    router = rng.normal(size=(E, X)) / E**0.5
    router[:, X // 2] += 0.2
    gate, up, down = (rng.normal(size=shape) / 4 for shape in ((X, E, F), (X, E, F), (X, F, E)))
    biases = [rng.normal(size=shape) for shape in ((X,), (X, F), (X, F), (X, E)) if mixture.biased]
    arrays = (jnp.asarray(a, jnp.float32) for a in (router, gate, up, down, *biases))
    return jnp.asarray(x, jnp.float32), ExpertWeights(*arrays)


@pytest.mark.long(first=1)
@pytest.mark.parametrize(
    ("batch", "tokens", "experts", "per_token", "facts"),
    each_once(SIZES, [{}, {"normalized": False}, BIASED]),
)
def test_tokens_that_go_to_their_experts(batch, tokens, experts, per_token, facts, monkeypatch):
    """In the forms of a CPU and of a GPU, on one device and on two that have half of the experts each."""
    mixture = Mixture(experts, per_token, F, **facts)
    x, weights = problem(batch, tokens, mixture)
    expected = jax.jit(partial(densely, mixture=mixture, activation=jax.nn.silu))(x, weights)
    halves = {0: slice(experts // 2), experts // 2: slice(experts // 2, None)} if experts > 1 else {0: slice(1)}
    for platform in ("cpu", "cuda"):
        monkeypatch.setattr(jax.lax, "platform_dependent", of_platform(platform))
        mix = jax.jit(partial(mixed, mixture=mixture, activation=jax.nn.silu))
        np.testing.assert_allclose(mix(x, weights), expected, atol=2e-5)
        parts = [mix(x, of_experts(weights, part), first=first) for first, part in halves.items()]
        np.testing.assert_allclose(sum(parts), expected, atol=2e-5)


def of_experts(weights: ExpertWeights, part: slice) -> ExpertWeights:
    """The weights of some experts, and the router of all."""
    own = {name: getattr(weights, name) for name in ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")}
    return weights._replace(**{name: array if array is None else array[part] for name, array in own.items()})


def test_shares_are_those_of_the_best_experts():
    """The definition itself, by NumPy: softmax over all experts, the K best of them, divided by their sum or not."""
    mixture = Mixture(5, 2, F, normalized=False)
    x, weights = problem(1, 6, mixture)
    shares = np.asarray(jax.nn.softmax(np.asarray(x[0]) @ np.asarray(weights.router)))
    expected = np.zeros((6, E))
    for n, share in enumerate(shares):
        for best in np.argsort(-share)[:2]:
            gate, up = (np.asarray(x[0, n]) @ np.asarray(w[best]) for w in (weights.gate, weights.up))
            expected[n] += share[best] * ((gate / (1 + np.exp(-gate)) * up) @ np.asarray(weights.down[best]))
    np.testing.assert_allclose(densely(x, weights, mixture, jax.nn.silu)[0], expected, atol=1e-5)
    _, shares = routed(x, weights.router, Mixture(5, 2, F))
    np.testing.assert_allclose(shares.sum(-1), 1, rtol=1e-6)


def test_biases_and_clamps():
    """gpt-oss's definition, token by token: softmax over the best logits alone, clamped gates and linear parts."""
    mixture = Mixture(5, 2, F, biased=True, limit=0.5)
    x, weights = problem(1, 6, mixture)
    router, gate, up, down, router_bias, gate_bias, up_bias, down_bias = (
        np.asarray(w, np.float64) for w in weights[:8]
    )
    expected, clamped = np.zeros((6, E)), 0
    for n, token in enumerate(np.asarray(x[0], np.float64)):
        logits = token @ router + router_bias
        best = np.argsort(-logits)[:2]
        shares = np.exp(logits[best]) / np.exp(logits[best]).sum()
        for share, i in zip(shares, best, strict=True):
            gates, linear = token @ gate[i] + gate_bias[i], token @ up[i] + up_bias[i]
            clamped += (gates > 0.5).sum() + (linear > 0.5).sum() + (linear < -0.5).sum()
            gates, linear = np.minimum(gates, 0.5), np.minimum(np.maximum(linear, -0.5), 0.5)
            expected[n] += share * ((gates / (1 + np.exp(-1.702 * gates)) * (linear + 1)) @ down[i] + down_bias[i])
    assert clamped > 50
    np.testing.assert_allclose(densely(x, weights, mixture, ACTIVATIONS["quick_gelu"])[0], expected, atol=1e-5)


@pytest.mark.long(first=1)
@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
@pytest.mark.parametrize(
    ("tokens", "facts", "data", "model"),
    each_once([(1, {}), (9, BIASED), (9, {}), (1, BIASED)], [(2, 4), (1, 8), (2, 2)]),
)
def test_experts_on_a_mesh(data, model, tokens, facts):
    """There are two kv heads, so that four and eight devices hold replicas of kv heads, but not of experts.

    Shares have factors, and the router reads other hidden states than the experts.
    """
    mixture = Mixture(8, 3, F, **facts)
    x, weights = problem(4, tokens, mixture)
    weights, judged = weights._replace(factor=jnp.arange(1.0, 9) / 4), jnp.flip(x, axis=0)
    mesh = fit_mesh(kvjax.make_mesh(data=data, model=model), decoder(8, 2, mixture=mixture).config)
    mix = jax.jit(lambda x, weights, judged: over_experts(mesh)(x, weights, mixture, jax.nn.silu, judged))
    alone = jax.jit(partial(densely, mixture=mixture, activation=jax.nn.silu))
    expected = alone(x, weights, judged=judged)
    assert np.abs(expected - alone(x, weights)).max() > 0.1
    np.testing.assert_allclose(mix(x, weights, judged), expected, atol=5e-5)


def test_meshes_that_do_not_divide_the_experts():
    params = decoder(8, 8, mixture=Mixture(6, 2, 24))
    message = "model=4 does not fit 8 query heads, 8 kv heads and 6 experts; accepted for this model are 1, 2$"
    with pytest.raises(ValueError, match=message):
        fit_mesh(kvjax.make_mesh(model=4), params.config)
    shared = decoder(8, 8, mixture=Mixture(8, 2, 24, shared=30))
    with pytest.raises(ValueError, match="8 experts and 30 shared MLP columns; accepted for this model are 1, 2"):
        fit_mesh(kvjax.make_mesh(model=4), shared.config)
    some = decoder(8, 8, (None, None), mixture=Mixture(8, 2, 24, dense_layers=(0,)))
    with pytest.raises(ValueError, match="8 kv heads and 8 experts and 48 MLP columns; accepted"):
        fit_mesh(kvjax.make_mesh(model=3), some.config)


FIELDS = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "mlp_only_layers": [1],
        "head_dim": 8,
        "norm_topk_prob": True,
    },
    "gemma4_text": BESIDE | {"num_experts": 8},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 8, "sliding_window": 9},
    "qwen3_5_moe_text": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 16,
        "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"],
        **NETS,
    },
}
APART = sorted(FIELDS.keys() - {"gpt_oss", "gemma4_text"})  # whose published checkpoints have a tensor for each expert
LENGTHS, NEW = (3, 17, 40, 1), 12


@pytest.fixture(scope="module", params=FIELDS)
def published(request, tmp_path_factory):
    """A model of transformers, its checkpoint in the published form, and the one with all experts in two tensors."""
    pytest.importorskip("torch")
    from tests.models import reference

    shape = {"hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 2}
    model = reference.reference(request.param, shape | FIELDS[request.param])
    apart, together = tmp_path_factory.mktemp("apart"), tmp_path_factory.mktemp("together")
    model.save_pretrained(apart, max_shard_size="20KB")
    model.save_pretrained(together, save_original_format=False)
    return model, apart, together


@pytest.mark.parity
@pytest.mark.parametrize("model", [None, 2, 4])
@pytest.mark.parametrize("published", APART, indirect=True)
def test_both_forms_of_experts_are_read(published, model):
    _, apart, together = published
    assert len(list(apart.glob("*.safetensors"))) > 2
    assert any(x.ndim == 3 for x in load_file(together / "model.safetensors").values())
    mesh = None if model is None else kvjax.make_mesh(model=model)
    (one, _), (other, _) = load(apart, mesh=mesh), load(together, mesh=mesh)
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parity
@pytest.mark.parametrize("published", APART, indirect=True)
def test_faults_of_either_form_are_named(published, tmp_path):
    _, _, together = published
    tensors = load_file(together / "model.safetensors")
    name = next(name for name in tensors if name.endswith("gate_up_proj"))
    tensors[name] = tensors[name][:-1, :, 1:]
    (tmp_path / "config.json").write_bytes((together / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    last = len(tensors[name])
    assert "missing tensor(s): model.layers.0." in str(caught.value)
    assert f"experts.{last}." in str(caught.value)
    assert "has shape (" in str(caught.value)


@pytest.mark.long(first=1)
@pytest.mark.parity
def test_orbax_holds_experts(published, tmp_path):
    params, _ = load(published[1])
    save(params, tmp_path / "orbax")
    again, _ = restore(tmp_path / "orbax")
    assert again.config == params.config
    jax.tree.map(np.testing.assert_array_equal, again, params)


@pytest.mark.long
@pytest.mark.parity
@pytest.mark.slow(first=1)
@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
@pytest.mark.parametrize("sizes", [(2, 4), pytest.param(None, marks=pytest.mark.exhaustive)], ids=["2x4", "one device"])
def test_ragged_rows(published, sizes):
    """Rows of a padded batch have the logits and the greedy tokens of transformers, which reads each of them alone."""
    from tests.models import reference

    model, folder, _ = published
    params, _ = load(folder, mesh=None if sizes is None else kvjax.make_mesh(*sizes))
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, reference.VOCAB, length) for length in LENGTHS]
    answer = kvjax.generate(params, rows, max_new_tokens=NEW, log_probs=True)
    for b, row in enumerate(rows):
        text = np.concatenate([row, answer.tokens[b]])
        logits = reference.logits(model, text[None])[0, len(row) - 1 : -1]
        np.testing.assert_array_equal(answer.tokens[b], logits.argmax(-1))
        expected = np.asarray(jax.nn.log_softmax(logits))[np.arange(NEW), answer.tokens[b]]
        np.testing.assert_allclose(answer.log_probs[b], expected, atol=1e-4)
