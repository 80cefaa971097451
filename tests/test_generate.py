"""`generate` against attention without a cache: batches, forms of prompts, end tokens, seeds and statistics."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from transformers import PreTrainedTokenizerFast

import kvjax
from kvjax.attend.causal import causal
from kvjax.models import Decoder, DecoderConfig, Rope
from tests.products import part
from tests.request.test_prompts import chatting

RNG = np.random.default_rng(0)
ROWS = [RNG.integers(0, 99, n).tolist() for n in (44, 33, 5)]  # in buckets of 48, 48 and 16
NEW = 24
H2O, MORPHKV = "h2o:budget=24", "morphkv:budget=24,window=4,every=4"

# Most tests ask in this way, with three rows in a bucket of 48 or one of them, and share the programs.
generate = partial(kvjax.generate, max_new_tokens=NEW, log_probs=True)


@partial(jax.jit, static_argnames="size")
def causal_logits(params: Decoder, tokens: jax.Array, size: int) -> jax.Array:
    hidden, _ = params(tokens, causal(jnp.arange(size)[None]))
    return params.logits(hidden)


def logits_of(params: Decoder, row: Sequence[int], size: int = 72) -> np.ndarray:
    """Logits [N, V] of a row of up to `size` tokens without a cache. Causal attention ignores padding on the right."""
    padded = np.zeros((1, size), np.int32)
    padded[0, : len(row)] = row
    return np.asarray(causal_logits(params, padded, size))[0, : len(row)]


def greedy(params: Decoder, prompt: list[int], new: int) -> list[int]:
    row = list(prompt)
    for _ in range(new):
        row.append(int(logits_of(params, row)[-1].argmax()))
    return row[len(prompt) :]


@pytest.mark.long(first=1)
@pytest.mark.slow(first=2)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "windows"), [(4, 4, (None,)), (8, 2, (None, 20)), (14, 2, (20,))], ids=str
)
def test_greedy_equals_recomputing_everything(heads: int, kv_heads: int, windows: tuple[int | None, ...]) -> None:
    config = DecoderConfig("llama", 101, 32, 48, heads, kv_heads, 8, windows, Rope(1e4), 4096)
    params = Decoder(config, nnx.Rngs(1))
    answer = kvjax.generate(params, ROWS[0], max_new_tokens=NEW)
    assert answer.tokens.tolist() == [greedy(params, ROWS[0], NEW)]
    assert len(set(answer.tokens[0].tolist())) > 3


@pytest.mark.slow(first=1)
def test_rows_in_company_are_as_alone(subject: Decoder, policy: kvjax.Policy) -> None:
    """A row gets what it gets in a batch of equal rows."""
    together = generate(subject, ROWS, policy=policy)
    assert together.tokens.dtype == np.int32
    assert together.lengths.tolist() == [NEW] * 3
    assert together.log_probs is not None
    for row, prompt in enumerate(ROWS[:2]):
        alike = generate(subject, [prompt] * 3, policy=policy)
        assert alike.tokens.tolist() == [together.tokens[row].tolist()] * 3
        assert alike.log_probs is not None
        np.testing.assert_allclose(alike.log_probs, [together.log_probs[row]] * 3, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_a_short_row_is_as_in_a_larger_bucket(shallow: Decoder) -> None:
    """It is also alone, in a batch of one row."""
    alone, together = (generate(shallow, rows, policy=MORPHKV) for rows in (ROWS[2], ROWS))
    assert alone.tokens.tolist() == [together.tokens[2].tolist()]
    assert alone.log_probs is not None
    assert together.log_probs is not None
    np.testing.assert_allclose(alone.log_probs[0], together.log_probs[2], atol=1e-5, rtol=0)


@pytest.mark.slow
def test_policies_differ(shallow: Decoder) -> None:
    """If policies gave equal answers, the tests above and those of caches would show nothing."""
    texts = ("full", "streaming_llm:budget=24,positions=in_cache", MORPHKV, "d2o:budget=24,layer_budgets=False")
    answers = [generate(shallow, ROWS, policy=text) for text in texts]
    assert len({answer.tokens.tobytes() for answer in answers}) == len(texts)


@pytest.mark.slow(first=1)
def test_chunks_give_what_one_call_gives(subject: Decoder, policy: kvjax.Policy) -> None:
    """In two pieces, of which the first one has padding. The third row lies in the second one."""
    whole, chunked = (generate(subject, ROWS, policy=policy, chunk=chunk) for chunk in (None, 30))
    np.testing.assert_array_equal(chunked.tokens, whole.tokens)


def test_log_probabilities_are_those_of_the_model(shallow: Decoder) -> None:
    sampler = kvjax.Sampler(temperature=0.5, top_k=20, repetition_penalty=1.3)
    answer = generate(shallow, ROWS, sampler=sampler)
    assert answer.log_probs is not None
    for prompt, tokens, ours in zip(ROWS, answer.tokens, answer.log_probs, strict=True):
        logits = logits_of(shallow, [*prompt, *tokens])[len(prompt) - 1 : -1]
        expected = jax.nn.log_softmax(logits)[np.arange(NEW), tokens]
        np.testing.assert_allclose(ours, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "form",
    [
        lambda rows: rows,
        lambda rows: tuple(tuple(row) for row in rows),
        lambda rows: [np.asarray(row, np.uint8) for row in rows],
        lambda rows: [jnp.asarray(row) for row in rows],
        lambda rows: np.asarray([rows[0], rows[0][::-1], rows[0][5:] + rows[0][:5]]),
        lambda rows: jnp.asarray([rows[0], rows[0][::-1], rows[0][5:] + rows[0][:5]]),
        lambda rows: rows[0],
        lambda rows: np.asarray(rows[0], np.int16),
        lambda rows: jnp.asarray(rows[0]),
    ],
)
def test_forms_of_a_prompt(shallow: Decoder, form) -> None:
    prompt = form(ROWS)
    rows = [list(map(int, row)) for row in (prompt if np.ndim(prompt[0]) else [prompt])]
    expected = generate(shallow, rows)
    np.testing.assert_array_equal(generate(shallow, prompt).tokens, expected.tokens)


@pytest.mark.long
def test_text(shallow: Decoder, tokenizer: PreTrainedTokenizerFast) -> None:
    """The text begins with the tokenizer's special tokens, and ends with its end token, which is not shown."""
    answer = kvjax.generate(shallow, "ba ce di", tokenizer=tokenizer, max_new_tokens=6)
    ids = [99, 5, 11, 17]
    assert tokenizer("ba ce di")["input_ids"] == ids
    expected = kvjax.generate(shallow, ids, max_new_tokens=6, eos=tokenizer.eos_token_id)
    np.testing.assert_array_equal(answer.tokens, expected.tokens)
    assert answer.text == tokenizer.decode(answer.tokens[0].tolist(), skip_special_tokens=True)
    assert expected.text is None
    two = kvjax.generate(shallow, ["ba ce di", "fo"], tokenizer=tokenizer, max_new_tokens=6)
    assert isinstance(two.text, list)
    assert two.text[0] == answer.text
    # The text goes on in a cache, so that no special token stands before the question.
    asked = kvjax.generate(shallow, "fo", tokenizer=tokenizer, cache=answer.cache, max_new_tokens=6)
    ids, end = [tokenizer.convert_tokens_to_ids("fo")], tokenizer.eos_token_id
    expected = kvjax.generate(shallow, ids, cache=answer.cache, max_new_tokens=6, eos=end)
    np.testing.assert_array_equal(asked.tokens, expected.tokens)


def test_rows_end_by_themselves(shallow: Decoder) -> None:
    free = generate(shallow, ROWS)
    assert free.log_probs is not None
    new = [list(dict.fromkeys(row.tolist())) for row in free.tokens]  # the tokens of each row as they appear
    ends = [[new[0][1]], new[1][-2:], []]
    answer = generate(shallow, ROWS, eos=ends)
    assert answer.log_probs is not None
    for row, stops in enumerate(ends):
        expected = free.tokens[row].tolist()
        length = min([expected.index(stop) + 1 for stop in stops], default=NEW)
        assert answer.lengths[row] == length
        assert answer.tokens[row].tolist() == expected[:length] + [-1] * (NEW - length)
        np.testing.assert_allclose(answer.log_probs[row, :length], free.log_probs[row, :length], atol=1e-6)
        assert not answer.log_probs[row, length:].any()
        assert int(answer.cache.length[row]) == len(ROWS[row]) + length - 1
    assert len(set(answer.lengths.tolist())) == 3


@pytest.mark.parametrize("form", [int, np.int64, lambda end: [end], lambda end: (end, 100), lambda end: [[end]] * 3])
def test_forms_of_end_tokens(shallow: Decoder, form) -> None:
    """Generation stops with the last row, and the returned tokens are as long as the longest answer."""
    prompts = [ROWS[0]] * 3
    free = generate(shallow, prompts).tokens
    end = free[0, 3]
    length = free[0].tolist().index(end) + 1
    answer = generate(shallow, prompts, eos=form(end))
    assert answer.lengths.tolist() == [length] * 3
    np.testing.assert_array_equal(answer.tokens, free[:, :length])


def test_end_token_of_the_tokenizer(shallow: Decoder, tokenizer: PreTrainedTokenizerFast) -> None:
    prompts = [ROWS[0]] * 3
    free = generate(shallow, prompts, tokenizer=tokenizer, eos=())
    assert free.lengths.tolist() == [NEW] * 3
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, eos_token=tokenizer.decode([free.tokens[0, 2]])
    )
    ended = generate(shallow, prompts, tokenizer=tokenizer)
    length = free.tokens[0].tolist().index(free.tokens[0, 2]) + 1
    np.testing.assert_array_equal(ended.tokens, free.tokens[:, :length])


@pytest.mark.slow
def test_one_token(subject: Decoder, policy: kvjax.Policy) -> None:
    one, more = (generate(subject, ROWS, policy=policy, max_new_tokens=new) for new in (1, 2))
    np.testing.assert_array_equal(one.tokens, more.tokens[:, :1])
    assert one.stats.decoded_tokens == 0
    assert one.stats.decode_tokens_per_second == 0


def test_seeds(shallow: Decoder) -> None:
    prompts, sampler = [ROWS[1]] * 3, kvjax.Sampler(temperature=1.5)

    def draw(prompts, seed) -> list[list[int]]:
        return kvjax.generate(shallow, prompts, sampler=sampler, seed=seed, max_new_tokens=NEW).tokens.tolist()

    same = draw(prompts, 7)
    assert same == draw(prompts, 7)
    assert same != draw(prompts, 8)
    assert same[0] != same[1]
    by_row = draw(prompts, [3, 4, 3])
    assert by_row[0] == by_row[2] != by_row[1]
    assert draw([ROWS[0], ROWS[2], ROWS[1]], [9, 9, 4])[2] == by_row[1]
    assert draw(ROWS[1], [4]) == [by_row[1]]


@pytest.mark.slow
def test_keys_as_seeds(shallow: Decoder) -> None:
    """A key acts like the integer that made it, for the batch or for a row, and can be used again."""
    sampler = kvjax.Sampler(temperature=1.5)

    def draw(seed) -> list[list[int]]:
        return kvjax.generate(shallow, ROWS, sampler=sampler, seed=seed, max_new_tokens=4).tokens.tolist()

    assert draw(7) == draw(jax.random.key(7)) == draw(jax.random.PRNGKey(7))
    typed, legacy = jax.random.split(jax.random.key(7), 3), jax.random.split(jax.random.PRNGKey(7), 3)
    assert draw(7) == draw(typed) == draw(typed) == draw(legacy) == draw(legacy)
    seeds = [3, 4, 3]
    expected = draw(seeds)
    assert expected != draw(7)
    assert expected == draw(np.array(seeds)) == draw(np.array(seeds, np.uint32))
    assert expected == draw(jnp.stack([jax.random.key(seed) for seed in seeds]))
    assert expected == draw(jnp.stack([jax.random.PRNGKey(seed) for seed in seeds]))
    other = draw(jax.random.key(7, impl="unsafe_rbg"))
    assert other != draw(7)


@pytest.mark.slow
def test_policies_as_text(shallow: Decoder) -> None:
    policy = kvjax.policies.parse(MORPHKV)
    expected, answer = (generate(shallow, ROWS, policy=form) for form in (policy, MORPHKV))
    np.testing.assert_array_equal(answer.tokens, expected.tokens)
    pieces = list(kvjax.stream(shallow, ROWS, policy=MORPHKV, max_new_tokens=NEW))
    np.testing.assert_array_equal(np.stack([piece.tokens for piece in pieces], axis=1), expected.tokens)
    assert answer.cache.policy == kvjax.prefill(shallow, ROWS, policy=MORPHKV).policy == policy
    generate(shallow, None, cache=answer.cache, policy=MORPHKV)
    with pytest.raises(ValueError, match="cannot be extended with Policy"):
        generate(shallow, None, cache=answer.cache, policy="full")


def test_chat(shallow: Decoder, tokenizer: PreTrainedTokenizerFast) -> None:
    """Messages give the answers of the rendered template's ids, also in a later turn and about a document."""
    tokenizer = chatting(tokenizer)
    turns = [{"role": "user", "content": "ba ce"}], [{"role": "user", "content": "di"}]
    first, second = [99, 90, 5, 11, 100, 91], [90, 17, 100, 91]
    options = {"max_new_tokens": 4, "eos": tokenizer.eos_token_id}

    def ask(messages, cache=None) -> kvjax.Generation:
        return kvjax.generate(shallow, messages, cache=cache, tokenizer=tokenizer, max_new_tokens=4)

    answer, expected = ask(turns[0]), kvjax.generate(shallow, first, **options)
    np.testing.assert_array_equal(answer.tokens, expected.tokens)
    np.testing.assert_array_equal(
        ask(turns[1], answer.cache).tokens, kvjax.generate(shallow, second, cache=expected.cache, **options).tokens
    )
    both = kvjax.generate(shallow, [first, [99, *second]], **options)
    np.testing.assert_array_equal(ask(list(turns)).tokens, both.tokens)
    pieces = list(kvjax.stream(shallow, turns[0], tokenizer=tokenizer, max_new_tokens=4))
    assert [int(piece.tokens[0]) for piece in pieces] == expected.tokens[0].tolist()
    document = kvjax.prefill(shallow, turns[0], tokenizer=tokenizer)
    assert int(document.length[0]) == len(first) - 1  # no generation prompt before the next message
    in_one = kvjax.generate(shallow, [*first[:-1], *second], **options)
    np.testing.assert_array_equal(ask(turns[1], document).tokens, in_one.tokens)


def test_repetition_penalty_covers_prompt_and_answer(shallow: Decoder) -> None:
    """With so large a penalty a token is repeated only when no other is left. Of 101 tokens, a row has 64 or fewer."""
    prompts = [list(range(10, 50)), list(range(20, 26)), list(range(99, 61, -1))]
    answer = generate(shallow, prompts, sampler=kvjax.Greedy(repetition_penalty=1e9))
    for prompt, tokens in zip(prompts, answer.tokens, strict=True):
        together = [*prompt, *tokens.tolist()]
        assert len(set(together)) == len(together)


@pytest.mark.slow
@pytest.mark.parametrize("text", part(["full", H2O, MORPHKV], [H2O, MORPHKV]))
def test_bfloat16(shallow: Decoder, text: str) -> None:
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), shallow)
    policy = kvjax.policies.parse(text)
    answer = kvjax.generate(params, ROWS[:1], policy=policy, max_new_tokens=8, log_probs=True)
    assert answer.cache.dtype == jnp.bfloat16
    assert answer.log_probs is not None
    assert answer.log_probs.dtype == np.float32
    row = [*ROWS[0], *answer.tokens[0].tolist()]
    exact = jax.nn.log_softmax(logits_of(shallow, row)[len(ROWS[0]) - 1])
    assert abs(answer.log_probs[0, 0] - float(exact[answer.tokens[0, 0]])) < 0.1


@pytest.mark.slow
def test_stats(subject: Decoder, policy: kvjax.Policy) -> None:
    answer = generate(subject, ROWS, policy=policy)
    stats, config = answer.stats, subject.config
    assert stats.prompt_tokens == sum(map(len, ROWS))
    assert stats.decoded_tokens == 3 * (NEW - 1)
    assert stats.cache_bytes == answer.cache.nbytes == sum(x.nbytes for x in jax.tree.leaves(answer.cache.entries))
    longest = max(map(len, ROWS))
    full = kvjax.plan_cache(
        config, kvjax.policies.full(), batch=3, length=longest, new_tokens=NEW, dtype=subject.embed.dtype
    )
    assert stats.full_cache_bytes == full.nbytes
    assert stats.compression_ratio == stats.full_cache_bytes / stats.cache_bytes
    assert stats.prefill_seconds > 0
    assert stats.decode_seconds > 0
    assert stats.decode_tokens_per_second == stats.decoded_tokens / stats.decode_seconds
    if policy.every and not policy.allocates:
        slots = {layer.slots for layer in answer.cache.entries}
        assert slots == {24}
