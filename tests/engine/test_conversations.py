"""Conversations: a later turn gets the tokens of `generate` with the cache of the turn before, and edits are misses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.engine import Answer, TooLongError
from kvjax.models import Decoder
from tests.engine.test_tokens import KINDS
from tests.patience import PATIENCE
from tests.products import part
from tests.tiny import decoder, hybrid

SIZES = {"rows": 2, "max_prompt": 24, "max_new_tokens": 128, "chunk": 16, "conversation_memory": "10MB"}
ASKED: dict[str, Any] = {"max_new_tokens": 9, "eos": ()}
POOLS = ("adakv", "kvzip")  # of which a turn has one chunk at most
RNG = np.random.default_rng(4)


def some(count: int, vocab: int = 101) -> list[int]:
    return RNG.integers(0, vocab, count).tolist()


def check(
    params: Decoder, policy: str, lengths: Sequence[int], reference: Decoder | None = None, **options: Any
) -> None:
    """Answers a dialogue turn by turn, whose prompts repeat what was said, and compares it with `generate`.

    Args:
        lengths: the number of new tokens of each turn.
        reference: the same model, if `generate` runs on other devices.
        options: more arguments of the engine.
    """
    asked = ASKED | {"sampler": kvjax.Sampler(temperature=0.9), "seed": 3}
    with kvjax.Engine(params, policy, **SIZES, **options) as engine:
        said: list[int] = []
        cache = None
        for length in lengths:
            new = some(length, params.config.vocab_size)
            answer = engine.submit(said + new, **asked).result(timeout=PATIENCE)
            alone = kvjax.generate(reference or params, new, policy=policy, cache=cache, **asked)
            assert answer.tokens.tolist() == alone.tokens[0].tolist()
            assert answer.cached_tokens == max(0, len(said) - 1)
            assert answer.prompt_tokens == len(said) + length
            said += [*new, *answer.tokens.tolist()]
            cache = alone.cache
        stats = engine.stats()
    assert len(said) > SIZES["max_prompt"]
    assert (stats.conversations.hits, stats.conversations.misses) == (len(lengths) - 1, 1)
    assert (stats.conversations.device_nbytes > 0) == bool(options)
    assert stats.conversations.nbytes + stats.conversations.device_nbytes > 0
    assert 0 < stats.cached_tokens < stats.prompt_tokens


POLICIES = [*KINDS, "keydiff:budget=12,recent=4,every=2", "snapkv:budget=12,window=4", "streaming_llm:budget=12"]
CHOSEN = ["full", "morphkv:budget=12,window=4,every=4", "snapkv:budget=12,window=4"]


@pytest.mark.long
@pytest.mark.parametrize("policy", part(POLICIES, CHOSEN))
def test_turns_are_those_of_generate(policy: str, tiny: Decoder, shallow: Decoder) -> None:
    """A turn has one chunk or two."""
    pool = policy.startswith(POOLS)
    check(tiny if pool or policy.startswith("quantize") else shallow, policy, [13, 1, 9] if pool else [20, 1, 18])


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["h2o:budget=12", "keydiff:budget=12"])
def test_turns_with_recurrent_layers(policy: str) -> None:
    check(hybrid(), policy, [20, 1, 18])


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["full", "morphkv:budget=12,window=4"])
def test_turns_with_sliding_windows(policy: str) -> None:
    check(decoder(windows=(None, 8)), policy, [20, 1, 18])


@pytest.mark.long
@pytest.mark.parametrize(
    "policy", ["adakv:base=h2o,base.budget=12,groups=2", pytest.param("h2o:budget=12", marks=pytest.mark.slow)]
)
def test_turns_on_a_mesh(policy: str, tiny: Decoder) -> None:
    params = kvjax.shard(tiny, kvjax.make_mesh(2, 2, devices=jax.devices()[:4]))
    check(params, policy, [13, 1, 9], reference=tiny)
    check(params, policy, [13, 1, 9], reference=tiny, conversation_device_memory="1MB")


@pytest.mark.long
def test_conversations_that_stay_on_the_device(shallow: Decoder, compiled: list[str]) -> None:
    """Two stay, and each can be continued twice. The third goes to the host, and so does the oldest turn."""
    policy, expected = "h2o:budget=12", dict[tuple[int, ...], list[int]]()
    dialogues = []
    for first in (some(8), some(8), some(8)):
        begun = kvjax.generate(shallow, first, policy=policy, **ASKED)
        said = [*first, *begun.tokens[0].tolist()]
        for new in ([3, 4], [5, 6, 7]):
            turn = kvjax.generate(shallow, new, policy=policy, cache=begun.cache, **ASKED)
            expected[*said, *new] = turn.tokens[0].tolist()
        dialogues.append((first, said))
    with kvjax.Engine(shallow, policy, **SIZES) as engine:
        without = engine.footprint
        row = engine.stats().cache_bytes // SIZES["rows"]
    with kvjax.Engine(shallow, policy, **SIZES, conversation_device_memory=3 * row - 1) as engine:
        assert 2 * row - 100 <= engine.footprint.prompt - without.prompt <= 2 * row
        compiled.clear()
        for first, said in dialogues:
            answer = engine.submit(first, **ASKED).result(timeout=PATIENCE)
            assert [*first, *answer.tokens.tolist()] == said
        counts = engine.stats().conversations
        assert counts.device_nbytes == 2 * counts.nbytes > 0
        for _, said in reversed(dialogues):
            for new in ([3, 4], [5, 6, 7]):  # the first continuation leaves the kept cache as it is
                answer = engine.submit([*said, *new], **ASKED).result(timeout=PATIENCE)
                assert (answer.tokens.tolist(), answer.cached_tokens) == (expected[*said, *new], len(said) - 1)
        counts = engine.stats().conversations
        assert (counts.hits, counts.misses, counts.device_nbytes * 7) == (6, 3, counts.nbytes * 2)
        assert compiled == []


@pytest.mark.long
def test_what_continues_nothing_is_read_from_its_beginning(shallow: Decoder, compiled: list[str]) -> None:
    policy = "h2o:budget=12"

    def alone(tokens: list[int], cache: Any = None) -> kvjax.Generation:
        return kvjax.generate(shallow, tokens, policy=policy, cache=cache, **ASKED)

    first, more = some(8), some(4)
    begun = alone(first)
    said = [*first, *begun.tokens[0].tolist()]
    edited = [*said[:3], (said[3] + 1) % 101, *said[4:], *more]
    expected = {
        "continued": alone(more, begun.cache),
        "edited": alone(edited),
        "whole": alone([*said, *more]),
        "same": alone(said),
    }
    with kvjax.Engine(shallow, policy, **SIZES) as engine:
        compiled.clear()

        def ask(tokens: list[int], **options: Any) -> Answer:
            return engine.submit(tokens, **ASKED, **options).result(timeout=PATIENCE)

        def same(answer: Answer, name: str, cached: int) -> bool:
            return (answer.tokens.tolist(), answer.cached_tokens) == (expected[name].tokens[0].tolist(), cached)

        assert ask(first).tokens.tolist() == begun.tokens[0].tolist()
        assert same(ask(edited), "edited", 0)
        assert same(ask([*said, *more], reuse=False), "whole", 0)
        assert same(ask(said), "same", 0)  # it has no new token
        assert same(ask([*said, *more]), "continued", len(said) - 1)
        assert same(ask([*said, *more]), "continued", len(said) - 1)  # as if the answer was not liked
        answer = ask([*said, *more, *expected["continued"].tokens[0].tolist(), 5])
        assert answer.cached_tokens == len(said) + len(more) + 9 - 1  # of the longest
        counts = engine.stats().conversations
        assert (counts.hits, counts.misses) == (3, 3)
        assert compiled == []
        with pytest.raises(TooLongError, match="the prompt has 25 tokens: expected at most max_prompt=24"):
            engine.submit([*edited, *some(4)])
        with pytest.raises(TooLongError, match="the prompt has 25 tokens: expected at most max_prompt=24"):
            engine.submit([*said, *more, *some(4)], reuse=False)
        with pytest.raises(ValueError, match="reuse=1: expected True or False"):
            engine.submit(said, reuse=1)


@pytest.mark.slow
def test_a_turn_without_room_is_read_from_its_beginning(shallow: Decoder) -> None:
    """Rows of a policy that compresses prompts alone have room for one answer of the longest kind."""
    policy, asked = "snapkv:budget=12,window=4", {"max_new_tokens": 60, "eos": ()}
    with kvjax.Engine(shallow, policy, **{**SIZES, "max_prompt": 96, "max_new_tokens": 60}) as engine:
        answer = engine.submit([5, 6, 7], **asked).result(timeout=PATIENCE)
        said = [5, 6, 7, *answer.tokens.tolist(), 8]
        again = engine.submit(said, **asked).result(timeout=PATIENCE)
        short = engine.submit(said, max_new_tokens=2, eos=()).result(timeout=PATIENCE)
    assert (again.cached_tokens, short.cached_tokens) == (0, 62)
    alone = kvjax.generate(shallow, said, policy=policy, **asked)
    assert again.tokens.tolist() == alone.tokens[0].tolist()


@pytest.mark.slow
def test_stored_prefixes_are_found_by_their_tokens(shallow: Decoder) -> None:
    policy, document, question = "keydiff:budget=12", some(20), some(5)
    with kvjax.Engine(shallow, policy, **SIZES, prefix_memory="1MB") as engine:
        first = engine.submit(question, prefix=document, **ASKED).result(timeout=PATIENCE)
        assert first.cached_tokens == 0
        found = engine.submit([*document, 7, 8], **ASKED).result(timeout=PATIENCE)
        said = [*question, *first.tokens.tolist(), 9]
        later = engine.submit(said, prefix=document, **ASKED).result(timeout=PATIENCE)
        again = engine.submit(question, prefix=document, **ASKED, reuse=False).result(timeout=PATIENCE)
        stats = engine.stats()
    read = kvjax.prefill(shallow, document, policy=policy)
    assert found.cached_tokens == again.cached_tokens == 20
    assert found.tokens.tolist() == kvjax.generate(shallow, [7, 8], cache=read, **ASKED).tokens[0].tolist()
    assert again.tokens.tolist() == first.tokens.tolist()
    begun = kvjax.generate(shallow, question, cache=read, **ASKED)
    assert later.cached_tokens == 20 + 5 + 9 - 1
    assert later.tokens.tolist() == kvjax.generate(shallow, [9], cache=begun.cache, **ASKED).tokens[0].tolist()
    assert (stats.prefixes.hits, stats.prefixes.misses) == (2, 1)
    assert stats.conversations.hits == 1


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["h2o:budget=12", "streaming_llm:budget=12,positions=in_cache"])
def test_a_conversation_ends_where_the_positions_of_the_model_do(policy: str, shallow: Decoder) -> None:
    """Unless the policy rotates keys by their place."""
    params = Decoder(replace(shallow.config, max_positions=40), nnx.Rngs(0))
    said = some(20)
    with kvjax.Engine(params, policy, **{**SIZES, "max_new_tokens": 12}) as engine:
        for cached in (0, 28):
            answer = engine.submit(said, **ASKED).result(timeout=PATIENCE)
            assert answer.cached_tokens == cached
            said += [*answer.tokens.tolist(), 1]
        if "in_cache" in policy:
            assert engine.submit(said, **ASKED).result(timeout=PATIENCE).cached_tokens == 38
        else:
            with pytest.raises(TooLongError, match="the prompt has 40 tokens: expected at most max_prompt=24"):
                engine.submit(said, **ASKED)


def test_memory_must_hold_one_conversation(shallow: Decoder) -> None:
    with pytest.raises(ValueError, match=r"conversation_memory='1kB': expected at least [\d,]+ bytes, which one"):
        kvjax.Engine(shallow, "h2o:budget=12", **{**SIZES, "conversation_memory": "1kB"})
    with pytest.raises(ValueError, match="conversation_memory='much': expected a number and one of B"):
        kvjax.Engine(shallow, "h2o:budget=12", **{**SIZES, "conversation_memory": "much"})
    with pytest.raises(
        ValueError, match=r"conversation_device_memory='1kB': expected at least [\d,]+ bytes, which one"
    ):
        kvjax.Engine(shallow, "h2o:budget=12", **SIZES, conversation_device_memory="1kB")
    with pytest.raises(ValueError, match="conversation_device_memory='1MB' without conversation_memory: expected both"):
        kvjax.Engine(
            shallow, "h2o:budget=12", **{**SIZES, "conversation_memory": None}, conversation_device_memory="1MB"
        )
    with pytest.raises(ValueError, match=r"rows=2 take [\d,]+ bytes per device"):
        kvjax.Engine(shallow, "h2o:budget=12", **SIZES, memory="10MB", conversation_device_memory="10MB")
