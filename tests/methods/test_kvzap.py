"""KVzap: the score of each entry is that of a network in NumPy on the hidden states of a decoder without a cache."""

from __future__ import annotations

import json
import math
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import kvjax
from kvjax.gates.attach import with_gates
from kvjax.gates.files import Gates, read_gates, write_gates
from kvjax.gates.forms import FORMS
from kvjax.policies import kvzap
from tests import tiny
from tests.methods.hidden import hidden_states, scored

# What the tests of all presets run (tests/policy/presets.py).
OPTIONS = (
    "budget=12,sinks=1,recent=3",
    "budget=0.5,recent=2,level=layer",
    "budget=12,recent=3,level=head,every=3",
)
RNG = np.random.default_rng(3)
ROWS = [RNG.permutation(tiny.VOCAB)[:n] for n in (30, 5, 11)]


def gelu(x):
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def network(tensors, hidden):
    """Scores [H, N] of hidden states [N, E] in float64."""
    w = {name: np.asarray(tensor, np.float64) for name, tensor in tensors.items()}
    if "weight" in w:
        return (hidden @ w["weight"].T + w["bias"]).T
    return (gelu(hidden @ w["0.weight"].T + w["0.bias"]) @ w["2.weight"].T + w["2.bias"]).T


@cache
def model(heads, kv_heads, linear=False, layers=2):
    """A decoder with gates, and these."""
    (gates, *_) = tiny.random_gates(layers, kv_heads, heads // kv_heads)
    if linear:
        shapes = {"weight": (kv_heads, 32), "bias": (kv_heads,)}
        each = tuple({name: RNG.normal(size=shape) for name, shape in shapes.items()} for _ in range(layers))
        gates = Gates("kvzap", {**gates.sizes, "hidden_dim": None}, each)
    params = tiny.decoder(heads, kv_heads, (None,) * layers)
    return with_gates(params, gates), gates


def test_a_worked_example():
    """x = (1, -2): W_1 x + b_1 = (-1, 3), gelu = (-0.15866, 2.99595), and the head's score is 2 gelu_1 - gelu_2 + 1."""
    tensors = {
        "0.weight": np.array([[1.0, 1.0], [1.0, -1.0]], np.float32),
        "0.bias": np.zeros(2, np.float32),
        "2.weight": np.array([[2.0, -1.0]], np.float32),
        "2.bias": np.ones(1, np.float32),
    }
    score = FORMS["kvzap"].score
    np.testing.assert_allclose(score(tensors, jnp.array([[[1.0, -2.0]]])), [[[-2.313260]]], rtol=1e-5)
    line = {"weight": np.array([[3.0, 0.5]], np.float32), "bias": np.array([-1.0], np.float32)}
    np.testing.assert_allclose(score(line, jnp.array([[[1.0, -2.0]]])), [[[1.0]]], rtol=1e-6)


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "linear", "chunk"), [(2, 2, True, None), (4, 1, False, 7), (7, 1, False, 7), (8, 2, False, 7)]
)
def test_scores_are_those_of_a_network_in_numpy(heads, kv_heads, linear, chunk):
    """Of rows of different lengths, padded on the left; in chunks too. What is retained are the best of each head."""
    params, gates = model(heads, kv_heads, linear)
    cache = kvjax.prefill(params, ROWS, policy=kvzap(8, recent=2), compress="never", chunk=chunk)
    retained = kvjax.prefill(params, ROWS, policy=kvzap(8, 1, 2, level="head"), chunk=chunk)
    for b, row in enumerate(ROWS):
        states = hidden_states(params, row)
        for i, (layer, x) in enumerate(zip(scored(cache, b), states, strict=True)):
            expected = network(gates.layers[i], x)
            for h, found in enumerate(layer):
                assert sorted(found) == list(range(len(row)))
                np.testing.assert_allclose([found[p] for p in range(len(row))], expected[h], atol=2e-4)
                free = sorted(range(1, len(row) - 2), key=lambda p: -expected[h, p])[:5]
                kept = sorted({0, *range(len(row) - 2, len(row)), *free}) if len(row) > 8 else list(range(len(row)))
                assert tiny.held(retained, b)[i][h] == kept


def test_decoding_evicts_the_lowest_scores():
    """In a model of one layer the hidden state follows from the token alone, so that lists of tokens say what stays."""
    params, gates = model(4, 2, layers=1)
    policy, budget = kvzap(8, 1, 3, every=1, level="head"), 8
    everything = network(gates.layers[0], hidden_states(params, np.arange(tiny.VOCAB))[0])  # [H, token]
    answer = RNG.permutation(tiny.VOCAB)[:6]
    _, cache = tiny.prefill(params, policy, ROWS, 32, room=8)
    texts = [list(row) for row in ROWS]

    def best(text, h, held, count):
        free = [p for p in held if p >= 1 and p < len(text) - 3]
        stay = sorted(free, key=lambda p: -everything[h, text[p]])[: count - (len(held) - len(free))]
        return sorted({*held} - {*free} | {*stay})

    heads = [[best(text, h, range(len(text)), min(budget, len(text))) for h in range(2)] for text in texts]
    for token in (None, *answer):
        if token is not None:
            _, cache = tiny.step(params, cache, np.full(3, token), np.ones(3, bool))
            for text, own in zip(texts, heads, strict=True):
                for h in range(2):
                    own[h] = best(text, h, own[h], budget - 1) if len(own[h]) == budget else own[h]
                    own[h] = [*own[h], len(text)]
                text.append(token)
        assert [tiny.held(cache, b) for b in range(3)] == [[own] for own in heads]


@pytest.mark.slow
def test_bfloat16():
    """The network runs on bfloat16 hidden states and weights, and adds up in float32."""
    _, gates = model(8, 2)
    low = with_gates(jax.tree.map(lambda x: x.astype(jnp.bfloat16), tiny.decoder(8, 2, (None, None))), gates)
    cache = kvjax.prefill(low, ROWS, policy=kvzap(8, recent=2), compress="never")
    rounded = {name: tensor.astype(jnp.bfloat16) for name, tensor in gates.layers[0].items()}
    for b, row in enumerate(ROWS):
        expected = network(rounded, hidden_states(low, row)[0])
        for h, found in enumerate(scored(cache, b)[0]):
            assert found[0].dtype == np.float32
            np.testing.assert_allclose([found[p] for p in range(len(row))], expected[h], atol=0.15)


@pytest.mark.slow
def test_several_policies_read_one_prompt():
    """Observers with and without hidden states."""
    params, _ = model(8, 2)
    specs = [
        "kvzap:budget=8,recent=2",
        "h2o:budget=8",
        "kvzap:budget=0.5,recent=2,level=head",
        "snapkv:budget=8,window=4",
    ]
    for spec, found in zip(specs, kvjax.prefill_each(params, ROWS, policies=specs), strict=True):
        alone = kvjax.prefill(params, ROWS, policy=spec)
        assert [tiny.held(found, b) for b in range(3)] == [tiny.held(alone, b) for b in range(3)]


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
@pytest.mark.parametrize(("data", "model_axis"), [(4, 2), (2, 4)])
def test_meshes_retain_the_same(data, model_axis):
    """The second mesh has two devices per kv head."""
    plain, gates = model(8, 2)
    sharded = with_gates(kvjax.shard(tiny.decoder(8, 2, (None, None)), kvjax.make_mesh(data, model_axis)), gates)
    rows = [*ROWS, *ROWS[:1]]
    spec = "kvzap:budget=8,recent=2,every=2,groups=2"
    ours, theirs = (kvjax.generate(each, rows, policy=spec, max_new_tokens=6) for each in (sharded, plain))
    np.testing.assert_array_equal(ours.tokens, theirs.tokens)
    assert [tiny.held(ours.cache, b) for b in range(4)] == [tiny.held(theirs.cache, b) for b in range(4)]
    again = kvjax.shard(plain, kvjax.make_mesh(data, model_axis))  # gates move with the parameters
    np.testing.assert_array_equal(kvjax.generate(again, rows, policy=spec, max_new_tokens=6).tokens, theirs.tokens)


def test_files(tmp_path):
    """A folder holds what it was given, under the names of the released module, and a model is saved without gates."""
    params, gates = model(8, 2)
    write_gates(gates, tmp_path / "gates", facts={"steps": 7})
    config = json.loads((tmp_path / "gates" / "config.json").read_text())
    assert config == {"model_type": "kvzap", "n_modules": 2, "input_dim": 32, "output_dim": 2, "hidden_dim": 5}
    tensors = load_file(tmp_path / "gates" / "model.safetensors")
    names = {f"layers.{i}.{name}" for i in range(2) for name in ("0.weight", "0.bias", "2.weight", "2.bias")}
    assert set(tensors) == names
    assert tensors["layers.1.0.weight"].shape == (5, 32)
    assert "| steps | 7 |" in (tmp_path / "gates" / "README.md").read_text()
    read = read_gates(tmp_path / "gates")
    assert read.method == "kvzap"
    for mine, theirs in zip(read.layers, gates.layers, strict=True):
        assert all(np.array_equal(mine[name], theirs[name]) for name in theirs)
    kvjax.save_hf(params, tmp_path / "model")
    assert not any("gate" in name and "mlp" not in name for name in load_file(tmp_path / "model" / "model.safetensors"))
    with pytest.raises(ValueError, match="is not empty"):
        write_gates(gates, tmp_path / "gates", facts={})


@pytest.mark.parity
@pytest.mark.parametrize("inner", [None, 5])
def test_the_released_module(tmp_path, inner):
    """A module of PyTorch with the form of kvpress's KVzapModel, saved as transformers does, and its scores."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    linear = torch.nn.Linear
    layers = torch.nn.ModuleList(
        linear(32, 2) if inner is None else torch.nn.Sequential(linear(32, inner), torch.nn.GELU(), linear(inner, 2))
        for _ in range(2)
    )
    save_file({f"layers.{k}": v.numpy() for k, v in layers.state_dict().items()}, tmp_path / "model.safetensors")
    config = {"input_dim": 32, "output_dim": 2, "n_modules": 2, "hidden_dim": inner, "model_type": "kvzap"}
    config |= {"architectures": ["KVzapModel"], "dtype": "float32", "transformers_version": "5.2.0"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    params = with_gates(tiny.decoder(8, 2, (None, None)), tmp_path)
    hidden = RNG.normal(size=(3, 9, 32)).astype(np.float32)
    for ours, theirs in zip(params.layers, layers, strict=True):
        expected = theirs(torch.tensor(hidden)).transpose(1, 2).detach().numpy()
        np.testing.assert_allclose(ours.attention.gates["kvzap"](hidden), expected, atol=1e-5)


def test_parameters_without_gates_are_refused():
    params = tiny.decoder(8, 2, (None, None))
    says = "reads gates of 'kvzap', and the parameters have none: expected params = kvjax.with_gates"
    for call in (
        lambda: kvjax.generate(params, ROWS[0], policy="kvzap"),
        lambda: list(kvjax.prefill_each(params, ROWS[0], policies=["full", "kvzap"])),
        lambda: kvjax.empty_cache(params, kvzap(), [5]),
        lambda: kvjax.Engine(params, "kvzap", rows=1, max_prompt=64, max_new_tokens=8),
    ):
        with pytest.raises(ValueError, match=says):
            call()


def test_a_second_compression_has_no_hidden_states():
    """Once a prompt has been compressed for good, the scores of its entries are forgotten."""
    params, _ = model(4, 2, layers=1)
    cache = kvjax.prefill(params, ROWS[:1], policy=kvzap(8, recent=2, level="head"))
    with pytest.raises(ValueError, match=r"needs hidden states of earlier tokens, .*; use compress='auto'"):
        kvjax.prefill(params, [[1, 2, 3]], cache=cache, compress="end")


def bad_folders():
    config = {"model_type": "kvzap", "n_modules": 1, "input_dim": 4, "output_dim": 2, "hidden_dim": None}
    tensors = {"layers.0.weight": np.zeros((2, 4), np.float32), "layers.0.bias": np.zeros(2, np.float32)}
    return {
        "it has no config.json: expected a folder of gates": (None, tensors),
        "model_type='llama': expected gates of kvzap": (config | {"model_type": "llama"}, tensors),
        r"model_type=\['kvzap'\]: expected gates of kvzap": (config | {"model_type": ["kvzap"]}, tensors),
        "n_modules=0: expected an integer >= 1": (config | {"n_modules": 0}, tensors),
        "n_modules=1000000000000, and there are 2 tensors": (config | {"n_modules": 10**12}, tensors),
        "input_dim=None: expected an integer >= 1": (config | {"input_dim": None}, tensors),
        "neither model.safetensors": (config, None),
        r"missing tensor\(s\): layers.0.bias": (config, {"layers.0.weight": tensors["layers.0.weight"]}),
        r"unexpected tensor\(s\): other": (config, tensors | {"other": np.zeros(1, np.float32)}),
        r"layers.0.bias has shape \(3,\): expected \(2,\)": (
            config,
            tensors | {"layers.0.bias": np.zeros(3, np.float32)},
        ),
        "layers.0.bias has dtype I32": (config, tensors | {"layers.0.bias": np.zeros(2, np.int32)}),
        "gates for layers 1, kv heads 2, hidden size 4: expected gates for layers 2": (config, tensors),
    }


@pytest.mark.parametrize("says", bad_folders())
def test_bad_folders(tmp_path, says):
    config, tensors = bad_folders()[says]
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=says):
        with_gates(tiny.decoder(8, 2, (None, None)), tmp_path)


@pytest.mark.parametrize(("number", "dtype"), [(np.nan, jnp.float32), (np.inf, jnp.bfloat16), (1e5, jnp.float16)])
def test_gates_that_are_not_finite_are_refused(number, dtype):
    """In the dtype of the model, in which a number may be infinite that is none in the file."""
    _, gates = model(8, 2)
    broken = {**gates.layers[1], "2.bias": np.array([0.0, number], np.float32)}
    params = jax.tree.map(lambda x: x.astype(dtype), tiny.decoder(8, 2, (None, None)))
    says = rf"gates of kvzap with NaN or infinity as {jnp.dtype(dtype).name} in tensor\(s\) layers.1.2.bias: expected"
    with pytest.raises(ValueError, match=says):
        with_gates(params, Gates("kvzap", gates.sizes, (gates.layers[0], broken)))


def test_gates_of_a_policy_are_no_networks():
    gates = Gates("duo_attention", {"output_dim": 2}, ({"gates": np.ones(2, np.float32)},) * 2)
    with pytest.raises(ValueError, match="expected them as the option gates= of the policy"):
        with_gates(tiny.decoder(8, 2, (None, None)), gates)
