"""HeadKV: the budgets of heads from the released formula in float64 NumPy, and which entries they retain."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.mesh.heads import ALL_HEADS
from kvjax.parts import Fixed, ImportanceShares
from kvjax.policies import headkv, parse, snapkv
from tests import tiny
from tests.methods import allocating

# What the tests of all presets run (tests/policy/presets.py).
OPTIONS = ("budget=12,window=4,kernel=3,beta=1.5", "budget=0.5,window=3,kernel=3,beta=3,groups=2")

IMPORTANCE = ((0.1, 0.5), (0.3, 0.1))
PARAMS = tiny.decoder(windows=(None, None))
RNG = np.random.default_rng(3)
ROWS = [RNG.integers(0, tiny.VOCAB, n) for n in (40, 17, 3)]


@pytest.mark.parametrize(
    ("budget", "beta", "expected"),
    [
        (24, 2.0, [[18, 34], [26, 18]]),  # 20 - 10 of its own; of the pool of 40 4, 20, 12 and 4
        (24, 1.0, [[12, 40], [28, 12]]),  # everything is shared; 44 are more than the prompt has
        (24, 1.5, [[16, 37], [27, 16]]),  # 20 - 13 = 7; 5.2, 26, 15.6, 5.2: the largest remainder is rounded up
        (24, 10.0, [[23, 26], [24, 23]]),  # 18; 0.8, 4, 2.4, 0.8
        (40, 1.5, [[48, 48], [48, 48]]),  # a prompt within the budget
    ],
)
def test_budgets_of_heads(budget, beta, expected):
    """Two layers of two heads, a prompt of 40 tokens in 48 slots, the last four protected."""
    scores = np.ones((2, 1, 2, 48), np.float32)
    scores[..., 36:40], scores[..., 40:] = np.inf, -np.inf
    shares = ImportanceShares(Fixed(budget), IMPORTANCE, beta)
    counts = np.asarray(shares.allocate(scores, jnp.full((2, 1), budget), 0, ALL_HEADS))[:, 0]
    assert counts.tolist() == expected


def test_a_layer_with_a_sliding_window_adds_less_to_the_pool():
    """Means of 8 and 24; 4 entries are protected. Of 4 and 20 others half are shared: 24, as 2.4, 12, 7.2 and 2.4."""
    scores = np.ones((2, 1, 2, 48), np.float32)
    scores[..., 36:40], scores[..., 40:], scores[0, ..., :32] = np.inf, -np.inf, -np.inf
    shares = ImportanceShares(Fixed(24), IMPORTANCE, beta=2.0)
    counts = np.asarray(shares.allocate(scores, jnp.array([[8], [24]]), 0, ALL_HEADS))[:, 0]
    assert counts.tolist() == [[8, 8], [4 + 10 + 7, 4 + 10 + 2]]


def test_a_head_that_evicts_has_room():
    """With everything shared, a head without importance keeps what a step needs."""
    scores = np.ones((1, 1, 2, 30), np.float32)
    scores[..., 26:] = np.inf
    shares = ImportanceShares(Fixed(10), ((1.0, 0.0),), beta=1.0)
    assert np.asarray(shares.allocate(scores, jnp.full((1, 1), 10), 6, ALL_HEADS))[0].tolist() == [[14, 6]]


@pytest.mark.long
def test_retains_the_best_of_snapkv():
    """Of each row its own total: a long prompt, one that is within the pool of some heads, and a short one."""
    options = {"window": 4, "kernel": 3}
    policy = headkv(12, IMPORTANCE, beta=2.0, **options)
    read = allocating.read(PARAMS, policy, ROWS, 40)
    mine = allocating.reallocated(PARAMS, read, policy, 40)
    # 4 + 8 - 4 of its own; of the pool of 16, 1.6, 8, 4.8 and 1.6. Of equal remainders the earlier is rounded up.
    for row in range(2):
        assert [[len(head) for head in layer] for layer in tiny.held(mine, row)] == [[10, 16], [13, 9]]
    for row, tokens in enumerate(ROWS):
        for layer, heads in enumerate(tiny.held(mine, row)):
            for head, held in enumerate(heads):
                if row < 2:
                    assert held == tiny.held(of_size(len(held), options), row)[layer][head]
                else:
                    assert held == list(range(len(tokens)))


def of_size(budget, options):
    """The cache of SnapKV with that budget."""
    return tiny.prefill(PARAMS, snapkv(budget, pool="max", **options), ROWS, 40)[1]


def test_files_of_importance(tmp_path, monkeypatch):
    """Numbers per kv head, and the authors' form: a list of scores per query head, in any order of names."""
    (tmp_path / "heads.json").write_text(json.dumps({"importance": IMPORTANCE}))
    np.savez(tmp_path / "heads.npz", importance=np.array(IMPORTANCE))
    np.savetxt(tmp_path / "heads.tsv", IMPORTANCE, delimiter="\t")
    for name in ("heads.json", "heads.npz", "heads.tsv"):
        assert parse(f"headkv:budget=20,importance={tmp_path / name}") == headkv(20, IMPORTANCE)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse("headkv:budget=20,importance=~/heads.npz") == headkv(20, IMPORTANCE)
    scores = {
        "1-0": [0.2, 0.4],
        "0-1": [0.0, 0.2],
        "0-0": 0.1,
        "0-2": [0.5],
        "0-3": [0.5],
        "1-1": 0.3,
        "1-2": 0,
        "1-3": 0.2,
    }
    (tmp_path / "released.json").write_text(json.dumps(scores))
    policy = parse(f"headkv:budget=20,group=2,importance={tmp_path / 'released.json'}")
    np.testing.assert_allclose(policy.budget.importance, IMPORTANCE)


def test_importance_of_another_model_is_refused():
    with pytest.raises(ValueError, match="importance of 4 layers with 2 kv heads for a model of 2 with 2: expected"):
        kvjax.generate(PARAMS, ROWS[0], policy=headkv(12))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"importance": "nowhere.json"}, "importance='nowhere.json' cannot be read .*expected a .json"),
        ({"importance": ((1.0, 0.5), (1.0,))}, "importance=.*expected the name of a file, or a tuple per layer"),
        ({"importance": ((1.0, -0.5),)}, "importance=.*expected numbers >= 0, and one above 0 in each of 1 groups"),
        ({"importance": ((1.0, 0.0),), "groups": 2}, "one above 0 in each of 2 groups"),
        ({"importance": IMPORTANCE, "group": 3}, "group=3 of 2 heads: expected a divisor of 2"),
        ({"importance": IMPORTANCE, "groups": 4}, "groups=4 of 2 kv heads: expected a divisor of 2"),
    ],
)
def test_what_makes_no_sense_is_refused(options, says):
    with pytest.raises(ValueError, match=says):
        headkv(**options)
