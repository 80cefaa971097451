"""LookaheadKV against a decoder in NumPy that reads each text and its learned tokens as one sequence."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import kvjax
from kvjax.gates.adapters import adapter_sizes
from kvjax.gates.attach import with_gates
from kvjax.gates.files import Gates, read_gates, write_gates
from kvjax.gates.forms import FORMS
from kvjax.models import Mixture
from kvjax.parts import LookaheadAttention, Pooling
from kvjax.policies import lookaheadkv
from kvjax.policy import Moment
from kvjax.policy.suits import check_attached
from kvjax.reading.replays import replayed
from tests import tiny
from tests.dense import assert_close
from tests.methods import allocating
from tests.methods.hidden import scored
from tests.methods.learned_rows import cache_of, sequence

OPTIONS = ("budget=12,tokens=3,recent=2,kernel=3", "budget=0.5,tokens=5,recent=1,group=max")
SCORES = (LookaheadAttention(3), LookaheadAttention(3, "max", Pooling("max", 3)))
SIZE, WINDOW = 24, 13
ROWS = [np.random.default_rng(4).integers(0, tiny.VOCAB, n) for n in (24, 2, 13)]  # one shorter than the learned tokens


@cache
def model(heads: int, kv_heads: int) -> tuple[kvjax.models.Decoder, Gates]:
    """Two layers, the second with a sliding window, with gates; and these."""
    params = tiny.decoder(heads, kv_heads, (None, WINDOW))
    gates = tiny.learned_tokens(params.config)
    return with_gates(params, gates), gates


def literal(params, gates: Gates, row: np.ndarray, count: int, group: str) -> list[np.ndarray]:
    """Scores [H, N] of each layer before pooling."""
    reduced = []
    for weights in (own.weights[..., : len(row)] for own in sequence(params, gates, row, count)):
        mean = weights.sum(axis=1) / np.maximum((weights > 0).sum(axis=1), 1)  # of the tokens that see an entry
        heads = mean.reshape(params.config.num_kv_heads, -1, mean.shape[-1])
        reduced.append(heads.mean(axis=1) if group == "mean" else heads.max(axis=1))
    return reduced


def pooled(scores: np.ndarray, size: int) -> np.ndarray:
    """The maximum over the neighbours of each entry."""
    side = size // 2
    return np.stack([scores[:, max(c - side, 0) : c + side + 1].max(axis=1) for c in range(scores.shape[1])], axis=1)


def test_learned_tokens_score_the_entries_of_a_prompt() -> None:
    """In one layer, of the first three learned tokens; empty slots keep their state. Then the same, pooled."""
    params = tiny.decoder(4, 2)
    gates, lengths = tiny.learned_tokens(params.config), [9, 2]
    params, rows = with_gates(params, gates), [ROWS[0][:9], ROWS[1]]
    policy = lookaheadkv(8, 3, 2, kernel=3, group="max")
    each = [sequence(params, gates, row, 3) for row in rows]
    cache = cache_of(params, policy, each, lengths, 10, state=7.0)
    texts = jnp.zeros((2, 4), int), jnp.array([4, 0])  # the second prompt ended in an earlier call
    layer = replayed(params, cache, *texts, ()).entries[0]
    score = jax.jit(lambda layer: policy.score(layer, Moment(cache.length, params.attention_layers[0])))
    by_slot = np.asarray(score(layer))
    for b, (row, n) in enumerate(zip(rows, lengths, strict=True)):
        expected = literal(params, gates, row, 3, "max")[0]
        assert_close(layer.per_slot[b, :, 10 - n :], expected)
        assert (np.asarray(layer.per_slot)[b, :, : 10 - n] == 7).all()
        assert_close(by_slot[b, :, 10 - n :], pooled(expected, 3))
    of_prompt: Any = SimpleNamespace(received=None)
    assert policy.score.observe(layer, of_prompt) == (layer.per_slot, None)


@pytest.mark.long
@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "count", "group"), [(8, 2, 5, "mean"), (2, 2, 5, "mean"), (7, 1, 3, "max")]
)
def test_scores_are_those_of_one_sequence(heads: int, kv_heads: int, count: int, group: str) -> None:
    """Groups of 4, 1 and 7, all learned tokens and some, in a layer of all tokens and one with a window."""
    params, gates = model(heads, kv_heads)
    policy = lookaheadkv(8, count, 2, kernel=3, group=group)
    cache = allocating.read(params, policy, ROWS, SIZE)
    retained = kvjax.prefill(params, ROWS, policy=policy)
    for b, row in enumerate(ROWS):
        expected = literal(params, gates, row, count, group)
        for i, layer in enumerate(scored(cache, b)):
            first = max(len(row) - (WINDOW - 1), 0) if i else 0  # a layer with a window holds what it will see
            for h, found in enumerate(layer):
                assert sorted(found) == list(range(first, len(row)))
                assert_close([found[p] for p in range(first, len(row))], expected[i][h, first:])
            best = pooled(expected[i][:, first:], 3)
            best[:, max(len(row) - 2 - first, 0) :] = np.inf
            kept = first + np.sort(np.argsort(-best, axis=-1, kind="stable")[:, :8], axis=-1)
            assert tiny.held(retained, b)[i] == kept.tolist()


@pytest.mark.long
def test_a_prompt_may_end_in_an_earlier_call() -> None:
    """The last call that reads has no tokens of the second row, and scores it like the first."""
    (params, _), policy, rows = model(8, 2), lookaheadkv(8, 3, 2), [ROWS[0], ROWS[2]]
    whole = kvjax.prefill(params, rows, policy=policy)
    tokens, lengths = tiny.left_pad([rows[0][:20], rows[1]], 20)
    _, cache = kvjax.extend(params, tiny.empty(params, policy, lengths, SIZE), tokens, lengths, compress="never")
    tokens, lengths = tiny.left_pad([rows[0][20:], rows[1][:0]], 4)
    _, cache = kvjax.extend(params, cache, tokens, lengths, compress="end")
    assert [tiny.held(cache, b) for b in range(2)] == [tiny.held(whole, b) for b in range(2)]


@pytest.mark.slow
def test_bfloat16() -> None:
    """Matrices with adapters are rounded once."""
    params, gates = model(8, 2)
    low = with_gates(jax.tree.map(lambda x: x.astype(jnp.bfloat16), tiny.decoder(8, 2, (None, WINDOW))), gates)
    assert low.gates["lookaheadkv"].dtype == jnp.bfloat16
    policy = lookaheadkv(8, 5, 2)
    ours, theirs = (allocating.read(each, policy, ROWS, SIZE).entries[0] for each in (low, params))
    held = np.asarray(theirs.positions) >= 0
    exact = np.asarray(theirs.per_slot)[held]
    assert np.quantile(np.abs(np.asarray(ours.per_slot)[held] / exact - 1), 0.9) < 0.1
    assert exact.std() > 0.02


@pytest.mark.slow
def test_several_policies_read_one_prompt() -> None:
    params, _ = model(8, 2)
    specs = [
        "lookaheadkv:budget=8,tokens=5,recent=2",
        "snapkv:budget=8,window=4",
        "lookaheadkv:budget=8,tokens=3,recent=2",
    ]
    for spec, found in zip(specs, kvjax.prefill_each(params, ROWS, policies=specs), strict=True):
        alone = kvjax.prefill(params, ROWS, policy=spec)
        assert [tiny.held(found, b) for b in range(3)] == [tiny.held(alone, b) for b in range(3)]


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
@pytest.mark.parametrize(("data", "model_axis"), [(4, 2), (2, 4)])
def test_meshes_retain_the_same(data: int, model_axis: int) -> None:
    """The second mesh has two devices per kv head. Tokens and adapters move with the parameters."""
    plain, gates = model(8, 2)
    mesh, rows = kvjax.make_mesh(data, model_axis), [*ROWS, ROWS[0]]
    spec = "lookaheadkv:budget=8,tokens=5,recent=2"
    theirs = kvjax.generate(plain, rows, policy=spec, max_new_tokens=4)
    for sharded in (with_gates(kvjax.shard(tiny.decoder(8, 2, (None, WINDOW)), mesh), gates), kvjax.shard(plain, mesh)):
        ours = kvjax.generate(sharded, rows, policy=spec, max_new_tokens=4)
        np.testing.assert_array_equal(ours.tokens, theirs.tokens)
        assert [tiny.held(ours.cache, b) for b in range(4)] == [tiny.held(theirs.cache, b) for b in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hybrid", "experts"])
def test_other_layers_run_learned_tokens(kind: str) -> None:
    """Recurrent layers go on from the prompt's states. With silent adapters, embeddings of a text are that text."""
    params = tiny.hybrid() if kind == "hybrid" else tiny.decoder(mixture=Mixture(experts=6, per_token=2, size=24))
    sizes = {**adapter_sizes(params.config), "rank": 1, "tokens": 3}
    assert (sizes["mlp_dim"] is None) == (kind == "experts")
    text = np.array([7, 60, 2])
    shapes = [FORMS["lookaheadkv"].shapes_of(i, sizes) for i in range(params.config.num_layers)]
    layers = [{name: np.zeros(shape, np.float32) for name, shape in own.items()} for own in shapes]
    layers[0]["tokens"] = np.asarray(params.embed[...])[text]
    attached = with_gates(params, Gates("lookaheadkv", sizes, tuple(layers)))
    found = allocating.read(attached, lookaheadkv(8, 3, 2), ROWS[:1], SIZE)
    # The same by the attention that the last three queries of prompt and text give.
    row = np.concatenate([ROWS[0], text])
    _, whole = tiny.prefill(params, "snapkv:budget=8,window=3,pool=none", [row], 32, compress="never")
    for i, (ours, theirs) in enumerate(zip(found.entries, whole.entries, strict=True)):
        moment = Moment(jnp.array([len(row)]), params.attention_layers[i])
        expected = whole.policy.score(theirs, moment)[0]
        for h in range(2):
            by_position = dict(zip(np.asarray(theirs.positions[0, h]).tolist(), np.asarray(expected[h]), strict=True))
            own = zip(np.asarray(ours.positions[0, h]).tolist(), np.asarray(ours.per_slot[0, h]), strict=True)
            pairs = [(score, by_position[p]) for p, score in own if p >= 0]
            assert len(pairs) == len(ROWS[0])
            assert_close(*zip(*pairs, strict=True))


def test_files(tmp_path: Path) -> None:
    """The learned tokens are a tensor of the first layer. A model is saved without gates."""
    params, gates = model(8, 2)
    write_gates(gates, tmp_path / "gates", facts={})
    tensors = load_file(tmp_path / "gates" / "model.safetensors")
    assert tensors["layers.0.tokens"].shape == (5, 32)
    assert tensors["layers.1.mlp.down_proj.lora_B.weight"].shape == (32, 2)
    assert len(tensors) == 2 * 14 + 1
    read = read_gates(tmp_path / "gates")
    for mine, theirs in zip(read.layers, gates.layers, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(np.array_equal(mine[name], theirs[name]) for name in theirs)
    kvjax.save_hf(params, tmp_path / "model")
    assert not any(
        "lora" in name or "tokens" in name.split(".") for name in load_file(tmp_path / "model" / "model.safetensors")
    )


def test_what_is_refused() -> None:
    params, gates = model(8, 2)
    with pytest.raises(
        ValueError, match=r"runs 6 learned tokens, and the gates of 'lookaheadkv' have 5: expected at mo"
    ):
        kvjax.prefill(params, ROWS, policy="lookaheadkv:budget=8,tokens=6,recent=2")
    check_attached(lookaheadkv(8, tokens=5, recent=2), params)
    with pytest.raises(ValueError, match="reads gates of 'lookaheadkv', and the parameters have none"):
        kvjax.prefill(tiny.decoder(), ROWS, policy="lookaheadkv:budget=8,recent=2")
    with pytest.raises(ValueError, match=r"gates for layers 2, input_dim 32, query_dim 64, .*: expected gates for"):
        with_gates(tiny.decoder(4, 2, (None, None)), gates)
    with pytest.raises(ValueError, match=r"deepseek_v3 has latent attention: expected a model with keys and values of"):
        with_gates(tiny.latents(), gates)
    with pytest.raises(ValueError, match="llama takes values from keys: expected a projection to values in each layer"):
        adapter_sizes(replace(params.config, keys_are_values=True))
    with pytest.raises(ValueError, match=r"^LookaheadAttention: it scores a prompt.*cannot be combined with every=1"):
        replace(lookaheadkv(8, recent=2), every=1)
