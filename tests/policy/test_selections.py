"""Chunks, representatives, pages and codes over every preset: what is refused, and which entries stay."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvjax import policies
from kvjax.methods import registry
from kvjax.methods.dms import ThresholdShares
from kvjax.methods.restkv import LostOutput
from kvjax.policy import PLAIN
from tests import tiny
from tests.methods.literal_crush import literal
from tests.methods.reference import Reader
from tests.policy.recording import Recording
from tests.policy.small import small
from tests.policy.test_wrappers import ROWS, compared, model, retained_alone

CHUNK, PAGE, SHARE = 5, 3, 0.5
OVER = {
    "chunks": lambda base: policies.chunkkv(base, length=CHUNK),
    "representatives": lambda base: policies.kvcrush(base, share=SHARE),
    "of query heads": lambda base: policies.kvcrush(base, share=SHARE, bits="query"),
    "of chunks": lambda base: policies.kvcrush(base, share=SHARE, granularity="chunk", page=PAGE),
    "of pages": lambda base: policies.kvcrush(base, share=SHARE, granularity="page", page=PAGE),
    "pages": lambda base: policies.kvcrush(base, share=0.0, granularity="page", page=PAGE),
    "codes": lambda base: policies.quantize(base, bits=4, group=4),
}
PARTS = {*registry.parts(), "TopTokens"}


def refused(over, base):
    """Whether what a policy is made of rules the combination out."""
    if over == "codes":
        return base.storage != PLAIN
    if isinstance(base.budget, ThresholdShares):
        return True  # compares single entries
    if "share=" in repr(base.select):
        return True  # representatives of what representatives leave out
    if over == "representatives":
        return False
    if over == "of query heads":
        return base.score.needs.queries == "unrotated" or base.positions == "in_cache"
    ranks_by_count = base.score.needs.by_count and not isinstance(base.score, LostOutput)  # amounts at every count
    return base.select.compares != "scores" or ranks_by_count


@pytest.mark.parametrize("preset", policies.PRESETS)
def test_every_preset_is_accepted_or_refused_with_the_reason(preset):
    base = small(preset)
    for over, build in OVER.items():
        if not refused(over, base):
            policy = build(base)
            assert policies.parse(repr(policy)) == policy
            continue
        with pytest.raises(ValueError, match=r"expected|choose|cannot be combined") as refusal:
            build(base)
        named = {name for name in PARTS if name in str(refusal.value)}
        known = "its base", "positions='in_cache'"  # what is no part
        assert len(named) >= 2 or any(text in str(refusal.value) for text in known) or over == "codes"


def whole_chunks(heads, counts, protected, length):
    """Each head retains what is protected and its first `count` others, chunk by chunk of the highest mean score."""
    chunks = {}
    for held in heads:
        for p, score in held.items():
            if p not in protected:
                chunks.setdefault(p // length, []).append(score)
    ranked = sorted(chunks, key=lambda chunk: (-np.mean(np.float32(chunks[chunk])), chunk))
    stay = []
    for held, count in zip(heads, counts, strict=True):
        own = sorted(protected & set(held))
        rest = [p for chunk in ranked for p in sorted(held) if p // length == chunk and p not in protected]
        stay.append(sorted([*own, *rest[: max(0, count - len(own))]]))
    return stay


def whole_pages(heads, counts, protected, page):
    """Each head retains what is protected and as many whole pages of the highest mean scores as it has room for."""
    stay = []
    for held, count in zip(heads, counts, strict=True):
        own, pages = sorted(protected & set(held)), {}
        for p in sorted(set(held) - protected):
            pages.setdefault(p // page, []).append(p)
        mean = {name: np.float32(sum(np.float32(held[p]) for p in pages[name])) / len(pages[name]) for name in pages}
        room = max(0, count - len(own)) // page
        kept = [p for name in sorted(pages, key=lambda name: (-mean[name], name))[:room] for p in pages[name]]
        stay.append(sorted(held) if len(held) <= count else sorted([*own, *kept]))
    return stay


def expected(over, preset, heads, counts, protected, row, layer):
    """The positions that the heads of a layer retain of a row, {position: score} being given of each."""
    n = len(row)
    if over == "chunks":
        return whole_chunks(heads, counts, protected, CHUNK)
    if over == "pages":
        return whole_pages(heads, counts, protected, PAGE)
    options = {"page": PAGE, "side_by_side": over == "of pages"} if over in ("of chunks", "of pages") else {}
    if "accumulates" in small(preset).score.needs.marks:
        options["ages"] = n - np.arange(n)
    if over == "of query heads":
        reader = Reader(model(preset))
        reader.read(row)
        received = reader.weights(range(n), range(n))[layer].sum(axis=2) / (n - np.arange(n))  # [H, G, N]
        options |= {"queries": [[dict(enumerate(own)) for own in group] for group in received], "ages": None}
    return literal(heads, counts, SHARE, protected=protected, **options)


CASES = [
    *(("chunks", preset) for preset in ("snapkv", "h2o", "dynamickv", "keydiff", "tova")),
    *(("representatives", preset) for preset in ("keyformer", "d2o", "dynamickv", "random", "adakv")),
    *(("of query heads", preset) for preset in ("pyramidkv", "keydiff", "morphkv")),
    *(("of chunks", preset) for preset in ("h2o", "knorm")),
    *(("of pages", preset) for preset in ("tova", "keyformer")),
    *(("pages", preset) for preset in ("h2o", "adakv")),
]
CHOSEN = {
    ("chunks", "h2o"),
    ("chunks", "dynamickv"),
    ("representatives", "dynamickv"),
    ("of query heads", "keydiff"),
    ("of chunks", "knorm"),
    ("of pages", "keyformer"),
    ("pages", "adakv"),
}  # `test_composition.py` has representatives with the merge of d2o


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    ("over", "preset"), [pytest.param(*case, marks=[] if case in CHOSEN else pytest.mark.exhaustive) for case in CASES]
)
def test_which_entries_stay(over, preset):
    """Against plain Python, given the scores of the base's score; heads have the counts that the base gives them."""
    base = small(preset)
    policy = OVER[over](replace(base, score=Recording(base.score, "base")))
    params = model(preset)
    filled, layers = compared(policy, params)
    assert len(layers) == params.config.num_layers
    for layer, (_, shown) in enumerate(layers):
        positions, scores = np.asarray(shown["entries"].positions), np.asarray(shown["scores"])
        for b, row in enumerate(ROWS):
            protected = set(positions[b][np.asarray(shown["protected"])[b]].tolist())
            heads = [
                {int(p): float(s) for p, s in sorted(zip(*head, strict=True)) if p >= 0}
                for head in zip(positions[b], scores[b], strict=True)
            ]
            counts = retained_alone(preset)[b][layer]
            if shown["counts"] is not None and not base.allocates:
                counts = np.asarray(shown["counts"])[b]
            stay = expected(over, preset, heads, counts.tolist(), protected, row, layer)
            assert tiny.held(filled, b)[layer] == stay
    if policy.every is not None:
        decodes(params, filled)


def decodes(params, filled):
    """A few tokens give finite logits and values."""
    for token in np.arange(3):
        logits, filled = tiny.step(params, filled, np.full(len(ROWS), token), np.ones(len(ROWS), bool))
    assert np.isfinite(logits).all()
    assert all(np.isfinite(x).all() for x in (layer.plain().values for layer in filled.entries))


TRIED = ("kvmerger", "kvcompose")  # the tests above have a policy of each other kind decode


def sample():
    """Each preset under one of the wrappers that accept it, in turn; the others are built above."""
    for turn, preset in enumerate(policies.PRESETS):
        accepted = [over for over in OVER if not refused(over, small(preset))]
        marks = [] if preset in TRIED else pytest.mark.exhaustive
        yield pytest.param(accepted[turn % len(accepted)], preset, marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize(("over", "preset"), list(sample()))
def test_combinations_read_and_decode(over, preset):
    """A prompt and a few tokens: finite logits and values, and no more entries of the prompt than under the base."""
    base, params = small(preset), model(preset)
    _, filled = tiny.prefill(params, OVER[over](base), ROWS, 24)
    for b, alone in enumerate(retained_alone(preset)):
        counts = np.array([[len(head) for head in layer] for layer in tiny.held(filled, b)])
        assert (counts <= alone).all() or base.allocates
        assert counts.sum() <= alone.sum()
    decodes(params, filled)
