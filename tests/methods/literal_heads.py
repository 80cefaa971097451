"""Heads written from the papers in float64 NumPy, and a decoder made of them: the reference of a whole generation.

They have the interface of `tests.methods.reference.Head`: `see` takes a token in and attends, `decode` makes room
first, `close` compresses at the end of a prompt or a turn.
"""

from __future__ import annotations

import numpy as np

from tests.methods.reference import Head, Reader, rotated, softmax


class SlidingHead(Head):
    """MorphKV's head in a layer whose queries see the last `sight` tokens only."""

    def __init__(self, *, sight=None, **options):
        super().__init__(**options)
        self.sight = sight

    def see(self, position, q, k, v):
        self.expire(position)
        return super().see(position, q, k, v)

    def decode(self, t, q, k, v):
        self.expire(t)
        return super().decode(t, q, k, v)

    def close(self, now):
        self.expire(now)
        if len(self.tokens) > self.budget:
            self.keep(now, self.budget - self.window)

    def expire(self, now):
        if self.sight is not None:
            for position in [p for p in self.tokens if p <= now - self.sight]:
                del self.tokens[position]


class AccumulatingHead:
    """H2O and Keyformer: a token's score is the sum over queries of softmax((logits + noise) / tau), group mean.

    Args:
        noise: (query position, key positions) -> [G, keys].
        tau: the number of decoded tokens -> the temperature.
    """

    def __init__(self, *, budget, recent, sinks=0, every=1, noise=lambda query, keys: 0.0, tau=lambda decoded: 1.0):
        self.budget, self.recent, self.sinks, self.every = budget, recent, sinks, every
        self.noise, self.tau, self.decoded = noise, tau, 0
        self.tokens: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.sums: dict[int, float] = {}

    def see(self, position, q, k, v):
        self.tokens[position], self.sums[position] = (rotated(k, position, 1e4), v), 0.0
        held = np.array(sorted(self.tokens))
        keys, values = (np.stack([self.tokens[p][i] for p in held]) for i in (0, 1))
        logits = rotated(q, position, 1e4) @ keys.T / np.sqrt(q.shape[-1])
        received = softmax((logits + self.noise(position, held)) / self.tau(self.decoded)).mean(axis=0)
        for p, weight in zip(held, received, strict=True):
            self.sums[p] += weight
        return softmax(logits) @ values

    def decode(self, t, q, k, v):
        if len(self.tokens) >= self.budget:
            self.evict(t, self.every)
        self.decoded += 1
        return self.see(t, q, k, v)

    def close(self, now):
        self.evict(now, len(self.tokens) - self.budget)

    def evict(self, now, count):
        """Drops the smallest sums among the tokens that are neither sinks nor recent."""
        old = sorted((p for p in self.tokens if self.sinks <= p < now - self.recent), key=lambda p: self.sums[p])
        for position in old[: max(0, count)]:
            del self.tokens[position], self.sums[position]


class Generation(Reader):
    """A decoder that reads one text and decodes, with a literal head for each kv head of each layer."""

    def __init__(self, params, make):
        """`make(layer, head)` is the head."""
        super().__init__(params)
        config = params.config
        self.heads = [[make(i, h) for h in range(config.num_kv_heads)] for i in range(config.num_layers)]

    def prompt(self, tokens):
        """Reads a prompt or a turn, compresses, and returns the logits after the last token."""
        logits = self.read(tokens)
        for layer in self.heads:
            for head in layer:
                head.close(self.length)
        return logits

    def decode(self, token):
        """The logits after one more token."""
        return self.read([token], evict=True)
