"""Requests that come and go at random, and what each of them is answered alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import kvjax
from kvjax.decoding.sampling import SamplingMethod
from kvjax.engine import Handle
from kvjax.models import Decoder

MAX_PROMPT, MAX_NEW = 28, 12
GREEDY = (kvjax.Greedy(),)
MIXED = (
    kvjax.Greedy(),
    kvjax.Greedy(repetition_penalty=1.4),
    kvjax.Sampler(temperature=0.6, top_k=7),
    kvjax.Sampler(temperature=1.5, top_p=0.8, min_p=0.02, repetition_penalty=1.2),
)


@dataclass(frozen=True)
class Asked:
    """A request, as `kvjax.generate` and `Engine.submit` take it."""

    prompt: tuple[int, ...]
    limit: int
    seed: int
    sampler: SamplingMethod
    eos: tuple[int, ...]

    @classmethod
    def at_random(
        cls, rng: np.random.Generator, vocab: int, samplers: tuple[SamplingMethod, ...], longest: int = MAX_PROMPT
    ) -> Asked:
        """Prompts of up to `longest` tokens, of which one in eight is as short or as long as it may be."""
        length = int(rng.choice([1, longest, *rng.integers(1, longest + 1, 14)]))
        limit = int(rng.choice([1, *rng.integers(1, MAX_NEW + 1, 7)]))
        prompt = tuple(rng.integers(0, vocab, length).tolist())
        eos = tuple(rng.integers(0, vocab, rng.choice([0, 32])).tolist())
        return cls(prompt, limit, int(rng.integers(-(2**63), 2**63)), samplers[rng.integers(len(samplers))], eos)

    def submit(self, engine: kvjax.Engine) -> Handle:
        return engine.submit(
            list(self.prompt),
            max_new_tokens=self.limit,
            sampler=self.sampler,
            seed=self.seed,
            eos=self.eos,
            log_probs=True,
        )

    def alone(self, params: Decoder, policy: kvjax.Policy | str) -> kvjax.Generation:
        return kvjax.generate(
            params,
            list(self.prompt),
            policy=policy,
            max_new_tokens=self.limit,
            sampler=self.sampler,
            seed=self.seed,
            eos=self.eos,
            log_probs=True,
        )


def run(engine: kvjax.Engine, asked: list[Asked], rng: np.random.Generator) -> list[Handle]:
    """Submits requests in random groups, waits for a random part of some, and cancels about one in five."""
    handles: list[Handle] = []
    waiting = list(asked)
    while waiting:
        group = int(rng.integers(1, 6))
        handles += [one.submit(engine) for one in waiting[:group]]
        waiting = waiting[group:]
        for handle in rng.permutation(np.arange(len(handles)))[: rng.integers(0, 3)]:
            tokens, wanted = handles[handle].tokens(), int(rng.integers(0, MAX_NEW))
            for _, _ in zip(range(wanted), tokens, strict=False):
                pass
            if rng.random() < 0.5:
                handles[handle].cancel()
    return handles
