"""KVCrush's Algorithms 1 and 2 with anchors and pages, literally."""

from __future__ import annotations

from fractions import Fraction

import numpy as np


def cut(held, protected, page):
    """{name: its tokens} of a head's pages, protected tokens left out."""
    pages = {}
    for p in sorted(set(held) - protected):
        pages.setdefault(p // page, []).append(p)
    return pages


def lloyd(vectors, runs):
    """The tokens nearest to the centres of k-means on {token: bits}, which starts from the runs; exact rationals.

    None if a token is equally near to two different centres: float32 may then choose either.
    """
    own = {token: i for i, run in enumerate(runs) for token in run}
    centres = [()] * len(runs)

    def move():
        for i in set(own.values()):
            points = [vectors[token] for token in own if own[token] == i]
            centres[i] = tuple(Fraction(int(sum(bits)), len(points)) for bits in zip(*points, strict=True))

    def distance(token, centre):
        return sum((int(bit) - c) ** 2 for bit, c in zip(vectors[token], centre, strict=True))

    for _ in range(10):
        move()
        for token in list(own):
            off = [distance(token, centre) for centre in centres]
            if len({centre for centre, d in zip(centres, off, strict=True) if d == min(off)}) > 1:
                return None
            own[token] = off.index(min(off))
    move()
    return {min((t for t in own if own[t] == i), key=lambda t: (distance(t, centres[i]), t)) for i in set(own.values())}


def literal(
    heads,
    counts,
    share,
    anchor="mean",
    pick="centroid",
    upper=0.5,
    protected=(),
    page=1,
    side_by_side=False,
    ages=None,
    newest=False,
    queries=None,
):
    """Algorithms 1 and 2 on one row, of tokens or of pages: the positions retained by each of `heads`.

    Args:
        heads: {position: score} of each kv head.
        anchor: "mean", or the bits.
        side_by_side: the bits of a page are those of its tokens; otherwise a page has one per head by its mean score.
        ages: what scores are divided by before they are compared for bits.
        newest: the base retains the newest tokens, not those with the highest scores.
        queries: for each kv head, {position: score} of each of its query heads, which then have the bits.
    """
    protected, compared = set(protected), [dict(held) for held in heads]
    if ages is not None:
        compared = [{p: score / np.float32(ages[p]) for p, score in held.items()} for held in heads]
    pages = [cut(held, protected, page) for held in heads]

    def ranked(scores, names):
        mean = {name: np.float32(sum(scores[p] for p in names[name])) / np.float32(len(names[name])) for name in names}
        return sorted(names, key=lambda name: (-mean[name], name))

    free = [count - len(protected & set(held)) for held, count in zip(heads, counts, strict=True)]
    wanted = [min(int(count * share), max(f, 0)) // page for count, f in zip(counts, free, strict=True)]
    order = [sorted(p, reverse=True) if newest else ranked(h, p) for h, p in zip(heads, pages, strict=True)]
    kept = [own[: max(0, max(f, 0) // page - w)] for own, f, w in zip(order, free, wanted, strict=True)]
    left = [{name: p[name] for name in p if name not in k} for p, k in zip(pages, kept, strict=True)]
    ones = []  # for each head with a bit, the tokens or pages that have it
    for h, (scores, held, p, k, out) in enumerate(zip(compared, heads, pages, kept, left, strict=True)):
        if side_by_side:
            names = {q: [q] for name in out for q in out[name]}
            own = {q for name in k for q in p[name]}
        else:
            names, own = out, set(k)
        always = protected & set(held) if page == 1 or side_by_side else set()
        n = int(len(names) * upper)
        if queries is None:
            ones.append(always | own | set(ranked(scores, names)[:n]))
        for scores in () if queries is None else queries[h]:
            competing = names | ({q: [q] for q in own} if side_by_side else {name: p[name] for name in own})
            ones.append(always | set(ranked(scores, competing)[: n + len(own)]))

    def bits(name, tokens):
        if not side_by_side:
            return np.array([name in one for one in ones])
        vector = np.zeros((page, len(ones)), bool)
        for q in tokens:
            vector[q % page] = [q in one for one in ones]
        return vector.ravel()

    vectors = [{name: bits(name, out[name]) for name in out} for out in left]
    width = len(ones) * (page if side_by_side else 1)
    everyone = np.array([vector for own in vectors for vector in own.values()]).reshape(-1, width)
    if isinstance(anchor, str):
        anchor = 2 * everyone.sum(axis=0) > len(everyone) if anchor == "mean" else np.arange(width) % 2 == 1
    result = []
    for held, count, p, k, out, own, ranks, w in zip(
        heads, counts, pages, kept, left, vectors, order, wanted, strict=True
    ):
        by_distance = sorted(out, key=lambda name, own=own: ((own[name] != anchor).sum(), name))
        w = min(w, len(by_distance))
        runs = [by_distance[i * len(by_distance) // w : (i + 1) * len(by_distance) // w] for i in range(w)]
        chosen = set()
        if pick == "grid":
            chosen = {by_distance[i * (len(by_distance) - 1) // max(w - 1, 1)] for i in range(w)}
        elif pick == "kmeans":
            chosen = lloyd(own, runs)
            if chosen is None:
                result.append(None)
                continue
            chosen |= set([name for name in ranks if name in out and name not in chosen][: w - len(chosen)])
        for run in runs if pick == "centroid" else ():
            mean = np.mean([own[name] for name in run], axis=0)
            off = {name: round(float(np.abs(own[name] - mean).sum()), 9) for name in run}
            chosen.add(min(run, key=lambda name, off=off: (off[name], name)))
        tokens = {q for name in {*k, *chosen} for q in p[name]} | (protected & set(held))
        result.append(sorted(held if page > 1 and len(held) <= count else tokens))
    return result
