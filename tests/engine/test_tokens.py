"""The tokens of a request are those of `kvjax.generate` alone, in whatever company, order and row."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.models import Decoder, Mixture
from kvjax.models.rope import DynamicScaling, Rope
from tests.conftest import POLICIES
from tests.engine.traffic import GREEDY, MAX_NEW, MAX_PROMPT, MIXED, Asked, run
from tests.patience import PATIENCE
from tests.products import part
from tests.tiny import decoder

KINDS = {
    "full": "slots that grow",
    "morphkv:budget=12,window=4,every=4": "constant slots",
    "morphkv:budget=24,window=16": "earlier queries that are asked again",
    "quantize:policy=pyramidkv,policy.budget=12,policy.window=4,policy.beta=2,bits=8": "layer budgets, quantised",
    "think:base=snapkv,base.budget=12,base.window=4,ratio=0.5,window=4,recent=3": "slots beside thin keys",
    "zipcache:base=snapkv,base.budget=12,base.window=4,window=4,queries=3": "slots beside codes",
    "adakv:base=h2o,base.budget=12,groups=2": "segments that evict, shown whole",
    "kvzip:budget=12,score.chunk=16,score.instruction='',score.starting='',score.suffix='',groups=2": "replays",
}


def check(
    params: Decoder,
    policy: str,
    samplers: tuple[kvjax.SamplingMethod, ...],
    *,
    requests: int,
    rows: int,
    reference: Decoder | None = None,
    longest: int = MAX_PROMPT,
) -> None:
    """Answers random requests twice, in other orders, and compares with each request alone.

    Args:
        reference: the same model, if each request alone runs on other devices.
        longest: the most tokens of a prompt.
    """
    rng = np.random.default_rng(1)
    asked = [Asked.at_random(rng, params.config.vocab_size, samplers, longest) for _ in range(requests)]
    with kvjax.Engine(
        params,
        policy,
        rows=rows,
        max_prompt=longest,
        max_new_tokens=MAX_NEW,
        chunk=16,
        max_end_tokens=32,
        steps_at_once=5,
    ) as engine:
        runs = [run(engine, some, rng) for some in (asked, asked[::-1])]
        answers = [[handle.result(timeout=PATIENCE) for handle in handles] for handles in runs]
    finishes = set()
    for one, *both in zip(asked, answers[0], answers[1][::-1], strict=True):
        alone = one.alone(reference or params, policy)
        for answer in both:
            finishes.add(answer.finish)
            n = len(answer.tokens)
            if answer.finish != "cancelled":
                assert n == alone.lengths[0]
                assert (answer.finish == "end") == (alone.tokens[0, -1] in one.eos)
            assert answer.tokens.tolist() == alone.tokens[0, :n].tolist()
            assert alone.log_probs is not None
            np.testing.assert_allclose(answer.log_probs, alone.log_probs[0, :n], atol=1e-4)
    assert {"length", "end"} <= finishes


@pytest.mark.long
@pytest.mark.slow(first=2)
@pytest.mark.parametrize("policy", part([*KINDS, *POLICIES[1:]], KINDS))
def test_tokens_are_those_of_the_request_alone(policy: str, tiny: Decoder, shallow: Decoder) -> None:
    by_layer = policy.startswith(("quantize", "pyramidkv", "adakv", "dynamickv", "kvcompose", "kvzip", "kvgrad"))
    samplers = MIXED if policy.startswith("morphkv") else GREEDY
    longest = 44 if policy == "full" else MAX_PROMPT  # of three chunks, of which the one between is full
    check(tiny if by_layer else shallow, policy, samplers, requests=16, rows=3, longest=longest)


@pytest.mark.slow
def test_rows_keep_the_rope_of_their_own_prompt(shallow: Decoder) -> None:
    rope = replace(shallow.config.rope, scaling=DynamicScaling(4.0, 12))
    params = Decoder(replace(shallow.config, rope=rope, windows=(None, 8)), nnx.Rngs(0))
    assert isinstance(rope, Rope)
    assert rope.depends_on_length
    check(params, "snapkv:budget=12,window=4", GREEDY, requests=16, rows=2)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_tokens_of_a_mixture_of_experts() -> None:
    """The requests in company choose experts of their own, and so does what an empty row holds."""
    check(
        decoder(mixture=Mixture(experts=6, per_token=2, size=24)),
        "morphkv:budget=12,window=4",
        GREEDY,
        requests=6,
        rows=3,
    )
