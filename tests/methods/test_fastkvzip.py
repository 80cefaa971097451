"""Fast KVzip: the score of each entry is that of a gate in NumPy on the hidden states of a decoder without a cache."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.checkpoint.errors import CheckpointError
from kvjax.gates.attach import with_gates
from kvjax.gates.files import Gates, read_gates, write_gates
from kvjax.gates.forms import FORMS
from kvjax.policies import fastkvzip
from tests import tiny
from tests.checkpoint.torch_zip import save
from tests.methods.hidden import hidden_states, scored

# What the tests of all presets run (tests/policy/presets.py).
OPTIONS = ("budget=0.5,sinks=1,recent=2,groups=2", "budget=12,sinks=1,recent=3,level=head,every=1")
RNG = np.random.default_rng(5)
ROWS = [RNG.permutation(tiny.VOCAB)[:n] for n in (30, 5, 11)]


def normed(x, scale):
    return x / np.sqrt(np.mean(x * x) + 1e-6) * scale


def gate(tensors, hidden):
    """Scores [H, N] of hidden states [N, E] in float64, one token, head and query at a time."""
    w = {name: np.asarray(tensor, np.float64) for name, tensor in tensors.items()}
    H, _, S, C = w["k_base"].shape
    G = w["b"].shape[2]
    scores = np.zeros((H, len(hidden)))
    for n, x in enumerate(hidden):
        q = (w["q_proj.weight"] @ x + w["q_proj.bias"]).reshape(H, G, C)
        k = (w["k_proj.weight"] @ x).reshape(H, C)
        for h in range(H):
            key = normed(k[h], w["k_norm.weight"])
            for g in range(G):
                query = normed(q[h, g], w["q_norm.weight"])
                own = key @ query / np.sqrt(C) + w["b"][h, 0, g]
                base = [w["k_base"][h, 0, s] @ query / np.sqrt(C) for s in range(S)]
                scores[h, n] += 1 / (1 + np.sum(np.exp(np.array(base) - own))) / G
    return scores


def test_a_worked_example():
    """q and k of length sqrt(2) point the same way, so k q / sqrt(2) = sqrt(2); base keys of 0 have logits 0.

    With b = 1 - sqrt(2) and two base keys the score is e / (e + 2).
    """
    tensors = {
        "q_proj.weight": np.eye(2, dtype=np.float32) * 3,
        "q_proj.bias": np.zeros(2, np.float32),
        "k_proj.weight": np.eye(2, dtype=np.float32),
        "q_norm.weight": np.ones(2, np.float32),
        "k_norm.weight": np.ones(2, np.float32),
        "k_base": np.zeros((1, 1, 2, 2), np.float32),
        "b": np.full((1, 1, 1), 1 - np.sqrt(2), np.float32),
    }
    found = FORMS["fastkvzip"].score(tensors, jnp.array([[[0.6, 0.8]]]))
    np.testing.assert_allclose(found, [[[np.e / (np.e + 2)]]], rtol=1e-5)


@pytest.mark.long(first=1)
@pytest.mark.slow(first=1)
@pytest.mark.parametrize(("heads", "kv_heads", "chunk"), [(2, 2, None), (4, 1, 7), (7, 1, None), (8, 2, 7)])
def test_scores_are_those_of_a_gate_in_numpy(heads, kv_heads, chunk):
    """Of rows of different lengths, padded on the left; what is retained are the best of all heads and layers."""
    *_, gates = tiny.random_gates(2, kv_heads, heads // kv_heads)
    params = with_gates(tiny.decoder(heads, kv_heads, (None, None)), gates)
    policy = fastkvzip(8, 1, 2)
    cache = kvjax.prefill(params, ROWS, policy=policy, compress="never", chunk=chunk)
    retained = kvjax.prefill(params, ROWS, policy=policy, chunk=chunk)
    for b, row in enumerate(ROWS):
        free = {}
        for i, (layer, x) in enumerate(zip(scored(cache, b), hidden_states(params, row), strict=True)):
            expected = gate(gates.layers[i], x)
            for h, found in enumerate(layer):
                np.testing.assert_allclose([found[p] for p in range(len(row))], expected[h], atol=2e-5)
                free |= {(i, h, p): expected[h, p] for p in range(1, len(row) - 2)}
        best = sorted(free, key=lambda at: -free[at])[: 2 * kv_heads * 5]
        for i, layer in enumerate(tiny.held(retained, b)):
            for h, held in enumerate(layer):
                own = [p for p in range(len(row)) if (i, h, p) in best or (i, h, p) not in free]
                assert held == (own if len(row) > 8 else list(range(len(row))))


@pytest.mark.slow
def test_bfloat16():
    *_, gates = tiny.random_gates(1, 2, 4)
    low = with_gates(jax.tree.map(lambda x: x.astype(jnp.bfloat16), tiny.decoder(8, 2)), gates)
    cache = kvjax.prefill(low, ROWS, policy=fastkvzip(8, recent=2), compress="never")
    rounded = {name: tensor.astype(jnp.bfloat16) for name, tensor in gates.layers[0].items()}
    for b, row in enumerate(ROWS):
        for found, expected in zip(scored(cache, b)[0], gate(rounded, hidden_states(low, row)[0]), strict=True):
            np.testing.assert_allclose([found[p] for p in range(len(row))], expected, atol=1e-3)


def test_files(tmp_path):
    *_, gates = tiny.random_gates(2, 2, 4)
    write_gates(gates, tmp_path / "gates", facts={})
    config = json.loads((tmp_path / "gates" / "config.json").read_text())
    sizes = {"input_dim": 32, "nhead": 2, "ngroup": 4, "output_dim": 6, "sink": 3}
    assert config == {"model_type": "fastkvzip", "n_modules": 2, **sizes}
    for mine, theirs in zip(read_gates(tmp_path / "gates").layers, gates.layers, strict=True):
        assert all(np.array_equal(mine[name], theirs[name]) for name in theirs)


def published(gates):
    """What the authors' training saves of gates: projections and b in bfloat16, norms and k_base in float32."""
    return [
        {name: x if "norm" in name or name == "k_base" else x.astype(jnp.bfloat16) for name, x in layer.items()}
        for layer in gates.layers
    ]


def test_published_files(tmp_path):
    """Sizes follow from the tensors, as in kvpress."""
    *_, gates = tiny.random_gates(2, 2, 4)
    file = save({"module": published(gates), "loss": [0.25], "acc": [0.5]}, tmp_path / "q4_dim6_sink3.pt")
    read = read_gates(file)
    assert (read.method, read.sizes) == ("fastkvzip", gates.sizes)
    for mine, theirs in zip(read.layers, published(gates), strict=True):
        assert mine.keys() == theirs.keys()
        assert all(mine[name].dtype == x.dtype and np.array_equal(mine[name], x) for name, x in theirs.items())
    params = with_gates(tiny.decoder(8, 2, (None, None)), file)
    assert kvjax.generate(params, ROWS, policy=fastkvzip(8, 1, 2), max_new_tokens=2).tokens.shape == (3, 2)


def test_what_is_no_published_file(tmp_path):
    *_, gates = tiny.random_gates(2, 2, 4)
    first, second = published(gates)
    without = {name: x for name, x in second.items() if name != "b"}
    for says, content in [
        ("it has no list 'module'", [first]),
        ("it has no list 'module'", {"module": []}),
        ("it has no list 'module'", {"module": [first, 3]}),
        (r"its first layer lacks k_base \[H, 1, S, C\]", {"module": [{"weight": np.zeros((2, 2), np.float32)}]}),
        ("'sink': 0}: expected integers >= 1", {"module": [first | {"k_base": np.zeros((2, 1, 0, 6), np.float32)}]}),
        (r"missing tensor\(s\): layers.1.b$", {"module": [first, without]}),
        (r"unexpected tensor\(s\): layers.1.scale$", {"module": [first, second | {"scale": second["b"]}]}),
        (
            r"layers.1.b has shape \(1,\): expected \(2, 1, 4\)\n.*1.k_proj.weight has dtype int64: expected F32",
            {"module": [first, second | {"b": np.zeros(1, np.float32), "k_proj.weight": np.zeros((12, 32), np.int64)}]},
        ),
    ]:
        with pytest.raises(CheckpointError, match=says):
            read_gates(save(content, tmp_path / "x.pt"))
    with pytest.raises(ValueError, match=r"gates for layers 1, .*: expected gates for layers 2"):
        with_gates(tiny.decoder(8, 2, (None, None)), save({"module": [first]}, tmp_path / "x.pt"))


@pytest.mark.parity
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_file_of_pytorch_modules(tmp_path, dtype):
    """Scores are those of the modules that kvpress loads, written out with PyTorch's own parts."""
    torch = pytest.importorskip("torch")
    E, H, G, C, S = 32, 2, 4, 6, 3
    own = getattr(torch, dtype)

    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj = torch.nn.Linear(E, H * G * C, dtype=own)
            self.k_proj = torch.nn.Linear(E, H * C, bias=False, dtype=own)
            self.q_norm, self.k_norm = torch.nn.RMSNorm(C, eps=1e-6), torch.nn.RMSNorm(C, eps=1e-6)
            self.k_base = torch.nn.Parameter(torch.randn(H, 1, S, C))
            self.b = torch.nn.Parameter(torch.randn(H, 1, G).to(own))

        def forward(self, x):  # [N, E] to [H, N]
            q = self.q_norm(self.q_proj(x).view(len(x), H, G, C).float()).transpose(0, 1).transpose(-1, -2)
            k = self.k_norm(self.k_proj(x).view(len(x), H, 1, C).float()).transpose(0, 1)
            logit = k @ q / C**0.5 + self.b.unsqueeze(2)
            return (1 / (1 + torch.exp(self.k_base @ q / C**0.5 - logit).sum(2, keepdim=True))).mean(-1)[..., 0]

    torch.manual_seed(0)
    modules = [Module() for _ in range(2)]
    torch.save({"module": [module.state_dict() for module in modules], "loss": np.ones((2, 3))}, tmp_path / "x.pt")
    hidden = torch.randn(9, E).to(own)
    for layer, module in zip(read_gates(tmp_path / "x.pt").layers, modules, strict=True):
        found = FORMS["fastkvzip"].score(layer, jnp.asarray(hidden.float().numpy(), dtype)[None])[0]
        np.testing.assert_allclose(found, module(hidden).detach().numpy(), atol=1e-5 if dtype == "float32" else 1e-2)


def test_both_kinds_of_gates_lie_beside_one_model():
    params = tiny.decoder(8, 2, gates=True)
    assert sorted(params.layers[0].attention.gates) == ["fastkvzip", "kvzap", "lookaheadkv", "restorekv"]
    (first, second) = tiny.random_gates(1, 2, 4)
    with pytest.raises(ValueError, match="parameters have those of kvzap: expected params"):
        kvjax.prefill(with_gates(tiny.decoder(8, 2), first), ROWS, policy=fastkvzip(8, recent=2))
    with pytest.raises(ValueError, match=r"layers|kv heads"):
        with_gates(tiny.decoder(8, 2), Gates("fastkvzip", second.sizes, second.layers * 2))
