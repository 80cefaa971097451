"""Asks a real, tiny model: answers equal those of each question alone, and few programs are compiled."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.decoding.sampling import Greedy, Sampler
from kvjax.evaluation.asking import Answers, Asker
from kvjax.evaluation.batches import Reading, ReadingBatch, batches, readings
from kvjax.evaluation.entries import Setting
from kvjax.evaluation.items import Item
from kvjax.evaluation.tasks.task import Example, Question
from kvjax.evaluation.tasks.vocabulary import WORDS, tokenizer
from kvjax.models import Decoder
from kvjax.policies import parse
from tests.evaluation.words import Words, exact
from tests.products import part
from tests.tiny import decoder, left_pad

END = 2
EXTEND = jax.jit(kvjax.extend)


@pytest.fixture(scope="module")
def params() -> Decoder:
    return decoder(vocab=len(WORDS))


def item(name: str, context: int, *questions: int, new_tokens: int = 6) -> Item:
    """An item of random words; `context` and `questions` are lengths in tokens."""
    rng = np.random.default_rng(len(name) + context)
    draw = lambda n: rng.integers(3, len(WORDS), n).astype(np.int32)  # noqa: E731
    example = Example(name, "its words are drawn", tuple(Question(f"{i}", ("it",)) for i in range(len(questions))))
    return Item(Words("test/words", 6, exact), None, example, draw(context), tuple(map(draw, questions)), new_tokens)


ITEMS = [item("a", 41, 5, 9), item("b", 47, 7, 3), item("c", 33, 4, 4), item("d", 20, 2), item("e", 46, 1, 6)]


def answered(ask: Asker, batch: ReadingBatch, policy: kvjax.Policy) -> Answers:
    """The answers under one policy."""
    ((_, answers, _),) = ask(batch, [policy])
    return answers


def alone(params: Decoder, one: Item, index: int, question: Setting, text: str) -> list[int]:
    """The answer by `extend` alone, in a cache of its own: prefill, compression, then token by token."""
    prompt = np.concatenate([one.context, one.questions[index]])
    first = one.context.size if question == "after" else prompt.size - 1

    def extended(cache: kvjax.KVCache, ids: np.ndarray, size: int) -> tuple[jax.Array, kvjax.KVCache]:
        tokens, lengths = left_pad([ids], size)
        return EXTEND(params, kvjax.with_room(cache, 16), jnp.asarray(tokens), jnp.asarray(lengths))

    cache = kvjax.KVCache.empty(params.config, parse(text), jnp.array([first]), 64, jnp.float32)
    _, cache = extended(cache, prompt[:first], 64)
    logits, cache = extended(cache, prompt[first:], 16 if question == "after" else 1)
    written: list[int] = []
    while len(written) < one.new_tokens and END not in written:
        written.append(int(jnp.argmax(logits[0])))
        logits, cache = extended(cache, np.array(written[-1:]), 1)
    return written


@pytest.mark.slow
@pytest.mark.parametrize("question", ["after", "before"])
def test_policies_that_share_a_reading_answer_as_each_does(params: Decoder, question: Setting) -> None:
    texts = ("tova:budget=0.3", "tova:budget=12", "snapkv:budget=0.5,window=4", "dynamickv:budget=16,window=4")
    ask, policies = Asker(params, tokenizer(), Greedy()), [parse(text) for text in texts]
    for batch in batches(readings(ITEMS[:3], question), lambda _: 4):
        together = list(ask(batch, policies))
        for policy, (_, answers, took) in zip(policies, together, strict=True):
            each = answered(ask, batch, policy)
            assert [[a.tokens for a in mine] for mine in answers] == [[a.tokens for a in mine] for mine in each]
            assert [[a.kept for a in mine] for mine in answers] == [[a.kept for a in mine] for mine in each]
            assert took.decoded_tokens > 0
        assert together[0][2].read_seconds > 0


EACH = [
    (text, question) for text in ("snapkv:budget=0.5,window=4", "tova:budget=12") for question in ("after", "before")
]


@pytest.mark.slow(first=2)
@pytest.mark.parametrize(("text", "question"), part(EACH, [EACH[0], EACH[3]]))
def test_answers_are_those_of_each_question_alone(params: Decoder, question: Setting, text: str) -> None:
    ask = Asker(params, tokenizer(), Greedy())
    found: dict[tuple[str, int], list[int]] = {}
    kept: dict[str, list[float]] = {}
    for batch in batches(readings(ITEMS, question), lambda _: 4):
        ((_, answers, took),) = ask(batch, [parse(text)])
        assert took.decoded_tokens >= 0
        for reading, mine in zip(batch.readings, answers, strict=True):
            for asked, answer in zip(reading.asks, mine, strict=True):
                found[asked.item.example.id, asked.index] = answer.tokens
                kept[asked.item.example.id] = answer.kept
                assert answer.text == tokenizer().decode(answer.tokens, skip_special_tokens=True)
                assert 0 < answer.kv_bytes <= answer.kv_bytes_end
                assert (answer.kv_bytes == answer.kv_bytes_end) == ("tova" in text), "tova evicts while decoding"
    assert len(found) == sum(len(one.questions) for one in ITEMS)
    for one in ITEMS[:4]:
        for index in range(len(one.questions)):
            assert found[one.example.id, index] == alone(params, one, index, question, text), (one.example.id, index)
    sizes = {one.example.id: one.context.size for one in ITEMS}
    if question == "after":
        assert kept == {name: [float(12 if "tova" in text else size // 2)] for name, size in sizes.items()}


@pytest.mark.long
def test_answers_end_at_the_tokens_of_the_checkpoint(params: Decoder, tmp_path: Path) -> None:
    """In padded batches and in rows that are refilled."""
    (batch,), policy = batches(readings(ITEMS[:2], "before"), lambda _: 4), parse("full")
    whole = [
        answer.tokens
        for mine in answered(Asker(params, tokenizer(), Greedy(), ends=False), batch, policy)
        for answer in mine
    ]
    said = whole[0][1]
    kvjax.save_hf(params, tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [END, said]}))
    ask = Asker(kvjax.load(tmp_path)[0], tokenizer(), Greedy())
    cut = [[t for i, t in enumerate(tokens) if not {END, said} & {*tokens[:i]}] for tokens in whole]
    assert cut[0][-1] == said != END
    assert len(cut[0]) < len(whole[0])
    assert [answer.tokens for mine in answered(ask, batch, policy) for answer in mine] == cut
    assert sorted(ended.answer.tokens for ended in ask.refilled([batch], policy, 1)) == sorted(cut)


@pytest.mark.slow
def test_a_question_of_one_token_is_decoded(params: Decoder) -> None:
    """The answer is that of a turn of one token."""
    policy, one = "snapkv:budget=0.5,window=4", replace(ITEMS[4], questions=ITEMS[4].questions[:1])
    (batch,) = batches(readings([one], "after"), lambda _: 2)
    ((answer,),) = answered(Asker(params, tokenizer(), Greedy()), batch, parse(policy))
    assert answer.tokens == alone(params, one, 0, "after", policy)


@pytest.mark.slow
def test_draws_depend_on_the_example_and_not_on_its_batch(params: Decoder) -> None:
    def drawn(ask: Asker, *given: Item) -> list[list[int]]:
        (batch,) = batches(readings(given, "after"), lambda _: 4)
        return [answer.tokens for mine in answered(ask, batch, parse("full")) for answer in mine]

    ask = Asker(params, tokenizer(), Sampler(temperature=1.0), seed=1)
    one, other = ITEMS[0], item("b", 47, 7, 10)
    together = drawn(ask, one, other)
    assert together == drawn(ask, other, one)[2:] + drawn(ask, other, one)[:2]
    assert together != drawn(replace(ask, seed=2), one, other)


def at_most(rows: int) -> Callable[[Reading], int]:
    return lambda _: rows


@pytest.mark.slow
@pytest.mark.parametrize("question", ["after", "before"])
def test_a_mesh_answers_the_same(params: Decoder, question: Setting) -> None:
    """Rows are split over data and heads over model; the rows of a batch are a multiple of data."""
    spread = kvjax.shard(params, kvjax.make_mesh(data=2, model=2))
    policy = parse("snapkv:budget=0.5,window=4" if question == "after" else "tova:budget=12")
    found = []
    for one in (params, spread):
        ask = Asker(one, tokenizer(), Greedy())
        rows, data = (4, 1) if one is params else (3, 2)
        asked = batches(readings(ITEMS[:3], question), at_most(rows), data)
        answers = [answer for batch in asked for mine in answered(ask, batch, policy) for answer in mine]
        found.append([(answer.tokens, answer.kept) for answer in answers])
        assert {batch.rows for batch in asked} == {4}
    assert found[0] == found[1]


@pytest.mark.slow
def test_nothing_is_compiled_per_example(compiled: list[str]) -> None:
    """A second set of examples, with other lengths in the same buckets, compiles no program."""
    params = Decoder(replace(decoder(vocab=len(WORDS)).config, mlp_size=40), nnx.Rngs(0))
    ask = Asker(params, tokenizer(), Greedy())

    def work(first: int) -> Counter[str]:
        compiled.clear()
        given = [item(f"{i}", first + i, 3 + i % 4, 9) for i in range(11)]
        for question in ("after", "before"):
            for batch in batches(readings(given, question), lambda _: 4):
                assert batch.rows == 4
                answered(ask, batch, parse("h2o:budget=12"))
        names = ("_read_layers", "_compress_layer", "decode", "step")
        return Counter(name for name in names for program in compiled if program == f"jit({name})")

    # prefill of prompts of 33 to 48 tokens, with and without compression, and of the question as the end of the prompt;
    # the question as a turn; the last token of the question as a step
    assert work(33) == {"_read_layers": 4, "_compress_layer": 2, "step": 1, "decode": 1}
    assert work(34) == {}


@pytest.mark.long
@pytest.mark.parametrize("text", ["snapkv:budget=0.5", "adakv:base=snapkv,base.budget=0.5", "h2o:budget=12"])
@pytest.mark.parametrize("question", ["after", "before"])
def test_retained_tokens_of_first_examples_are_recorded(params: Decoder, text: str, question: Setting) -> None:
    """A digit stands for the share of kv heads of all layers with an entry of the token."""
    given = [replace(ITEMS[0], pieces=(("a",),)), ITEMS[4]]
    ask, policy, seen = Asker(params, tokenizer(), Greedy()), parse(text), []
    for batch in batches(readings(given, question), lambda _: 2):
        for reading, answers in zip(batch.readings, answered(ask, batch, policy), strict=True):
            for one, answer in zip(reading.asks, answers, strict=True):
                seen.append(one.item.example.id)
                if one.item.example.id == "e":
                    assert answer.retained is None
                    continue
                prompt = np.concatenate([reading.prompt, one.lead])
                (share,) = kvjax.prefill(params, [prompt], policy=text).retained_mask().mean(axis=(1, 2))
                assert answer.retained == "".join(str(int(np.ceil(9 * x))) for x in share)
                assert 0 < share.mean() < 1
    assert sorted(seen) == ["a", "a", "e", "e"]
