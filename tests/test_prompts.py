"""From prompts to padded arrays. What is refused stands in test_session.py."""

import numpy as np
from transformers import PreTrainedTokenizerFast

from kvjax.extend import bucket
from kvjax.prompts import Batch, rows_of


def test_buckets_are_few_and_waste_less_than_half() -> None:
    sizes = [bucket(n) for n in range(1, 5000)]
    assert sorted(set(sizes)) == [
        16,
        24,
        32,
        48,
        64,
        96,
        128,
        192,
        256,
        384,
        512,
        768,
        1024,
        1536,
        2048,
        3072,
        4096,
        6144,
    ]
    assert all(size >= n for n, size in enumerate(sizes, 1))
    assert all(size < 1.5 * n for n, size in enumerate(sizes, 1) if n > 16)
    assert sizes == sorted(sizes)


def test_rows_are_padded_on_the_left() -> None:
    batch = Batch.of([np.arange(1, 18), np.array([7])])
    assert batch.tokens.dtype == batch.lengths.dtype == np.int32
    assert batch.tokens.tolist() == [[0] * 7 + list(range(1, 18)), [0] * 23 + [7]]
    assert batch.lengths.tolist() == [17, 1]
    assert Batch.of([np.array([7]), np.array([8])], size=1).tokens.tolist() == [[7], [8]]


def test_special_tokens_stand_where_a_text_begins(tokenizer: PreTrainedTokenizerFast) -> None:
    texts = ["ba ce", "di"]
    begun, continued = ([row.tolist() for row in rows_of(texts, tokenizer, 101, begins=b)] for b in (True, False))
    assert begun == [[99, 5, 11], [99, 17]]
    assert continued == [[5, 11], [17]]
