"""Methods as their papers write them, in slow NumPy on the scores of one row: parts and caches are compared with it."""

from __future__ import annotations

from fractions import Fraction

import numpy as np


def pooled(scores, kind, kernel):
    """Along the last axis; beyond the ends there is 0 for the mean, and nothing for the maximum."""
    if kind == "none":
        return scores
    side = kernel // 2
    padded = np.pad(
        scores, [(0, 0)] * (scores.ndim - 1) + [(side, side)], constant_values=0 if kind == "avg" else -np.inf
    )
    windows = np.lib.stride_tricks.sliding_window_view(padded, kernel, axis=-1)
    return windows.mean(axis=-1) if kind == "avg" else windows.max(axis=-1)


def snapkv(text, window, kind="max", kernel=7, group="mean"):
    """SnapKV's scores [L, H, N] of a text that a `Reader` has read; +inf for the window."""
    n = text.length
    weights = text.weights(range(n - window, n), range(n - window))
    scores = pooled(getattr(weights.mean(axis=-2), group)(axis=2), kind, kernel)
    return np.pad(scores, [(0, 0), (0, 0), (0, window)], constant_values=np.inf)


def best(scores, counts):
    """The positions [L][H] of the `counts` [L, H] largest scores [L, H, N]; of equal ones the earlier."""
    order = np.argsort(-scores, axis=-1, kind="stable")
    return [
        [sorted(own[:n].tolist()) for own, n in zip(layer, counts[i], strict=True)] for i, layer in enumerate(order)
    ]


def adaptive(scores, n, least=0, alpha=0.2, normalise=True, formula="paper"):
    """AdaKV: counts of the heads of one group, whose scores [H, N] are +inf if protected, -inf where there is none."""
    H = len(scores)
    part = Fraction(alpha).limit_denominator(1000)
    weight = [1.0] * H
    free = [sorted((x for x in head if np.isfinite(x)), reverse=True) for head in scores]
    s = [sum(x == np.inf for x in head) for head in scores]
    b = [max(n - own, 0) for own in s]
    if normalise:
        sums = [(sum(head[:own]), sum(head)) for head, own in zip(free, b, strict=True)]
        weight = [np.float32(top) / np.float32(total) if total else 1.0 for top, total in sums]
    safe = max(least, max(1, int(n * part)) if formula == "kvpress" and alpha else 0)
    entries = []
    for h in range(H):
        order = sorted((x for x in scores[h] if x > -np.inf), reverse=True)
        entries += [(np.inf if i < safe else np.float32(x * weight[h]), h, i) for i, x in enumerate(order)]
    if formula == "kvpress":
        top = sorted(entries, key=lambda entry: (-entry[0], entry[1]))[: H * n]
        return [sum(h == own for _, own, _ in top) for h in range(H)]
    entries = [entry for entry in entries if entry[2] >= s[entry[1]]]
    top = sorted(entries, key=lambda entry: (-entry[0], entry[1]))[: sum(b)]
    c = [sum(h == own for _, own, _ in top) for h in range(H)]
    if formula == "code":
        return [s[h] + round((1 - part) * c[h] + int(part * b[h])) for h in range(H)]
    wanted = [part * b[h] + (1 - part) * c[h] for h in range(H)]
    counts = [int(x) for x in wanted]
    last = sorted(range(H), key=lambda h: (counts[h] - wanted[h], h))
    for h in last[: int(sum(wanted)) - sum(counts)]:
        counts[h] += 1
    return [s[h] + counts[h] for h in range(H)]


def apportioned(counts, base, cap, layers, code_rounding):
    """DynamicKV: Z of the layers so far, in exact proportions with the largest remainders up, or as released."""
    n = len(counts)
    if code_rounding:
        heads = sum(counts) // (base * n)  # the layers had all entries that were asked for
        counts = [count // n for count in counts]
        if n == layers:
            counts[-1] += base * heads - sum(counts)
        shares = [int(cap * Fraction(count, sum(counts))) for count in counts]
        given = [int(share // Fraction(sum(shares) or 1, base * layers)) for share in shares]
        given[-1] += base * layers - sum(given)
        return given
    exact = [Fraction(base * layers * count, sum(counts)) for count in counts]
    given = [int(z) for z in exact]
    for i in sorted(range(n), key=lambda i: given[i] - exact[i])[: base * layers - sum(given)]:
        given[i] += 1
    return given


def algorithm_1(scores, base, interval, r_max, code_rounding=False):
    """DynamicKV: buffers [L][H] of positions in order of their scores [L, H, N'], after the last layer."""
    layers, heads, distant = scores.shape
    cap = min(int(r_max * base), distant)
    buffers = []
    for layer in range(layers):
        order = np.argsort(-scores[layer], axis=-1, kind="stable")
        buffers.append([own[:cap].tolist() for own in order])
        done = layer + 1
        if done % interval and done != layers:
            continue
        top = np.argsort(-scores[:done], axis=None, kind="stable")[: base * heads * done]
        counts = np.bincount(top // (heads * distant), minlength=done).tolist()
        for i, z in enumerate(apportioned(counts, base, cap, layers, code_rounding)):
            buffers[i] = [own[:z] for own in buffers[i]]
    return buffers


def two_stages(scores, norms, counts, first=0.5, epsilon=1e-4):
    """CriticalKV: the positions [L][H] that heads retain, given counts [L, H] and norms [L, H, N] of projected values.

    The first share of each head goes by the scores [L, H, N], in which protected entries are +inf, the rest by their
    product with the norms.
    """
    kept = []
    for layer, own_norms, own_counts in zip(scores, norms, counts, strict=True):
        kept.append([])
        for head, norm, count in zip(layer, own_norms, own_counts, strict=True):
            order = np.argsort(-head, kind="stable").tolist()
            chosen = order[: int(first * count + 1e-4)]
            weighed = np.where(np.isinf(head), head, (head + epsilon) * norm)
            rest = [i for i in np.argsort(-weighed, kind="stable").tolist() if i not in chosen and head[i] > -np.inf]
            kept[-1].append(sorted(chosen + rest[: count - len(chosen)]))
    return kept


def projected(params, values, order):
    """The L1 or L2 norms [L, H, G, N] of values [L, H, N, D] behind the output projection of each query head."""
    _, H, _, D = values.shape
    outputs = [
        np.asarray(layer.output, np.float64).reshape(H, -1, D, layer.output.shape[-1])
        for layer in params.attention_layers
    ]
    return np.stack([np.linalg.norm(v[:, None] @ w, ord=order, axis=-1) for v, w in zip(values, outputs, strict=True)])
