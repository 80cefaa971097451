"""Prompts that a tokenizer has encoded and padded."""

import copy
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from kvjax.request.prompts import is_single, rows_of

TEXTS = ["ba ce di", "di"]
ALONE = [[99, 5, 11, 17], [99, 17]]


def padding(tokenizer: PreTrainedTokenizerFast, pad: str, side: str = "right") -> PreTrainedTokenizerFast:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.pad_token, tokenizer.padding_side = pad, side
    return tokenizer


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("form", [None, "np"])
@pytest.mark.parametrize("pad", ["si", "<s>", "</s>"])
def test_padding_is_never_text(tokenizer: PreTrainedTokenizerFast, side: str, form: Any, pad: str) -> None:
    tokenizer = padding(tokenizer, pad, side)
    both = tokenizer(TEXTS, padding=True, return_tensors=form)
    assert [row.tolist() for row in rows_of(both, tokenizer, 101, begins=True)] == ALONE
    assert [row.tolist() for row in rows_of(dict(both), None, 101, begins=True)] == ALONE
    assert not is_single(both)
    if pad == "si":
        with pytest.warns(UserWarning, match=r"2 padding tokens \(92\) at the ends of rows, which are dropped"):
            assert [row.tolist() for row in rows_of(both["input_ids"], tokenizer, 101, begins=True)] == ALONE
    else:
        with pytest.raises(ValueError, match=r"row 1 of the prompt (begins|ends) with [23] of the token .*input_ids"):
            rows_of(both["input_ids"], tokenizer, 101, begins=True)


def test_one_encoded_text(tokenizer: PreTrainedTokenizerFast) -> None:
    one = tokenizer("ba ce di")
    assert is_single(one)
    assert [row.tolist() for row in rows_of(one, tokenizer, 101, begins=True)] == ALONE[:1]


def test_special_tokens_at_the_ends_are_no_padding(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer = padding(tokenizer, "</s>")
    for ids in ([[5, 11, 100], [5, 100]], [5, 100], np.array([[5, 100], [7, 100]])):
        rows_of(ids, tokenizer, 101, begins=True)
    with pytest.raises(ValueError, match="row 1 of the prompt ends with 1 of the token 100"):
        rows_of(np.array([[5, 11], [7, 100]]), tokenizer, 101, begins=True)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"role": "user", "content": "ba"}, "of type dict with the keys"),
        ({"input_ids": [5], "pixel_values": [1]}, "the key 'pixel_values'"),
        ({"input_ids": 5}, "input_ids=5: expected token ids"),
        ({"input_ids": []}, "the prompt is empty"),
        ({"input_ids": [5, 7], "attention_mask": [1]}, "attention_mask has another shape"),
        ({"input_ids": [5, 7], "attention_mask": []}, "attention_mask has another shape"),
        ({"input_ids": [5, 7], "attention_mask": [1, 2]}, "other values than 0 and 1"),
        ({"input_ids": [5, 7, 5], "attention_mask": [1, 0, 1]}, "a 0 between two 1"),
        ({"input_ids": [5, 7], "attention_mask": [0, 0]}, "the prompt is empty"),
        ({"input_ids": [5, 7], "attention_mask": 1}, "attention_mask=1: expected a 0 or 1 for each id of one row"),
        ({"input_ids": [5, 7], "attention_mask": np.array(1)}, "attention_mask has another shape"),
        ({"input_ids": ["ba"]}, "row 0 of the prompt is <U2 .* expected integers"),
        ({"input_ids": "ba"}, "input_ids='ba': expected token ids"),
        ([{"input_ids": [5], "attention_mask": [1]}], "message 0 of the prompt"),
    ],
)
def test_other_mappings_are_refused(prompt: Any, message: str, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match=message):
        rows_of(prompt, tokenizer, 101, begins=True)
