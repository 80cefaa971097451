"""DuoAttention: which heads stream, and that decoding is attention with a mask for each head."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.evaluation.tasks.demo import example
from kvjax.gates.files import Gates, write_gates
from kvjax.methods.common.head_numbers import DEMO, head_numbers
from kvjax.methods.duo_attention import full_heads
from kvjax.parts import Fixed, GatedShares
from kvjax.policies import duo_attention, parse
from tests import tiny
from tests.dense import assert_close

GATES = ((1.0, 0.5, 0.3, 0.4), (0.2, 0.9, 0.1, 0.7))
PARAMS = tiny.decoder(8, 4, (None, None))
RNG = np.random.default_rng(8)
ROWS = [RNG.integers(0, tiny.VOCAB, n) for n in (30, 5, 11)]
SINKS, RECENT = 2, 6


@pytest.mark.parametrize(
    ("sparsity", "groups", "full"),
    [
        (0.5, 1, ["1100", "0101"]),
        (0.5, 2, ["1001", "0101"]),  # two of four in each half of a layer's heads
        (0.5, 4, ["1001", "0110"]),
        (0.75, 1, ["1000", "0100"]),
        (0.0, 1, ["1111", "1111"]),
        (1.0, 4, ["0000", "0000"]),
    ],
)
def test_the_smallest_gates_stream(sparsity, groups, full):
    gates = ((1.0, 0.5, 0.1, 0.7), (0.2, 0.9, 0.3, 0.4)) if groups == 4 else GATES
    assert ["".join(map(str, map(int, layer))) for layer in full_heads(gates, sparsity, groups)] == full


@pytest.mark.parametrize("full", [True, (), ((),), (True, False), ((True,), (True, False))])
def test_layers_without_heads_or_with_unlike_numbers_of_them(full):
    with pytest.raises(ValueError, match=r"full=.*: expected a tuple per layer of equally many truth values"):
        GatedShares(Fixed(8), full)
    assert GatedShares(Fixed(8), ((True,), (False,))).layout.growing == 1  # one kv head is enough


def test_a_lane_has_room_for_the_group_with_the_most_full_heads():
    """Three full heads and one of 8 entries in the first halves of the layers, one and three in the second."""
    full = ((True, True, False, False), (False, True, False, True))
    assert GatedShares(Fixed(8), full, groups=2).entries([8, 8], [30, 30], heads=2) == 3 * 30 + 8
    assert GatedShares(Fixed(8), full).entries([8, 8], [30, 30], heads=4) == 4 * 30 + 4 * 8
    assert GatedShares(Fixed(8), full).entries([5, 8], [5, 30], heads=4) == 4 * 5 + 2 * 30 + 2 * 8


def test_of_equal_gates_the_earlier_streams():
    assert full_heads(((1.0, 1.0), (1.0, 1.0)), 0.5, 1) == ((False, False), (True, True))


def dense_logits(full: np.ndarray, text: np.ndarray, prompt: int) -> np.ndarray:
    """Logits [N, V] of a text whose first `prompt` tokens see all before them; later ones do so in full heads only."""
    padded = np.pad(text, (0, 38 - len(text)))  # one program for all
    return np.asarray(_dense_logits(full, padded, prompt))[: len(text)]


@jax.jit
def _dense_logits(full, text, prompt):
    at = np.arange(len(text))
    near = (at < SINKS) | (at[:, None] - at < RECENT)
    causal = at <= at[:, None]

    def attend(layer, q, k, v, cache):
        frequencies = layer.rope.frequencies(q.shape[-1])
        q, k = (kvjax.models.rotate(x, jnp.asarray(at)[None, None], frequencies, 1.0) for x in (q, k))
        group = q.shape[1] // k.shape[1]
        k, v = (jnp.repeat(x, group, axis=1) for x in (k, v))
        streams = ~jnp.repeat(full[layer.index], group)[:, None, None]
        masked = streams & (at[:, None] >= prompt) & ~near
        logits = jnp.where(causal & ~masked, q @ jnp.swapaxes(k, -1, -2) * layer.scale, -jnp.inf)
        weights = jnp.exp(logits - logits.max(axis=-1, keepdims=True))
        return weights / weights.sum(axis=-1, keepdims=True) @ v, cache

    hidden, _ = PARAMS(text[None], attend)
    return PARAMS.logits(hidden)[0]


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 2])
def test_decoding_is_attention_with_a_mask_for_each_head(groups):
    """Streaming heads see the sinks and the last tokens; what they no longer see is gone, in a cache of their size."""
    policy = duo_attention(GATES, 0.5, SINKS, RECENT, groups=groups)
    full = np.array(policy.budget.full)
    answer = RNG.integers(0, tiny.VOCAB, (8, len(ROWS)))
    logits, cache = tiny.prefill(PARAMS, policy, ROWS, 32, room=8)
    expected = [dense_logits(full, np.append(row, answer[:, b]), len(row)) for b, row in enumerate(ROWS)]
    for i, token in enumerate([None, *answer]):
        if token is not None:
            logits, cache = tiny.step(PARAMS, cache, token, np.ones(len(ROWS), bool))
        for b, row in enumerate(ROWS):
            seen = len(row) + i
            assert_close(logits[b], expected[b][seen - 1])
            stream = [p for p in range(seen) if p < SINKS or p >= seen - RECENT]
            assert tiny.held(cache, b) == [[list(range(seen)) if own else stream for own in layer] for layer in full]
    pages = 4 * 32 + 4 * 8 + 8 * 15 + 4 * 8  # full heads, streaming ones, what segments may waste, and the answer
    rows = -(-(pages // groups) // 16) * 16 * groups
    numbers = 3 * (rows * (2 * 8 + 1) + 4 * 4 * 2)  # keys, values, positions; start, size, used, capacity of 8 heads
    assert cache.nbytes == 4 * numbers


@pytest.mark.slow
def test_full_heads_hold_what_was_read_in_two_parts():
    """Of which the cache was made for the first."""
    policy, text = duo_attention(GATES, 0.5, SINKS, RECENT), RNG.integers(0, tiny.VOCAB, 44 + 25).tolist()
    begun = kvjax.prefill(PARAMS, text[:44], policy=policy, compress="never")
    in_two = kvjax.generate(PARAMS, text[44:], cache=begun, max_new_tokens=6)
    at_once = kvjax.generate(PARAMS, text, policy=policy, max_new_tokens=6)
    np.testing.assert_array_equal(in_two.tokens, at_once.tokens)
    assert tiny.held(in_two.cache, 0) == tiny.held(at_once.cache, 0)


def test_files_of_gates(tmp_path):
    (tmp_path / "gates.json").write_text(json.dumps({"gates": GATES}))
    np.savez(tmp_path / "gates.npz", gates=np.array(GATES))
    np.savetxt(tmp_path / "full_attention_heads.tsv", GATES, delimiter="\t")
    for name in ("gates.json", "gates.npz", "full_attention_heads.tsv"):
        text = f"duo_attention:gates={tmp_path / name},sinks=2,recent=6"
        assert parse(text) == duo_attention(GATES, sinks=2, recent=6)


def test_damaged_files_of_gates(tmp_path):
    np.savez(tmp_path / "whole.npz", gates=np.array(GATES))
    whole = (tmp_path / "whole.npz").read_bytes()
    files = {
        "list.json": b"[[1, 0], [0, 1]]",
        "nested.json": b"[" * 100_000,
        "huge.json": b'{"gates": [[1' + b"0" * 400 + b"]]}",
        "cut.npz": whole[: len(whole) // 2],
        "empty.npz": b"",
        "changed.npz": whole[:60] + b"x" * 20 + whole[80:],
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=rf"^duo_attention: gates=.*{name}' cannot be read \(.*expected a .json"):
            duo_attention(str(tmp_path / name))


def test_folders_of_gates(tmp_path):
    layers = tuple({"gates": np.array(row, np.float32)} for row in GATES)
    write_gates(Gates("duo_attention", {"output_dim": 4}, layers), tmp_path / "gates", facts={})
    assert parse(f"duo_attention:gates={tmp_path / 'gates'},sinks=2,recent=6") == duo_attention(
        GATES, sinks=2, recent=6
    )
    write_gates(tiny.random_gates(2, 4, 1)[0], tmp_path / "networks", facts={})
    write_gates(tiny.learned_tokens(PARAMS.config), tmp_path / "tokens", facts={})
    (tmp_path / "empty").mkdir()
    for name, says in (
        ("networks", "its gates of kvzap are networks"),
        ("tokens", "its gates of lookaheadkv are learned tokens"),
        ("empty", "it has no config.json: expected"),
    ):
        with pytest.raises(ValueError, match=rf"gates=.*{name}' cannot be read \({says}.*or a folder of gates"):
            duo_attention(str(tmp_path / name))


def test_gates_of_another_model_are_refused():
    with pytest.raises(ValueError, match="gates of 4 layers with 2 kv heads for a model of 2 with 4: expected"):
        kvjax.generate(PARAMS, ROWS[0], policy=duo_attention())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"gates": "nowhere.json"}, "gates='nowhere.json' cannot be read .*expected a .json"),
        ({"gates": "nowhere"}, r"gates='nowhere' cannot be read \(there is no such file or folder\)"),
        ({"gates": __file__}, r"gates='.*' cannot be read \(unknown ending\)"),
        ({"gates": ((1.0, 0.5), (1.0,))}, "expected the name of a file, or a tuple per layer of equally many numbers"),
        ({"gates": ((1.0, "a"),)}, r"gates=\(\(1.0, 'a'\),\): expected the name of a file, or a tuple per layer"),
        ({"gates": ((1.0, 2j),)}, r"gates=\(\(1.0, 2j\),\): expected the name of a file, or a tuple per layer"),
        ({"gates": (((1.0,), (0.5,)),)}, r"gates=.*: expected the name of a file, or a tuple per layer"),
        ({"gates": ((1.0, float("nan")),)}, "expected the name of a file, or a tuple"),
        ({"gates": GATES, "groups": 3}, "groups=3 of 4 kv heads: expected a divisor of 4"),
    ],
)
def test_what_makes_no_sense_is_refused(options, says):
    with pytest.raises(ValueError, match=says):
        duo_attention(**options)


@pytest.mark.slow
def test_gates_of_the_demo_model_tell_which_heads_fetch_facts():
    """With half of its heads streaming it answers as before; not so if it is the other half."""
    params, tokenizer = kvjax.load(DEMO.parents[1])
    examples = [example("keys", 512, rng) for rng in map(np.random.default_rng, range(8))]
    gates = head_numbers("gates", "demo")
    others = tuple(tuple(1 - gate for gate in layer) for layer in gates)
    hits = []
    for each in (gates, others):
        policy = duo_attention(each, 0.5, sinks=16, recent=64)
        prompts, answers = [e.prompt for e in examples], np.stack([e.answer for e in examples])
        answer = kvjax.generate(params, prompts, policy=policy, max_new_tokens=answers.shape[1], tokenizer=tokenizer)
        hits.append(int((np.asarray(answer.tokens) == answers).all(axis=1).sum()))
    assert hits[0] >= 7
    assert hits[1] <= 1
