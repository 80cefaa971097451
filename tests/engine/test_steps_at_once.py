"""Programs of several steps: requests get the tokens that they get alone, up to their end and no further."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

import kvjax
from kvjax.decoding.sampling import SamplingMethod
from kvjax.engine import Finish, Handle, device
from kvjax.models import Decoder
from tests.patience import PATIENCE

POLICY = "h2o:budget=12"
MAX_NEW = 12
SIZES = {"rows": 3, "max_prompt": 16, "max_new_tokens": MAX_NEW, "max_end_tokens": 32}


@dataclass(frozen=True)
class Wanted:
    """A request, and what its client does.

    Attributes:
        stop: the token of the answer alone whose text is the stop string; None for no stop string.
        cancel: the number of tokens after which the client cancels; None if it does not.
    """

    prompt: list[int]
    limit: int
    seed: int
    sampler: SamplingMethod
    eos: tuple[int, ...]
    stop: int | None
    cancel: int | None


WANTED = st.builds(
    Wanted,
    prompt=st.lists(st.integers(4, 100), min_size=1, max_size=16),
    limit=st.integers(1, MAX_NEW),
    seed=st.integers(0, 2**32),
    sampler=st.sampled_from([kvjax.Greedy(), kvjax.Sampler(temperature=1.5)]),
    eos=st.sampled_from([(), tuple(range(20, 52))]),
    stop=st.none() | st.integers(0, MAX_NEW - 1),
    cancel=st.none() | st.none() | st.integers(0, MAX_NEW),
)


@dataclass
class Expected:
    """The answer to a request alone, which `generate` computes to its end and plain code cuts."""

    tokens: list[int]
    log_probs: np.ndarray
    text: str
    finish: Finish
    stop: list[str]

    @classmethod
    def of(cls, params: Decoder, one: Wanted, tokenizer: PreTrainedTokenizerFast) -> Expected:
        whole = kvjax.generate(
            params,
            one.prompt,
            policy=POLICY,
            max_new_tokens=MAX_NEW,
            sampler=one.sampler,
            seed=one.seed,
            eos=one.eos,
            log_probs=True,
        )
        tokens = whole.tokens[0, : min(one.limit, whole.lengths[0])].tolist()

        def text(n: int) -> str:
            return tokenizer.decode(tokens[:n], skip_special_tokens=True)

        finish: Finish = "end" if tokens[-1] in one.eos else "length"
        stop = [tokenizer.decode([whole.tokens[0, one.stop]])] if one.stop in range(whole.lengths[0]) else [""]
        said = text(len(tokens))
        special = tokenizer.get_added_vocab().get(stop[0])  # which no text shows
        ends = [n for n, token in enumerate(tokens, 1) if token == special or (stop[0] and stop[0] in text(n))]
        if ends:
            tokens, finish, said = tokens[: ends[0]], "stop", text(ends[0]).partition(stop[0])[0]
        assert whole.log_probs is not None
        return cls(tokens, whole.log_probs[0, : len(tokens)], said, finish, [one for one in stop if one])


@pytest.fixture(scope="module", params=[1, 5])
def engine(
    request: pytest.FixtureRequest, shallow: Decoder, tokenizer: PreTrainedTokenizerFast
) -> Iterator[kvjax.Engine]:
    """Of programs of one step, and of up to five."""
    with kvjax.Engine(shallow, POLICY, **SIZES, tokenizer=tokenizer, steps_at_once=request.param) as engine:
        assert engine.steps_at_once == request.param
        yield engine


@pytest.mark.long
@pytest.mark.slow(first=1)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(requests=st.lists(WANTED, min_size=1, max_size=7))
def test_answers_are_those_of_the_requests_alone(
    engine: kvjax.Engine, shallow: Decoder, tokenizer: PreTrainedTokenizerFast, requests: list[Wanted]
) -> None:
    expected = [Expected.of(shallow, one, tokenizer) for one in requests]
    before = engine.stats()
    handles: list[Handle] = []
    for one, alone in zip(requests, expected, strict=True):
        options = {"max_new_tokens": one.limit, "sampler": one.sampler, "seed": one.seed, "eos": one.eos}
        handles.append(engine.submit(one.prompt, **options, stop=alone.stop, log_probs=True))
    for one, handle in zip(requests, handles, strict=True):
        if one.cancel is not None:
            for _ in zip(range(one.cancel), handle.tokens(), strict=False):
                pass
            handle.cancel()
    answers = [handle.result(timeout=PATIENCE) for handle in handles]
    for one, alone, answer in zip(requests, expected, answers, strict=True):
        count = len(answer.tokens)
        assert answer.tokens.tolist() == alone.tokens[:count]
        np.testing.assert_allclose(answer.log_probs, alone.log_probs[:count], atol=1e-4)
        if one.cancel is None or answer.finish != "cancelled":
            assert (count, answer.text, answer.finish) == (len(alone.tokens), alone.text, alone.finish)
    # What was computed beyond an end is not counted.
    stats, counts = engine.stats(), [len(answer.tokens) for answer in answers]
    assert stats.tokens - before.tokens == sum(counts)
    assert stats.first_token.count - before.first_token.count == np.count_nonzero(counts)
    assert stats.between_tokens.count - before.between_tokens.count == sum(max(0, count - 1) for count in counts)


@pytest.mark.slow
def test_a_program_ends_with_the_first_answer(shallow: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    programs: list[int] = []
    advance = device.Device.advance

    def noted(self: device.Device, wanted: np.ndarray, most: int) -> tuple:
        report, steps = advance(self, wanted, most)
        programs.append(int(steps))
        return report, steps

    with kvjax.Engine(shallow, POLICY, **SIZES, steps_at_once=5) as engine:
        monkeypatch.setattr(device.Device, "advance", noted)
        first = engine.submit([1, 2], max_new_tokens=12, eos=()).result(timeout=PATIENCE)
        # The host starts a program before it knows that the answer has ended.
        assert len(first.tokens) == 12
        assert programs[:3] == [5, 5, 1]
        assert sum(programs) <= 12


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "steps"), [(0.0, 1), (60.0, MAX_NEW)])
def test_steps_at_once_follow_from_their_time(
    shallow: Decoder, monkeypatch: pytest.MonkeyPatch, seconds: float, steps: int
) -> None:
    monkeypatch.setattr(device, "CPU_SECONDS", seconds)
    with kvjax.Engine(shallow, POLICY, **SIZES) as engine:
        assert engine.steps_at_once == steps
        assert len(engine.submit([1], max_new_tokens=7, eos=()).result(timeout=PATIENCE).tokens) == 7
