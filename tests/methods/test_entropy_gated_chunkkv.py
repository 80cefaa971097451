"""Gated chunks against a loop over chunks in NumPy; tests/methods/test_kvpress.py compares them with kvpress."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from kvjax.methods.entropy_gated_chunkkv import _order
from kvjax.policies import entropy_gated_chunkkv, parse, snapkv
from tests import tiny

OPTIONS = (
    "base=snapkv,base.budget=12,base.window=4,base.kernel=3,length=5,few=2",
    "base=knorm,base.budget=0.5,length=4,few=1",
)

order_of = jax.jit(_order, static_argnames=("length", "few"))


def taken(scores: np.ndarray, length: int, few: int) -> list[int]:
    """All tokens in the order in which they are retained, from the score of each position."""
    chunks = [list(range(i, min(i + length, len(scores)))) for i in range(0, len(scores), length)]
    mean, found = np.array([scores[c].mean() for c in chunks]), []
    for chunk in chunks:
        above = scores[chunk] - min(scores[chunk].min(), 0)
        share = above / (above.sum() + 1e-8)
        found.append(0.0 if len(chunk) == 1 else -np.sum(share * np.log(share + 1e-8)) / np.log(len(chunk)))
    entropy = np.clip(found, 0, 1)
    middle = (len(chunks) - 1) // 2
    first, rest = [], []
    for i in np.argsort(-mean, kind="stable"):
        best = sorted(chunks[i], key=lambda t: -scores[t])
        spiky = mean[i] >= np.sort(mean)[middle] and entropy[i] < np.sort(entropy)[middle]
        cut = few if spiky else len(best)
        first += best[:cut]
        rest += best[cut:]
    return first + sorted(rest, key=lambda t: -scores[t])


@pytest.mark.parametrize(("size", "length", "few"), [(40, 8, 3), (43, 5, 2), (41, 10, 1), (6, 10, 4)])
@pytest.mark.parametrize("signed", [False, True])
def test_order_of_tokens(size: int, length: int, few: int, signed: bool) -> None:
    """Two heads with different entries and empty slots; the last chunk is shorter."""
    rng = np.random.default_rng(size)
    scores = rng.normal(size=size) if signed else rng.exponential(size=size) ** 3
    slots = rng.permutation(2 * size + 4)
    positions = np.full(2 * size + 4, -1)
    positions[slots[: 2 * size]] = np.tile(np.arange(size), 2)
    found = np.asarray(order_of(np.where(positions < 0, 7.0, scores[positions]), positions, length=length, few=few))
    order = [int(positions[i]) for i in np.argsort(found) if positions[i] >= 0][::2]
    assert order == taken(scores.astype(np.float32), length, few)


def test_a_spiky_chunk_leaves_room_for_others() -> None:
    """Of [9 0 0 0] two tokens stay, so that the third chunk has room for one more."""
    scores = np.array([9, 0.1, 0.2, 0.1, 2, 2.1, 2.2, 2, 1, 1.1, 1.2, 1, 0.1, 0.2, 0.1, 0.1])
    order = np.asarray(order_of(scores, np.arange(16), length=4, few=2))
    assert sorted(np.argsort(order)[:6].tolist()) == [0, 2, 4, 5, 6, 7]
    assert np.argsort(order)[6:8].tolist() == [10, 9]


def test_protected_tokens_stay_and_heads_agree() -> None:
    rows = [np.random.default_rng(n).integers(0, tiny.VOCAB, n) for n in (29, 9, 20)]
    policy = entropy_gated_chunkkv(snapkv(12, 4, 3), length=5, few=2)
    _, cache = tiny.prefill(tiny.decoder(8), policy, rows, 32)
    for row, tokens in enumerate(rows):
        for layer in tiny.held(cache, row):
            held = [sorted(head) for head in layer]
            assert all(head == held[0] for head in held)
            assert held[0][-4:] == list(range(len(tokens) - 4, len(tokens)))
            assert len(held[0]) == min(12, len(tokens))


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"^entropy_gated_chunkkv: its base selects by Chunks; choose a base"):
        parse("entropy_gated_chunkkv:base=chunkkv")
