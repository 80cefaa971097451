"""Reading a prompt once for many policies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Int

from kvjax.cache import Entries, Layers, bucket
from kvjax.checks import LARGEST, check_params, shown
from kvjax.kv_cache import KVCache, check_cache, held_once
from kvjax.mesh.sharding import fetch
from kvjax.models import Decoder
from kvjax.parts import Fixed
from kvjax.policy import MergesLater, Policy, Score, Texts, Together
from kvjax.policy.suits import check_model
from kvjax.reading.allocate import allocated
from kvjax.reading.layers import read
from kvjax.reading.prompt import Batch
from kvjax.reading.read_each import End, read_to_end, under
from kvjax.reading.replays import check_one_call, replayed
from kvjax.reading.room import grown, occupied_slots, plan_read
from kvjax.request.prompts import Prompt
from kvjax.request.request import Request, as_policy, texts_of
from kvjax.runtime.clock import Clock, clock_of
from kvjax.runtime.modes import in_own_modes, own_modes


@own_modes()
def prefill_each(
    params: Decoder,
    prompt: Prompt,
    *,
    policies: Sequence[Policy | str],
    tokenizer: Any = None,
    cache: KVCache | None = None,
    chunk: int | None = None,
    clock: Clock | None = None,
) -> Iterator[KVCache]:
    """Yields what `prefill` returns under each of several policies; the model reads the prompt once.

    Every score observes the one reading, and each layer is compressed under all policies before the next layer is read.
    The caches of all policies are therefore held at once, except those of a budget that is allocated across layers,
    which are made when they are asked for. For these, all layers stay in full until the last cache is made.

    Args:
        policies: policies, or texts for `policies.parse`, with the same positions and storage.
        prompt, tokenizer, chunk: as `prefill` takes them.
        cache: the beginning of the prompt, from `begin_each` under the same policies.
        clock: adds up the seconds of the reading under "prefill", and those of compiling under "compile".

    Raises:
        ValueError: at the call: for no policies; for policies that do not read alike; for another cache than one of
            `begin_each`; for any cache if a score replays the prompt; and as `prefill` does.
    """
    each, clock = _given(policies), clock_of(clock)
    check_params(params)
    if cache is not None:
        check_cache(cache)
    reading = reading_policy(each)
    if cache is not None and (cache.policy != reading or cache.filled):
        raise ValueError("the cache was not read for these policies: expected one of begin_each with the same policies")
    for policy in each:
        check_one_call(policy, cache is None)
        check_model(policy, params)
    request = Request.of(
        params, prompt, policy=reading, tokenizer=tokenizer, cache=cache, chunk=chunk, compress="never"
    )
    texts = {policy.score: texts_of(policy, tokenizer, params.config.vocab_size) for policy in each}
    return in_own_modes(_Reading(params, request, tuple(each), texts, clock).caches())


@own_modes()
def begin_each(
    params: Decoder,
    prompt: Prompt,
    *,
    policies: Sequence[Policy | str],
    tokenizer: Any = None,
    chunk: int | None = None,
    clock: Clock | None = None,
) -> KVCache:
    """Reads the beginning of several prompts for several policies, which do not compress it yet.

    `prefill_each` reads the rest of each prompt into the cache that this returns, and compresses it.

    Args:
        policies, prompt, tokenizer, chunk, clock: as `prefill_each` takes them.

    Raises:
        ValueError: for no policies, for policies that do not read alike, for a score that replays the prompt, and as
            `prefill` does.
    """
    each, clock = _given(policies), clock_of(clock)
    check_params(params)
    for policy in each:
        check_one_call(policy, False)
        check_model(policy, params)
    request = Request.of(
        params, prompt, policy=reading_policy(each), tokenizer=tokenizer, chunk=chunk, compress="never"
    )
    return _Reading(params, request, tuple(each), {}, clock).begun()


def reading_policy(policies: Sequence[Policy]) -> Policy:
    """The policy under which a prompt is read for several ones, which must read alike: it retains everything.

    Raises:
        ValueError: for policies that differ in their positions or storage.
    """
    first, *others = policies
    for other in others:
        for name in ("positions", "storage"):
            ours, theirs = getattr(first, name), getattr(other, name)
            if ours != theirs:
                raise ValueError(
                    f"policies that differ in their {name} ({ours} and {theirs}) do not read a prompt alike; expected "
                    "the same for all"
                )
    return Policy(
        score=together(policies),
        budget=Fixed(LARGEST),
        merge=MergesLater(tuple(dict.fromkeys(policy.merge for policy in policies))),
        positions=first.positions,
        storage=first.storage,
    )


def together(policies: Sequence[Policy]) -> Together:
    """The scores of several policies, each once."""
    return Together(tuple(dict.fromkeys(policy.score for policy in policies)))


def _given(policies: Any) -> list[Policy]:
    """The policies, of which each may be a text. Raises ValueError."""
    if isinstance(policies, str) or not isinstance(policies, Sequence):
        raise ValueError(f"policies={shown(policies)}: expected a list of policies or texts")
    if not policies:
        raise ValueError(f"policies={shown(policies)}: expected at least one policy")
    each = [policy for policy in map(as_policy, policies) if policy is not None]
    if len(each) < len(policies):
        raise ValueError("policies has None in it: expected a list of policies or texts")
    return each


@dataclass(frozen=True)
class _Reading:
    """A checked request that is read for several policies.

    Attributes:
        texts: the token ids of the texts that each score replays.
    """

    params: Decoder
    request: Request
    policies: tuple[Policy, ...]
    texts: Mapping[Score, Texts]
    clock: Clock

    @property
    def together(self) -> Together:
        """The scores and budgets that observe the prompt."""
        return together(self.policies)

    def _run(self, *args: Any, **options: Any) -> Any:
        return self.clock.run("prefill", *args, **options)

    def begun(self) -> KVCache:
        """The cache of the whole request, uncompressed."""
        return self._appended(self.request.batch.chunks(self.request.chunk))

    def caches(self) -> Iterator[KVCache]:
        """The compressed caches. Nothing is computed before the first one is asked for."""
        *before, last = self.request.batch.chunks(self.request.chunk)
        tokens, lengths = last.arrays
        cache = self._appended(before)
        ends = [self._end(policy, cache, lengths, tokens.shape[1]) for policy in self._ends()]
        entries, recurrent = self._run(
            read_to_end, self.params, cache, tokens, lengths, together=self.together, ends=ends
        )
        cache = replace(cache, recurrent=recurrent)
        made = {end.policy: self._made(end, cache, lengths, layers) for end, layers in zip(ends, entries, strict=True)}
        del entries
        replays: dict[Score, Entries] = {}
        for i, policy in enumerate(self.policies):
            if policy.allocates:
                yield self._allocated(policy, made[cache.policy], replays)
            else:
                yield made[policy] if policy in self.policies[i + 1 :] else made.pop(policy)

    def _ends(self) -> list[Policy]:
        """The policies that compress each layer when it has been read, and the reading's own if layers must stay."""
        each = list(dict.fromkeys(self.policies))
        stays = any(policy.allocates for policy in each)
        return [policy for policy in each if not policy.allocates] + [self.request.cache.policy] * stays

    def _appended(self, chunks: Sequence[Batch]) -> KVCache:
        """The cache of the request with some chunks appended to it."""
        cache = self.request.cache
        occupied, new = occupied_slots(cache), sum(chunk.tokens.shape[1] for chunk in chunks)
        if not chunks:
            return cache
        plan = plan_read(cache, occupied, new=new, room=0, compress=False, final=False)
        if any(occupied):  # the first chunk of a prompt has no slots to attend to
            cache = grown(cache, size=plan.slots)
        for chunk in chunks:
            tokens, lengths = map(cache.put_rows, chunk.arrays)
            _, cache = self._run(read, self.params, cache, tokens, lengths, plan=plan)
        return cache

    def _end(self, policy: Policy, cache: KVCache, lengths: Int[np.ndarray, "B"], new: int) -> End:
        """Returns how the prompt ends under a policy."""
        layers = len(cache.entries)
        total = fetch(cache.length) + lengths
        kept = tuple(policy.slots(i, bucket(int(total.max())), layers) for i in range(layers))
        final = policy is not cache.policy
        under = replace(cache, policy=policy, kept=kept)
        return End(policy, plan_read(under, occupied_slots(cache), new=new, room=0, compress=final, final=final))

    def _made(self, end: End, cache: KVCache, lengths: Int[np.ndarray, "B"], layers: Layers) -> KVCache:
        """The cache of the prompt under a policy."""
        return replace(
            cache,
            entries=held_once(layers, self.params.config, end.policy),
            length=cache.length + cache.put_rows(lengths),
            policy=end.policy,
            kept=end.plan.kept,
            filled=end.plan.final,
        )

    def _allocated(self, policy: Policy, whole: KVCache, replays: dict[Score, Entries]) -> KVCache:
        """The cache under a policy that compares all layers.

        Args:
            whole: the uncompressed cache, with the states of all scores.
            replays: the entries of the last score that was asked for, after its replays; this changes it.
        """
        size = bucket(int(np.max(fetch(whole.length))))
        made = KVCache.empty(self.params.config, policy, whole.length, size, whole.dtype, whole.mesh)
        made = replace(made, length=whole.length, rope=whole.rope, recurrent=whole.recurrent)
        score = policy.score
        if score not in replays:
            replays.clear()
            own = replace(made, entries=Layers(tuple(self.together.only(score, layer) for layer in whole.entries)))
            tokens, lengths = map(made.put_rows, self.request.batch.arrays)
            replays[score] = self._run(replayed, self.params, own, tokens, lengths, self.texts[score]).entries
        layers = Layers(
            tuple(
                under(policy, layer, capacity=empty.capacity, merging=empty.merging)
                for layer, empty in zip(replays[score], made.entries, strict=True)
            )
        )
        entries = held_once(layers, self.params.config, policy)
        return self._run(allocated, self.params, replace(made, entries=entries), room=0, begins=True)
