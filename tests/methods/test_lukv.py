"""LU-KV: the budgets of heads from kvpress's formula in NumPy, and which entries they retain."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvjax
from kvjax.mesh.heads import ALL_HEADS
from kvjax.parts import Fixed, Fraction, HeadShares
from kvjax.policies import lukv, parse, snapkv
from tests import tiny
from tests.methods import allocating

# What the tests of all presets run (tests/policy/presets.py).
OPTIONS = (
    "base=snapkv,base.window=4,base.kernel=3,curve=((0.6,0.3),(0.4,0.7)),budget=12,sinks=2",
    "base=h2o,base.recent=3,curve=((0.2,0.9),(0.5,0.1)),budget=0.5,sinks=1,groups=2",
)

CURVE = ((0.1, 0.5), (0.3, 0.1))
PARAMS = tiny.decoder(windows=(None, None))
ROWS = [np.random.default_rng(n).integers(0, tiny.VOCAB, n) for n in (40, 17, 3)]


def allocated(shares, mean, length=40, slots=48, protected=4, least=0):
    """The counts [L, H] of a prompt of `length` tokens, the last ones protected; `mean` may be one for each layer."""
    scores = np.ones((*np.shape(shares.shares)[:1], 1, np.shape(shares.shares)[1], slots), np.float32)
    scores[..., length - protected : length], scores[..., length:] = np.inf, -np.inf
    means = jnp.broadcast_to(np.reshape(mean, (-1, 1)), (len(scores), 1))
    return np.asarray(shares.allocate(scores, means, least, ALL_HEADS))[:, 0].tolist()


@pytest.mark.parametrize(
    ("mean", "curve", "protected", "least", "expected"),
    [
        (12, CURVE, 1, 0, [[5, 24], [14, 5]]),  # 48 in the proportions 1 : 5 : 3 : 1; 4.8, 24, 14.4, 4.8
        (10, CURVE, 1, 0, [[4, 20], [12, 4]]),
        (10, CURVE, 6, 0, [[6, 18], [10, 6]]),  # 4 entries more for two heads; 2 of 14, and 2 of 6 rounded up
        (10, CURVE, 1, 6, [[6, 18], [10, 6]]),  # the same for a policy that evicts 5 at a time
        (24, CURVE, 1, 0, [[10, 40], [29, 9]]),  # 48 are more than the prompt has; 9.6, 28.8, 9.6
        (40, CURVE, 1, 0, [[48, 48], [48, 48]]),  # a prompt within the budget
        (10, ((0.0, 1.0), (1.0, 0.0)), 3, 0, [[3, 17], [17, 3]]),
        (10, ((1.0, 1.0), (1.0, 1.0)), 3, 0, [[10, 10], [10, 10]]),
    ],
)
def test_budgets_of_heads(mean, curve, protected, least, expected):
    """Two layers of two heads, a prompt of 40 tokens in 48 slots."""
    assert allocated(HeadShares(Fixed(mean), curve), mean, protected=protected, least=least) == expected


def test_totals_are_of_each_layers_mean():
    """40 in the proportions 1 : 5 : 3 : 1, and 42 with the largest remainder rounded up."""
    assert allocated(HeadShares(Fixed(12), CURVE), [8, 12], protected=1) == [[4, 20], [12, 4]]
    assert allocated(HeadShares(Fixed(12), CURVE), [9, 12], protected=1) == [[4, 21], [13, 4]]


def kvpress_counts(retained, length):
    """The counts [L, H] of LUKVPress: each layer's total is rounded, and the largest remainders get what is left."""
    ideal = np.array(retained) * length
    counts = np.floor(ideal + 1e-9).astype(int)
    for own, wanted in zip(counts, ideal, strict=True):
        left = int(np.round(wanted.sum())) - own.sum()
        own[np.argsort(own - wanted, kind="stable")[:left]] += 1
    return counts


@pytest.mark.long
@given(seed=st.integers(0, 2**32 - 1), layers=st.integers(1, 5), heads=st.integers(1, 6), tokens=st.integers(10, 4000))
@settings(max_examples=10)
def test_counts_are_those_of_kvpress(seed, layers, heads, tokens):
    """Where the total of each layer is an integer, as is the mean, and the largest remainder is the layer's first."""
    wanted = np.random.default_rng(seed).integers(1, tokens, (layers, heads)).astype(float)
    wanted[0, 0] += -wanted.sum() % wanted.size
    mean, length = int(wanted.mean()), int(wanted.max()) + 1
    if heads > 1:
        wanted[:, :2] += [-0.3, 0.3]
    retained = tuple(map(tuple, (wanted / length).tolist()))
    found = allocated(HeadShares(Fixed(mean), retained), mean, length, length, protected=0)
    assert found == kvpress_counts(retained, length).tolist()


@pytest.mark.slow
@given(data=st.data(), groups=st.sampled_from([1, 2, 4]), length=st.integers(1, 60), protected=st.integers(0, 9))
def test_totals_and_what_stays(data, groups, length, protected):
    """Every head has its protected entries, and no group more than its total."""
    number = st.one_of(st.just(0.0), st.floats(1e-3, 1))
    curve = data.draw(st.lists(st.lists(number, min_size=4, max_size=4), min_size=1, max_size=3))
    curve = [[max(x, 0.01) if head % (4 // groups) == 0 else x for head, x in enumerate(own)] for own in curve]
    mean, least = protected + data.draw(st.integers(1, 20)), data.draw(st.sampled_from([0, protected + 1]))
    shares = HeadShares(Fixed(mean), tuple(map(tuple, curve)), groups)
    counts = np.array(allocated(shares, mean, length, 64, min(protected, length), least))
    if length <= mean:
        assert (counts == 64).all()
        return
    assert (counts >= np.maximum(min(protected, length), min(least, length))).all()
    assert (counts <= length).all()
    totals = counts.reshape(len(curve), groups, -1).sum(axis=(0, 2))
    most = mean * counts.size // groups
    assert (totals <= most).all()
    full = (counts == length).reshape(len(curve), groups, -1).any(axis=(0, 2))
    assert ((totals == most) | full).all()


@pytest.mark.slow
def test_retains_the_best_of_snapkv():
    """Of each row its own total: a long prompt, a shorter one, and one within the budget."""
    base = snapkv(12, window=4, kernel=3)
    policy = lukv(base, CURVE, 12, sinks=0)
    read = allocating.read(PARAMS, policy, ROWS, 40)
    mine = allocating.reallocated(PARAMS, read, policy, 40)
    sizes = [[[5, 24], [14, 5]], [[5, 17], [14, 5]], [[3, 3], [3, 3]]]
    for row, expected in enumerate(sizes):
        assert [[len(head) for head in layer] for layer in tiny.held(mine, row)] == expected
        for layer, heads in enumerate(tiny.held(mine, row)):
            for head, held in enumerate(heads):
                _, alone = tiny.prefill(PARAMS, snapkv(max(5, len(held)), window=4, kernel=3), ROWS, 40)
                assert held == tiny.held(alone, row)[layer][head]


def curve_file(folder, ratios=None):
    """A curve for two layers of two heads, whose ratios are all different."""
    path = folder / "curve.npy"
    steps = np.arange(1, 100)[:, None, None] / 100
    np.save(path, steps ** np.array([[0.5, 1.0], [2.0, 3.0]]) if ratios is None else ratios)
    return path


@pytest.mark.parametrize(
    ("budget", "removed"),
    [(0.2, 0.8), (0.37, 0.63), (0.001, 0.99), (0.995, 0.01), (1.0, 0.01)],
)
def test_a_file_is_read_at_the_budget(tmp_path, budget, removed, monkeypatch):
    policy = parse(f"lukv:base=knorm,budget={budget},curve={curve_file(tmp_path)}")
    np.testing.assert_allclose(policy.budget.shares, 1 - removed ** np.array([[0.5, 1.0], [2.0, 3.0]]))
    assert policy.budget.budget == Fraction(budget)
    assert parse(repr(policy)) == policy
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse(f"lukv:base=knorm,budget={budget},curve=~/curve.npy") == policy


def test_the_larger_protection_holds():
    policy = parse("lukv:base=snapkv,base.window=16,sinks=3")
    assert (policy.protect.sinks, policy.protect.recent) == (3, 16)
    policy = parse("lukv:base=streaming_llm,base.sinks=8,recent=2")
    assert (policy.protect.sinks, policy.protect.recent) == (8, 2)
    assert parse("lukv:base=h2o").protect.recent == 0.5


def test_a_curve_of_another_model_is_refused(tmp_path):
    path = curve_file(tmp_path, np.full((99, 3, 2), 0.5))
    with pytest.raises(ValueError, match="curve of 3 layers with 2 kv heads for a model of 2 with 2: expected a curve"):
        kvjax.generate(PARAMS, ROWS[0], policy=f"lukv:base=knorm,budget=0.5,curve={path}")


@pytest.mark.parametrize(
    ("ratios", "says"),
    [
        (np.zeros((100, 2, 2)), r"it has shape \(100, 2, 2\).*expected a .npy file of finite numbers \[99, layers"),
        (np.zeros((99, 4)), r"it has shape \(99, 4\)"),
        (np.zeros((99, 0, 2)), r"it has shape \(99, 0, 2\)"),
        (np.full((99, 2, 2), np.nan), "numbers that are not finite"),
        (np.full((99, 2, 2), "x"), "could not convert"),
        (np.full((99, 2, 2), None), "allow_pickle=False"),
        (np.ones((99, 2, 2)), "shares=.*expected numbers >= 0, and one above 0 in each of 1 groups"),
    ],
)
def test_files_that_are_no_curve_are_refused(tmp_path, ratios, says):
    with pytest.raises(ValueError, match=says):
        lukv(curve=str(curve_file(tmp_path, ratios)))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"curve": "nowhere.npy"}, "curve='nowhere.npy' cannot be read .*expected a .npy file"),
        ({"curve": __file__}, "cannot be read .*expected a .npy file"),
        ({"curve": "nowhere.npy", "budget": 64}, r"budget=64 with curve='nowhere.npy': expected a float in \(0, 1\]"),
        ({"curve": ((1.0, 0.5), (1.0,))}, "curve=.*expected the name of a file, or a tuple per layer"),
        ({"curve": ((1.0, -0.5),)}, "shares=.*expected numbers >= 0, and one above 0 in each of 1 groups"),
        ({"curve": ((1.0, 0.0),), "groups": 2}, "one above 0 in each of 2 groups"),
        ({"curve": CURVE, "groups": 4}, "groups=4 of 2 kv heads: expected a divisor of 2"),
        ({"budget": 5}, r"a budget of 5 entries: expected 6 or more"),
        ({"base": kvjax.policies.tova()}, "LastAttention: it has all heads of a layer retain the same tokens"),
    ],
)
def test_what_makes_no_sense_is_refused(options, says):
    with pytest.raises(ValueError, match=says):
        lukv(**options)
