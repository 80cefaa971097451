"""What a selection and a merge retain of one row, in slow Python: tokens by position, one head after another."""

from __future__ import annotations

import numpy as np

from kvjax.parts import Chunks, EvenChunks, GaussianMerge, Newest, Pages, Representatives
from kvjax.policy import Merge, Select
from tests.methods.literal_crush import cut
from tests.methods.literal_crush import literal as crushed
from tests.methods.literal_merging import gaussian, largest_theta, merging_sets

Scores = dict[int, np.float32]  # by position


def best(scores: Scores, among, count: int) -> list[int]:
    """The positions of the `count` highest scores; of equal scores the earlier position."""
    return sorted(among, key=lambda p: (-scores[p], p))[: max(0, count)]


def mean_of(scores: Scores, tokens) -> np.float32:
    return np.float32(sum(scores[p] for p in tokens)) / np.float32(len(tokens))


def selected(
    select: Select,
    heads: list[Scores],
    protected: set[int],
    counts: list[int],
    queries: list[list[Scores]] | None = None,
) -> list[set[int]]:
    """The positions that each head retains of a prompt.

    Args:
        heads: the score of each entry that a head holds.
        protected: positions that are retained whatever they score.
        counts: the number of entries that each head retains at most.
        queries: for each kv head, the scores of each of its query heads.
    """
    if isinstance(select, Representatives):
        newest = isinstance(select.base, Newest)
        given = queries if select.bits == "query" else None
        found = crushed(heads, counts, select.share, protected=protected, newest=newest, queries=given)
        return [set(own) for own in found]
    kept = []
    for scores, count in zip(heads, counts, strict=True):
        stay = protected & set(scores)
        free, room = set(scores) - stay, max(0, count - len(stay))
        if isinstance(select, Newest):
            kept.append(stay | set(sorted(free)[len(free) - min(room, len(free)) :]))
        elif isinstance(select, EvenChunks):
            kept.append(stay | evenly(scores, sorted(free), room, select.chunk))
        elif isinstance(select, Chunks):
            kept.append(stay | chunked(heads, scores, sorted(free), protected, room, select.length))
        elif isinstance(select, Pages):
            pages = cut(scores, protected, select.page)
            means = {name: mean_of(scores, tokens) for name, tokens in pages.items()}
            whole = {p for name in best(means, means, room // select.page) for p in pages[name]}
            kept.append(set(scores) if len(scores) <= count else stay | whole)
        else:
            kept.append(stay | set(best(scores, free, room)))
    return kept


def evenly(scores: Scores, free: list[int], room: int, length: int) -> set[int]:
    """The same share of each run of `length` tokens; the first runs retain one more each until the room is filled."""
    room, kept = min(room, len(free)), set()
    runs = [free[i : i + length] for i in range(0, len(free), length)]
    shares = [len(run) * room // len(free) for run in runs]
    missing = room - sum(shares)
    for i, (run, share) in enumerate(zip(runs, shares, strict=True)):
        kept |= set(best(scores, run, share + (i < missing)))
    return kept


def chunked(heads, scores: Scores, free: list[int], protected: set[int], room: int, length: int) -> set[int]:
    """Chunk by chunk of the text, in the order of their mean scores in all heads."""
    of_chunk: dict[int, list[np.float32]] = {}
    for own in heads:
        for p in set(own) - protected:
            of_chunk.setdefault(p // length, []).append(own[p])
    means = {name: np.float32(sum(found)) / np.float32(len(found)) for name, found in of_chunk.items()}
    return set(sorted(free, key=lambda p: (-means[p // length], p))[:room])


def evicted(select: Select, scores: Scores, protected: set[int], count: int) -> set[int]:
    """The `count` positions that a full head evicts: the lowest scores, of equal scores the later position."""
    base = select
    while isinstance(base, Chunks | Pages | Representatives):
        base = base.base
    free = set(scores) - protected
    if isinstance(base, Newest):
        return set(sorted(free)[:count])
    return set(sorted(free, key=lambda p: (scores[p], -p))[:count])


def merged(
    merge: GaussianMerge, keys: dict[int, np.ndarray], scores: Scores, protected: set[int], room: int
) -> set[int]:
    """The positions that KVMerger leaves of a head with more than `room` entries."""
    positions = sorted(scores)
    if len(positions) <= room:
        return set(positions)
    stay = protected & set(positions)
    kept = stay | set(best(scores, set(positions) - stay, min(merge.heavy, room - len(stay))))
    rest = [p for p in positions if p not in kept]
    packed, own = np.stack([keys[p] for p in rest]).astype(np.float64), np.array([scores[p] for p in rest])
    sections = [sum(k < p for k in kept) for p in rest]
    theta = largest_theta(packed, sections, room - len(kept), merge.rule)
    sets = merging_sets(packed, sections, theta, merge.rule)
    return kept | {rest[gaussian(packed, packed, own, members)[0]] for members in sets}


def after_prompt(select, merge: Merge, keys, heads, protected, counts, queries=None) -> list[set[int]]:
    """The positions that each head retains of a prompt under a selection and a merge."""
    if isinstance(merge, GaussianMerge):
        left = [merged(merge, *own, protected, n) for *own, n in zip(keys, heads, counts, strict=True)]
        heads = [{p: scores[p] for p in own} for scores, own in zip(heads, left, strict=True)]
    return selected(select, heads, protected, counts, queries)


def after_eviction(
    select, merge: Merge, keys: dict[int, np.ndarray], scores: Scores, protected: set[int], count: int, every: int
) -> set[int]:
    """The positions that a full head with a capacity of `count` holds when it has made room for a token."""
    if isinstance(merge, GaussianMerge):
        left = merged(merge, keys, scores, protected, count - every)
        stay = protected & left
        return stay | set(best(scores, left - stay, count - every - len(stay)))
    return set(scores) - evicted(select, scores, protected, every)
