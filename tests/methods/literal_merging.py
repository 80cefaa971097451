"""KVMerger's Algorithms 1 and 2, literally."""

from __future__ import annotations

import numpy as np


def cosine(x, y):
    return x @ y / np.sqrt(x @ x) / np.sqrt(y @ y)


def merging_sets(keys, sections, theta, rule="anchor"):
    """Algorithm 1 with the last open set, as lists of indices, each from its last to its first token."""
    if len(keys) == 0:
        return []
    sets, current = [], [len(keys) - 1]
    for i in range(len(keys) - 2, -1, -1):
        j = current[0] if rule == "anchor" else current[-1]
        if cosine(keys[i], keys[j]) > theta and sections[i] == sections[j]:
            current.append(i)
        else:
            sets.append(current)
            current = [i]
    return [*sets, current]


def gaussian(keys, values, scores, members, sigma="mean", weights="gauss"):
    """Algorithm 2 for one set: the pivot's index, and the merged key and value."""
    members = sorted(members)
    pivot = members[int(np.argmax(scores[members]))]
    distance = np.linalg.norm(keys[members] - keys[pivot], axis=-1)
    others = max(len(members) - 1, 1)
    width = {
        "mean": distance.sum() / others,
        "rms": np.sqrt((distance**2).sum() / others / 2),
        "eq7": (distance**2).sum() / (np.sqrt(2) * len(members)),
    }.get(sigma, sigma)
    g = np.ones(len(members)) if weights == "average" else np.exp(-(distance**2) / (2 * max(width, 1e-6) ** 2))
    w = g / g.sum()
    return pivot, w @ keys[members], w @ values[members]


def largest_theta(keys, sections, room, rule):
    """The threshold that 12 halvings of [-1, 1] find: the largest with no more sets than room."""
    low, high = -1 - 1e-5, 1.0
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if len(merging_sets(keys, sections, middle, rule)) <= room else (low, middle)
    return low


def merge_down(held, now, room, *, recent, heavy, theta, rule="anchor", straddle=False, fits=None, **options):
    """What becomes of a head's {position: (key, value, score, tokens)} when it may hold `room` entries.

    Pivots beyond `fits`, by default the room, are dropped by their scores.
    """
    positions = sorted(held)
    if len(held) <= room:
        return dict(held)
    protected = [p for p in positions if p >= now - recent]
    ranked = sorted(set(positions) - set(protected), key=lambda p: (-held[p][2], p))
    kept = sorted([*ranked[: max(0, min(heavy, room - len(protected)))], *protected])
    rest = [p for p in positions if p not in kept]
    keys, values, scores = (np.stack([np.asarray(held[p][i]) for p in rest]) for i in range(3))
    sections = [0 if straddle else sum(k < p for k in kept) for p in rest]
    if theta is None:
        theta = largest_theta(keys, sections, room - len(kept), rule)
    merged = []
    for members in merging_sets(keys, sections, theta, rule):
        pivot, key, value = gaussian(keys, values, scores, members, **options)
        merged.append((rest[pivot], (key, value, scores[pivot], sum(held[rest[i]][3] for i in members))))
    merged = sorted(merged, key=lambda entry: (-entry[1][2], entry[0]))[: max(0, (fits or room) - len(kept))]
    return {p: held[p] for p in kept} | dict(merged)


def condense(keys, values, scores, *, budget, **options):
    """{position: (key, value)} of one head after a prompt."""
    held = {p: (*entry, 1) for p, entry in enumerate(zip(keys, values, scores, strict=True))}
    return {p: entry[:2] for p, entry in merge_down(held, len(keys), budget, **options).items()}
