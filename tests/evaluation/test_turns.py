"""Policies that take decode steps together answer as each does alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

import kvjax
from kvjax.decoding.sampling import Greedy, Sampler, SamplingMethod
from kvjax.evaluation.asking import Asker
from kvjax.evaluation.batches import batches, readings
from kvjax.evaluation.lines import decoding_speed
from kvjax.evaluation.tasks.vocabulary import WORDS, tokenizer
from kvjax.evaluation.turns import Group, Turn, Waiting
from kvjax.policies import parse
from tests.evaluation.test_asking import item
from tests.policy.presets import ALL, DISTINCT, decoder
from tests.products import part
from tests.tiny import VOCAB
from tests.tiny import decoder as tiny_decoder

TEXTS = (
    "full",
    "snapkv:budget=0.5,window=4",
    "knorm:budget=0.5",
    "tova:budget=0.5,every=None",
    "adakv:base=snapkv,base.budget=0.5,base.window=4",
    "adakv:base=expected_attention,base.budget=0.5",
    "knorm:budget=0.25",
    "kvzip:budget=0.5",
    "morphkv:budget=12,window=4",
)
GREEDY = Greedy()
ITEMS = [item("a", 41, 5, 9), item("b", 47, 12, 3), item("c", 33, 4, 10)]  # of one batch


def evicts_nothing(spec: str) -> bool:
    """Returns whether decoding under a policy evicts nothing."""
    return parse(spec).every is None


def answered(
    rows: int | None, texts: Sequence[str], sampler: SamplingMethod = GREEDY, data: int = 1
) -> dict[int, list]:
    """Tokens and facts of each answer under each policy, on a mesh of `data` x 1 devices."""
    params = tiny_decoder(vocab=len(WORDS))
    if data > 1:
        params = kvjax.shard(params, kvjax.make_mesh(data=data, model=1))
    ask = Asker(params, tokenizer(), sampler, rows=rows)
    (batch,), found = batches(readings(ITEMS, "after"), lambda _: 4), {}
    for i, answers, took in ask(batch, [parse(text) for text in texts]):
        found[i] = [[(a.tokens, a.text, a.kept, a.kv_bytes) for a in mine] for mine in answers]
        assert all(a.kv_bytes <= a.kv_bytes_end for mine in answers for a in mine)
        assert (took.together > 1) <= (rows is not None)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("sampler", [Greedy(), Sampler(temperature=1.0)])
def test_answers_do_not_depend_on_the_rows_of_a_step(sampler: SamplingMethod) -> None:
    apart = answered(None, TEXTS, sampler)
    assert list(apart) == list(range(len(TEXTS)))
    for rows in (8, 64):
        together = answered(rows, TEXTS, sampler)
        assert sorted(together) == list(apart)
        assert all(together[i] == apart[i] for i in apart), rows


@pytest.mark.slow
def test_rows_of_a_mesh_take_steps_together() -> None:
    texts = TEXTS[:2] + TEXTS[4:6]
    assert answered(64, texts, data=2) == answered(None, texts)


@pytest.mark.slow
@pytest.mark.parametrize("spec", part(filter(evicts_nothing, ALL), filter(evicts_nothing, DISTINCT)))
def test_a_cache_that_evicts_nothing_any_more_decodes_as_under_its_policy(spec: str) -> None:
    params = decoder(spec)
    prompt = np.random.default_rng(0).integers(0, VOCAB, (2, 24)).astype(np.int32)
    cache = kvjax.prefill(params, prompt, policy=spec)
    group = Waiting(None).add(Turn(0, 0, (), ()), cache)
    assert isinstance(group, Group)
    mine, alike = (
        kvjax.generate(params, prompt[:, :3], cache=one, max_new_tokens=8, eos=(), log_probs=True)
        for one in (cache, group.joined())
    )
    assert mine.log_probs is not None
    assert alike.log_probs is not None
    np.testing.assert_array_equal(mine.tokens, alike.tokens)
    np.testing.assert_array_equal(mine.log_probs, alike.log_probs)


@pytest.mark.long
def test_caches_of_equal_shapes_form_groups() -> None:
    params = tiny_decoder(vocab=len(WORDS))
    prompt = np.arange(48, dtype=np.int32).reshape(2, 24)
    waiting, full = Waiting(6), []
    texts = ["knorm:budget=12", "full", "snapkv:budget=12,window=4", "tova:budget=12", "knorm:budget=12,recent=3"]
    for i, text in enumerate(texts):
        group = waiting.add(Turn(i, 0, (), ()), kvjax.prefill(params, prompt, policy=text))
        if group is not None:
            full.append([turn.policy for turn in group.turns])
            assert group.joined().batch_size == 2 * len(group.turns)
            assert group.caches == []
    assert full == [[0, 2, 4]]
    assert [[turn.policy for turn in group.turns] for group in waiting.rest()] == [[1], [3]]
    assert waiting.groups == {}


def test_a_decoding_speed_is_that_of_one_policy() -> None:
    alone = {"decode_seconds": 2.0, "decoded_tokens": 10, "together": 1}
    assert decoding_speed([alone, {"decode_seconds": 1.0, "decoded_tokens": 100, "together": 3}]) == 5
    assert decoding_speed([{"decode_seconds": 1.0, "decoded_tokens": 100, "together": 3}]) is None
