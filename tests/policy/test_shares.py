"""Shares of numbers are rounded down as people write them: 0.29 of 100 is 29, whatever 0.29 is in binary."""

from __future__ import annotations

from fractions import Fraction
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import Slots
from kvjax.mesh.heads import ALL_HEADS
from kvjax.methods.adakv import _exact, _released
from kvjax.methods.duo_attention import full_heads
from kvjax.methods.epikv import Change, HiddenChange
from kvjax.methods.fastgen import AttentionClasses
from kvjax.methods.merging import NearestValues
from kvjax.methods.roco import ABOVE, Moments, RobustAttention
from kvjax.parts import DynamicShares, Fixed, ratio_of, share_of
from kvjax.policies import parse
from kvjax.policy import Moment, Protect
from tests.methods import one_layer

SHARES = ("0.29", "0.53", "0.58", "0.7", "0.0005", "0.9999", "1", "2.53", "300.1234")
WHOLES = (0, 1, 50, 90, 100, 4300, 4675, 131_072, 2_500_003)


@pytest.mark.parametrize("text", SHARES)
def test_a_share_is_that_of_an_exact_product(text: str) -> None:
    expected = [int(Fraction(text) * whole) for whole in WHOLES]
    assert [share_of(float(text), whole) for whole in WHOLES] == expected
    assert share_of(float(text), jnp.array(WHOLES, jnp.int32)).tolist() == expected


def test_products_may_exceed_32_bits() -> None:
    largest = 2**31 - 1
    assert share_of(0.9999, jnp.array(largest)).tolist() == largest * 9999 // 10_000
    assert share_of(1.0, jnp.array(largest)).tolist() == largest


def entries(count: int, per_slot: Any = None) -> Slots:
    return Slots.only(positions=jnp.arange(count)[None, None], per_slot=per_slot)


def moment(count: int, **fields: Any) -> Any:
    own = {"next_position": jnp.array([count]), "counts": jnp.array([[count]]), "window": None, "protected": None}
    made = SimpleNamespace(**own | fields)
    made.viewers = partial(Moment.viewers, made)
    return made


def protected() -> int:
    mask = Protect(recent=0.53).mask(jnp.arange(4300)[None, None], jnp.array([4300]), jnp.array([[4300]]))
    return int(mask.sum())


def first_stage() -> int:
    return int(parse("criticalkv:first=0.53").score._first(jnp.array([[4300]]))[0, 0])


def heavy_hitters() -> int:
    return int(parse("kvmerger:merge.heavy=0.53").merge._heavy(jnp.array([[4300]]))[0, 0])


def exempt() -> int:
    sums = jnp.arange(4300.0)[None, None] / 4300
    return int((RobustAttention(0.53)(entries(4300, Moments(sums, sums)), moment(4300)) >= ABOVE).sum())


def merged() -> int:
    u = jnp.linspace(0.1, 0.9, 76)[None, None]
    return int(NearestValues(fraction=0.28)._chosen(u, u > 0).sum())


def upper_half() -> int:
    """The ones among 100 tokens that are left out."""
    select: Any = parse("kvcrush:upper=0.53").select
    none, numbers = jnp.zeros((1, 1, 100), bool), jnp.arange(100)[None, None]
    scores = jnp.arange(100.0)[None, None, None]
    return int(select._bits(scores, numbers, none, ~none, none, ALL_HEADS).sum())


def layers_by_depth() -> int:
    """The difference of the layers' numbers."""
    none = jnp.zeros((1, 1))
    rows = [Change(none, none, none, none + layer, none, none) for layer in range(50)]
    (score, *_) = [row.score for row in HiddenChange(early=0.58, late=0.2).across(rows) if row is not None]
    return int(score[0, 0])


def dropped_channels() -> int:
    q = np.random.default_rng(0).normal(size=(1, 1, 4, 100)).astype(np.float32)
    _, read = one_layer.read(parse("think:ratio=0.29,window=2,recent=0"), np.array([4]), 4, q, q, q)
    return 100 - read[0].settled.keys.shape[-1]


def local_tokens() -> int:
    scores = AttentionClasses(sinks=1, frequent=0.0, local=0.0005)(entries(4000, jnp.ones((1, 1, 4000))), moment(4000))
    return int((jnp.floor(scores) == 1).sum())


def streaming_heads() -> int:
    return 100 - int(np.sum(full_heads((tuple(range(100)),), 0.575, 1)))


def largest_layer(r_max: float) -> int:
    """Of two layers of 3,000 entries with a mean of 2,580, where the first one has the best."""
    scores = jnp.stack([jnp.ones((1, 1, 3000)), jnp.zeros((1, 1, 3000))])
    return int(DynamicShares(Fixed(2580), r_max=r_max).allocate(scores, jnp.full((2, 1), 2580), 0, ALL_HEADS)[0, 0, 0])


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (protected, 2279),
        (first_stage, 2279),
        (heavy_hitters, 2279),
        (exempt, 2279),
        (merged, 1 + 21),
        (upper_half, 53),
        (layers_by_depth, 29 - 10),
        (dropped_channels, 29),
        (local_tokens, 2),
        (streaming_heads, 58),  # the even one of 57 and 58
        (lambda: largest_layer(1.05), 2709),
        (lambda: largest_layer(2e6), 3000),
    ],
)
def test_parts_count_shares_so(number: Any, expected: int) -> None:
    assert number() == expected


def test_heads_share_millions_of_entries() -> None:
    """AdaKV's alpha b + (1 - alpha) c of two heads, whose products exceed 32 bits."""
    b, c = [3_000_000, 3_000_000], [2_500_001, 3_499_999]
    alpha = ratio_of(0.2013)
    exact = [alpha * x + (1 - alpha) * y for x, y in zip(b, c, strict=True)]
    given = _exact(jnp.array([b]), jnp.array([c]), alpha)[0].tolist()
    assert sum(given) == sum(b)
    assert [abs(n - x) < 1 for n, x in zip(given, exact, strict=True)] == [True, True]
    released = _released(jnp.array([b]), jnp.array([c]), alpha)[0].tolist()
    assert released == [int(alpha * x) + round((1 - alpha) * y) for x, y in zip(b, c, strict=True)]
