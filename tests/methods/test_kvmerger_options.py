"""KVMerger's options: what is refused, their text, and what merging cannot be combined with."""

from dataclasses import replace

import pytest

from kvjax.pallas_kernels import Reduction
from kvjax.parts import AccumulatedAttention, Drop, Fixed, GaussianMerge, TopTokens, WindowAttention
from kvjax.policies import kvmerger, parse
from kvjax.policy import Policy, Protect


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("merge.theta=1.5", r"theta=1.5: expected a cosine in \[-1, 1\], or None"),
        ("merge.theta=True", "is not a number"),
        ("merge.sigma=0", "sigma=0: expected 'mean', 'rms', 'eq7' or a number above 0"),
        ("merge.sigma=median", "sigma='median': expected"),
        ("merge.rule=ring", "rule='ring': expected 'anchor' or 'chain'"),
        ("merge.weights=max", "weights='max': expected 'gauss' or 'average'"),
        ("merge.pivot=first", "pivot='first': expected 'score' or 'random'"),
        ("merge.heavy=1.0", "heavy=1.0: expected an integer"),
        ("merge.heavy=-1", "heavy=-1: expected an integer >= 0"),
        ("merge.seed=-1", "seed=-1"),
        ("recent=0.6,merge.heavy=0.5", "leave nothing to merge into"),
        (
            "budget=8,recent=4,merge.heavy=4",
            "heavy=4, sinks=0, recent=4 and every=None leave nothing to merge",
        ),
        ("budget=8,recent=3,merge.heavy=3,every=2", "recent=3 and every=2 leave nothing to merge into"),
        ("budget=0.5,every=0", "every=0: expected an integer >= 1"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        parse(f"kvmerger:{options}")


def test_options_as_text():
    merge = GaussianMerge(sigma=3.0, theta=None)
    assert parse("kvmerger:budget=64,merge.sigma=3.0,merge.theta=None") == kvmerger(64, merge=merge)
    chained = kvmerger(64, merge=GaussianMerge(rule="chain", straddle=True))
    assert parse(repr(chained)) == chained


def test_stored_queries_need_keys_that_do_not_change():
    window = WindowAttention(4, Reduction(rows="mean", group="mean"))
    policy = Policy(window, Fixed(16), TopTokens(), GaussianMerge(heavy=0, theta=None), Protect(recent=4))
    assert replace(policy, merge=Drop()).merge == Drop()
    with pytest.raises(ValueError, match=r"WindowAttention keeps rotated queries.*GaussianMerge changes them"):
        replace(policy, every=1)
    assert replace(policy, score=AccumulatedAttention(), every=2).every == 2
