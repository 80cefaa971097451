"""`stream`: the tokens of `generate`, as they come, with their text; stop strings."""

import copy

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import kvjax
from kvjax.decoding.row_text import RowText, stop_strings
from kvjax.models import Decoder

RNG = np.random.default_rng(3)
ROWS = [RNG.integers(0, 99, n).tolist() for n in (44, 5, 33)]  # as in test_generate.py, whose program reads them
NEW = 24


def tokens_of(pieces: list[kvjax.Piece]) -> np.ndarray:
    return np.stack([piece.tokens for piece in pieces], axis=1)


def texts_of(pieces: list[kvjax.Piece]) -> list[str]:
    parts = [piece.text for piece in pieces if piece.text is not None]
    assert len(parts) == len(pieces)
    return ["".join(row) for row in zip(*parts, strict=True)]


@pytest.mark.slow(first=1)
def test_tokens_are_those_of_generate(subject: Decoder, policy: kvjax.Policy) -> None:
    """Log-probabilities are asked for because the program of other tests returns them."""
    options = {"policy": policy, "max_new_tokens": NEW}
    expected = kvjax.generate(subject, ROWS, **options, log_probs=True)
    pieces = list(kvjax.stream(subject, ROWS, **options))
    np.testing.assert_array_equal(tokens_of(pieces), expected.tokens)
    assert [piece.active.any() for piece in pieces] == [True] * (NEW - 1) + [False]
    assert [piece.cache is None for piece in pieces] == [True] * (NEW - 1) + [False]
    assert pieces[0].text is None
    cache = pieces[-1].cache
    assert cache is not None
    for ours, theirs in zip(jax.tree.leaves(cache.entries), jax.tree.leaves(expected.cache.entries), strict=True):
        if ours.dtype == np.int32:  # positions, and where they are
            np.testing.assert_array_equal(ours, theirs)
    ours, theirs = (
        kvjax.generate(subject, None, cache=one, max_new_tokens=4, log_probs=True) for one in (cache, expected.cache)
    )
    np.testing.assert_array_equal(ours.tokens, theirs.tokens)


def test_text_has_the_spaces_of_its_tokens(shallow: Decoder) -> None:
    """Whether it comes piece by piece or at once, though this tokenizer would leave out those before punctuation."""
    backend = Tokenizer(models.WordLevel({f"{'.,!?'[i % 4]}" + "." * i: i for i in range(101)}))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=True)
    answer = kvjax.generate(shallow, ROWS, max_new_tokens=NEW, tokenizer=tokenizer)
    assert answer.text == texts_of(list(kvjax.stream(shallow, ROWS, max_new_tokens=NEW, tokenizer=tokenizer)))


@pytest.mark.slow
def test_ends_and_repetition_penalty(shallow: Decoder) -> None:
    """What the state of the loop carries beside the cache. A piece after a row's end is -1 there."""
    options = {"max_new_tokens": NEW, "sampler": kvjax.Greedy(repetition_penalty=1.5)}
    free = kvjax.generate(shallow, ROWS, **options, eos=()).tokens
    options["eos"] = [[int(free[0, 3])], [int(free[1, 7])], []]
    expected = kvjax.generate(shallow, ROWS, **options)
    assert len(set(expected.lengths.tolist())) == 3
    pieces = list(kvjax.stream(shallow, ROWS, **options))
    np.testing.assert_array_equal(tokens_of(pieces), expected.tokens)
    np.testing.assert_array_equal(np.sum([piece.tokens >= 0 for piece in pieces], axis=0), expected.lengths)


def test_text_comes_in_pieces(shallow: Decoder, tokenizer: PreTrainedTokenizerFast) -> None:
    expected = kvjax.generate(shallow, ["ba ce di", "fo"], tokenizer=tokenizer, max_new_tokens=NEW)
    pieces = list(kvjax.stream(shallow, ["ba ce di", "fo"], tokenizer=tokenizer, max_new_tokens=NEW))
    assert texts_of(pieces) == expected.text
    assert len([piece for piece in pieces if piece.text and piece.text[0]]) > NEW // 2


@pytest.mark.long
def test_stop_strings_end_rows(shallow: Decoder, tokenizer: PreTrainedTokenizerFast) -> None:
    """One string in the middle of two tokens of a row; the other rows go on. The draws are those of `generate`."""
    options = {"tokenizer": tokenizer, "sampler": kvjax.Sampler(temperature=1.5), "max_new_tokens": NEW, "eos": ()}
    seeds = [7, 8, 9]
    free = kvjax.generate(shallow, ROWS, seed=seeds, **options)
    assert free.text is not None
    stop = free.text[0][7:9]  # of the fourth and the fifth token
    assert stop not in free.text[1] + free.text[2]
    assert free.text[0].index(stop) == 7
    pieces = list(kvjax.stream(shallow, ROWS, stop=["never", stop], seed=seeds, **options))
    assert texts_of(pieces) == [free.text[0][:7], *free.text[1:]]
    tokens = tokens_of(pieces)
    assert tokens[0].tolist() == free.tokens[0, :5].tolist() + [-1] * (NEW - 5)
    np.testing.assert_array_equal(tokens[1:], free.tokens[1:])
    assert [bool(piece.active[0]) for piece in pieces] == [True] * 4 + [False] * (NEW - 4)
    cache = pieces[-1].cache
    assert cache is not None
    assert cache.length.tolist() == [44 + 4, 5 + NEW - 1, 33 + NEW - 1]  # its last token is pending
    assert cache.pending.tolist() == [free.tokens[0, 4], *free.tokens[1:, -1]]
    out = kvjax.generate(shallow, ROWS, stop=["never", stop], seed=seeds, log_probs=True, **options)
    assert out.text == [free.text[0][:7], *free.text[1:]]
    np.testing.assert_array_equal(out.tokens, tokens)
    assert out.lengths.tolist() == [5, NEW, NEW]
    assert out.log_probs is not None
    assert not out.log_probs[0, 5:].any()
    assert out.cache.length.tolist() == cache.length.tolist()
    alike = list(kvjax.stream(shallow, [ROWS[0]] * 3, stop=stop, seed=seeds[:1] * 3, **options))
    assert len(alike) == 5
    assert texts_of(alike) == [free.text[0][:7]] * 3


@pytest.mark.slow
def test_pieces_can_be_left(shallow: Decoder) -> None:
    """Closing early frees what the stream held, and the cache it began with serves on."""
    document = kvjax.generate(shallow, ROWS, max_new_tokens=NEW, log_probs=True).cache

    def going_on() -> np.ndarray:
        return kvjax.generate(shallow, None, cache=document, max_new_tokens=4, log_probs=True).tokens

    expected = going_on()
    before = len(jax.live_arrays())
    pieces = kvjax.stream(shallow, None, cache=document, max_new_tokens=NEW)
    first = next(pieces)
    pieces.close()
    with pytest.raises(StopIteration):
        next(pieces)
    np.testing.assert_array_equal(first.tokens, expected[:, 0])
    del pieces, first
    assert len(jax.live_arrays()) == before
    np.testing.assert_array_equal(going_on(), expected)


@pytest.fixture(scope="module")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte of UTF-8, so that a character may take several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.mark.parametrize(
    ("stops", "shown"),
    [
        ([], "né à 5€, or more"),
        (["€"], "né à 5"),
        (["5€, or less", ", or"], "né à 5€"),
        (["more", "or m"], "né à 5€, "),
        (["or more or less"], "né à 5€, or more"),
        (["n"], ""),
    ],
)
def test_characters_and_stop_strings_of_many_tokens(
    byte_tokenizer: PreTrainedTokenizerFast, stops: list[str], shown: str
) -> None:
    """Nothing is shown that is taken back, and nothing is lost."""
    ids = byte_tokenizer("né à 5€, or more")["input_ids"]
    assert len(ids) == 20
    row = RowText(byte_tokenizer, stops)
    said = ""
    for i, token in enumerate(ids):
        said += row.add(token, last=i == len(ids) - 1)
        assert shown.startswith(said)
        if row.stopped:
            break
    assert said == shown
    assert row.stopped == (shown != "né à 5€, or more")


def test_special_tokens_in_stop_strings(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    """A special token ends a row, though the text of an answer leaves it out; within other text it cannot."""
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    row = RowText(tokenizer, stop_strings(["<|end|>", "ab or"], tokenizer))
    said = [row.add(token, last=False) for token in tokenizer("né a<|end|>b")["input_ids"]]
    assert ("".join(said), row.stopped) == ("né a", True)
    for stop, message in (
        ("<|end|>b", r"special token <\|end\|> within other text"),
        ("\ud800", "a lone surrogate"),
        ("", "strings of at least one character"),
    ):
        with pytest.raises(ValueError, match=message):
            stop_strings(stop, tokenizer)


def test_bytes_of_an_unfinished_character_are_shown_at_the_end(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    """As the tokenizer shows them in the text of `generate`; before the end they wait for the rest of the character."""
    for text, cut, shown in (("a€", 0, "a€"), ("a€", 1, "a\ufffd"), ("né", 1, "n\ufffd")):
        ids = byte_tokenizer(text)["input_ids"]
        ids = ids[: len(ids) - cut]
        row = RowText(byte_tokenizer, [])
        pieces = [row.add(token, last=i == len(ids) - 1) for i, token in enumerate(ids)]
        assert "".join(pieces) == byte_tokenizer.decode(ids) == shown
        assert "\ufffd" not in "".join(pieces[:-1])
