"""Attention of a first layer, and MorphKV's Algorithm 1 as it is written, in slow float64 NumPy with all rows.

There is no ring of queries, no log-sum-exp and no slots. A kv head is a dictionary of tokens by position, and the rows
of logits and of softmax weights of all queries are stored. A decoder of such heads is the reference of methods that
compare layers.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback


def rotated(x: np.ndarray, position: int, theta: float) -> np.ndarray:
    """RoPE on the last axis, half-split; frequencies in float32 as checkpoints have them."""
    half = x.shape[-1] // 2
    frequencies = (1 / np.float32(theta) ** (np.arange(half, dtype=np.float32) / np.float32(half))).astype(np.float32)
    angle = position * frequencies.astype(np.float64)
    first, second = x[..., :half], x[..., half:]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


@jax.jit
def _unrotated(params, tokens):
    """Queries, keys and values [B, H, N, D] of the first layer."""
    seen = []

    def record(layer, q, k, v, cache):
        seen.extend((q, k, v))
        return q, cache

    params(tokens, record)
    return seen


def attended(params, tokens, size=48):
    """Rotated keys, values and column sums of the attention [H, N, ...] of the first layer, in float64."""
    padded = np.pad(tokens, (0, size - len(tokens)))[None]
    q, k, v = (np.asarray(x[0, :, : len(tokens)], np.float64) for x in _unrotated(params, padded))
    q, k = (np.stack([rotated(x[:, t], t, 1e4) for t in range(len(tokens))], axis=1) for x in (q, k))
    H, N, D = k.shape
    logits = np.einsum("hgnd,hmd->hgnm", q.reshape(H, -1, N, D), k) / np.sqrt(D)
    weights = softmax(np.where(np.tri(N, dtype=bool), logits, -np.inf))
    return k, v, weights.mean(axis=1).sum(axis=1)


class Head:
    """One kv head of one text, with the G query heads that read it."""

    def __init__(self, *, budget=10**9, window=1, fusion="sum", every=1, normalise="full", group="sum", theta=1e4):
        self.budget, self.window, self.every, self.theta = budget, window, every, theta
        self.fusion, self.normalise, self.group = fusion, normalise, group
        self.tokens: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # position -> rotated key, value
        self.rows: dict[int, dict[int, tuple[np.ndarray, np.ndarray]]] = {}  # query -> position -> logits, weights [G]
        self.closest = np.inf  # the smallest relative difference that ever decided between two tokens

    def see(self, position, q, k, v):
        """One token: takes its key and value in, attends with its G queries, and stores the row. Returns [G, D]."""
        self.tokens[position] = rotated(k, position, self.theta), v
        retained = sorted(self.tokens)
        keys = np.stack([self.tokens[p][0] for p in retained])
        values = np.stack([self.tokens[p][1] for p in retained])
        logits = rotated(q, position, self.theta) @ keys.T / np.sqrt(q.shape[-1])
        weights = softmax(logits)
        self.rows[position] = {p: (logits[:, i], weights[:, i]) for i, p in enumerate(retained)}
        return weights @ values

    def ranked(self, now):
        """The distant tokens from the most to the least important, before the token at `now` comes in."""
        distant = sorted(p for p in self.tokens if p < now - self.window)
        votes = []
        for row in range(max(0, now - self.window), now):
            logits = np.stack([self.rows[row][p][0] for p in distant], axis=-1)
            weights = np.stack([self.rows[row][p][1] for p in distant], axis=-1)
            if self.group == "logits":  # released for Llama
                votes.append(softmax(logits.sum(axis=0)))
                continue
            if self.normalise == "distant":
                weights = softmax(logits)
            votes.append(weights.max(axis=0) if self.group == "max" else weights.sum(axis=0))
        importance = np.sum(votes, axis=0) if self.fusion == "sum" else np.max(votes, axis=0)
        return [distant[i] for i in np.argsort(-importance, kind="stable")], np.sort(importance)[::-1]

    def keep(self, now, count):
        """Retains the window and the `count` most important of the distant tokens."""
        ranked, importance = self.ranked(now)
        if 0 < count < len(ranked):
            self.closest = min(self.closest, importance[count - 1] / importance[count] - 1)
        for position in ranked[count:]:
            del self.tokens[position]

    def read(self, q, k, v):
        """A prompt, q [G, N, D], k and v [N, D], compressed at its end. Returns the context [G, N, D]."""
        out = [self.see(t, q[:, t], k[t], v[t]) for t in range(len(k))]
        if len(k) > self.budget:
            self.keep(len(k), self.budget - self.window)
        return np.stack(out, axis=1)

    def decode(self, t, q, k, v):
        """One token, q [G, D], k and v [D]: makes room if the budget is used up, then takes it in and attends."""
        if len(self.tokens) >= self.budget:
            distant = sum(p < t - self.window for p in self.tokens)
            self.keep(t, distant - self.every)
        return self.see(t, q, k, v)


@jax.jit
def _logits(params, tokens):
    """Logits [1, N, V]; `Reader.attend` attends on the host. One program for all readers of a decoder."""

    def attend(layer, q, k, v, cache):
        def host(q, k, v):
            return Reader.attend(layer.index, q, k, v)

        return io_callback(host, jax.ShapeDtypeStruct(q.shape, jnp.float32), q, k, v, ordered=True), cache

    return params.logits(params(tokens, attend)[0])


class Reader:
    """A decoder that reads one text with a Head for each kv head of each layer, and stores every attention row."""

    def __init__(self, params, **options):
        self.params, self.length = params, 0
        config = params.config
        self.heads = [[Head(**options) for _ in range(config.num_kv_heads)] for _ in range(config.num_layers)]

    def read(self, tokens, evict=False):
        """Logits after the last of the tokens; with `evict` each head makes room before it takes a token in."""
        new = len(tokens)

        def attend(index, q, k, v):
            heads = self.heads[index]
            q, k, v = (np.asarray(x[0], np.float64) for x in (q, k, v))
            q = q.reshape(len(heads), -1, *q.shape[1:])
            out = np.zeros(q.shape)
            for i in range(new):
                for h, head in enumerate(heads):
                    see = head.decode if evict else head.see
                    out[h, :, i] = see(self.length + i, q[h, :, i], k[h, i], v[h, i])
            return out.reshape(1, -1, *out.shape[2:]).astype(np.float32)

        Reader.attend = staticmethod(attend)
        padded = np.pad(np.asarray(tokens, np.int32), (0, -new % 16))
        logits = np.asarray(_logits(self.params, padded[None]))[0, new - 1]
        self.length += new
        return logits

    def weights(self, queries, keys):
        """[L, H, G, queries, keys] of the softmax rows of these positions; 0 where nothing was seen."""
        return np.array(
            [
                [np.moveaxis([[self._weight(head, m, c) for c in keys] for m in queries], -1, 0) for head in layer]
                for layer in self.heads
            ]
        )

    def _weight(self, head, query, key):
        row = head.rows[query]
        return row[key][1] if key in row else np.zeros_like(next(iter(row.values()))[1])

    def values(self):
        """[L, H, N, D] of the tokens held, by position."""
        return np.array([[[head.tokens[p][1] for p in sorted(head.tokens)] for head in layer] for layer in self.heads])

    def forget(self, first):
        """Drops the tokens from a position on, as if they had not been read."""
        for head in (head for layer in self.heads for head in layer):
            head.tokens = {p: entry for p, entry in head.tokens.items() if p < first}
        self.length = first

    def retain(self, kept):
        """Retains the tokens at positions kept[layer][head]."""
        for layer, positions in zip(self.heads, kept, strict=True):
            for head, own in zip(layer, positions, strict=True):
                head.tokens = {p: head.tokens[p] for p in own}

    def held(self):
        return [[sorted(head.tokens) for head in layer] for layer in self.heads]
