"""KVMerger's options: what is refused, their text, and what merging cannot be combined with."""

from dataclasses import replace

import pytest

from kvjax.pallas_kernels import Reduction
from kvjax.parts import AccumulatedAttention, Drop, Fixed, GaussianMerge, TopTokens, WindowAttention
from kvjax.policies import kvmerger, parse
from kvjax.policy import Policy, Protect


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
