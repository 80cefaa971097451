"""From prompts to padded arrays. tests/request/test_request.py has the prompts that are refused."""

import copy
from typing import Any

import numpy as np
import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from kvjax.cache import bucket
from kvjax.reading.prompt import Batch
from kvjax.request.prompts import is_single, rows_of


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


def test_chunks_end_together() -> None:
    batch = Batch.of([np.arange(1, 8), np.array([9])], size=7)
    found = [(chunk.tokens.tolist(), chunk.lengths.tolist()) for chunk in batch.chunks(3)]
    assert found == [
        ([[0, 0, 1], [0, 0, 0]], [1, 0]),
        ([[2, 3, 4], [0, 0, 0]], [3, 0]),
        ([[5, 6, 7], [0, 0, 9]], [3, 1]),
    ]
    for size in (None, 7, 100):
        (whole,) = batch.chunks(size)
        assert whole.tokens.tolist() == batch.tokens.tolist()
        assert whole.lengths.tolist() == [7, 1]


def test_texts_in_an_array_are_rows(tokenizer: PreTrainedTokenizerFast) -> None:
    texts = ["ba ce", "di"]
    for array in (np.array(texts), np.array(texts, object)):
        assert [row.tolist() for row in rows_of(array, tokenizer, 101, begins=False)] == [[5, 11], [17]]
        assert not is_single(array)


def test_ids_are_integers_of_32_bits(tokenizer: PreTrainedTokenizerFast) -> None:
    """Rows of several kinds are joined with pending tokens, and are indices."""
    for prompt in ("ba ce", [5, 11], np.array([5, 11], np.uint64), np.array([[5], [11]], np.int8)):
        assert all(row.dtype == np.int32 for row in rows_of(prompt, tokenizer, 101, begins=True))


def test_special_tokens_stand_where_a_text_begins(tokenizer: PreTrainedTokenizerFast) -> None:
    texts = ["ba ce", "di"]
    begun, continued = ([row.tolist() for row in rows_of(texts, tokenizer, 101, begins=b)] for b in (True, False))
    assert begun == [[99, 5, 11], [99, 17]]
    assert continued == [[5, 11], [17]]


@pytest.mark.parametrize("special", [["<s>"], ["<s>", "si"]])
def test_text_of_a_template_gets_no_second_bos(tokenizer: PreTrainedTokenizerFast, special: list[str]) -> None:
    tokenizer = copy.deepcopy(tokenizer)
    pairs = list(zip(special, tokenizer.convert_tokens_to_ids(special), strict=True))
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=" ".join([*special, "$A", "</s>"]), special_tokens=[*pairs, ("</s>", 100)]
    )
    (plain,) = rows_of("ba ce", tokenizer, 101, begins=True)
    assert plain.tolist() == [*(token for _, token in pairs), 5, 11, 100]
    for text in (" ".join([*special, "ba ce"]), " ".join([*special, *special, "ba ce"])):
        (row,) = rows_of(text, tokenizer, 101, begins=True)
        assert row.tolist() == [*tokenizer(text, add_special_tokens=False)["input_ids"], 100]
    (row,) = rows_of("<s> ba ce", tokenizer, 101, begins=False)
    assert row.tolist() == [5, 11]  # the BOS stands at the beginning of the cache


def test_options_of_the_template(tokenizer: PreTrainedTokenizerFast) -> None:
    talker = chatting(tokenizer, TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %} di{% endif %}")

    def ids(options: Any, prompt: Any = (USER,)) -> list[int]:
        return rows_of(prompt, talker, 101, begins=True, chat_template_kwargs=options)[0].tolist()

    assert ids({"enable_thinking": False}) == [*ids(None), 17]
    assert ids({"enable_thinking": True, "other": 1}) == ids({}) == ids(None)
    for options, message in (
        (3, "chat_template_kwargs=3: expected a dict"),
        ({1: 2}, "expected a dict of the template's options by name"),
        ({"tokenize": True}, "'tokenize', which kvjax sets"),
    ):
        with pytest.raises(ValueError, match=message):
            ids(options)
    with pytest.raises(ValueError, match="the prompt has no chat messages"):
        ids({"enable_thinking": False}, "ba ce")


TEMPLATE = (
    "{{ bos_token }}{% for message in messages %} {{ {'user': 'sa', 'assistant': 'se', 'system': 'si'}[message.role] }}"
    " {{ message.content }} {{ eos_token }}{% endfor %}{% if add_generation_prompt %} se{% endif %}"
)
USER = {"role": "user", "content": "ba ce"}
SYSTEM = {"role": "system", "content": "di"}


def chatting(tokenizer: PreTrainedTokenizerFast, template: Any = TEMPLATE) -> PreTrainedTokenizerFast:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template
    return tokenizer


def test_chat_messages_go_through_the_template(tokenizer: PreTrainedTokenizerFast) -> None:
    """The template writes the special tokens, and the tokenizer adds none of its own."""

    def ids(prompt: Any, **options: bool) -> list[list[int]]:
        return [row.tolist() for row in rows_of(prompt, chatting(tokenizer), 101, **{"begins": True} | options)]

    user, system = [90, 5, 11, 100], [92, 17, 100]
    assert ids([USER]) == [[99, *user, 91]]
    assert ids((SYSTEM, USER)) == [[99, *system, *user, 91]]
    assert ids([[USER], (SYSTEM, USER)]) == [[99, *user, 91], [99, *system, *user, 91]]
    assert ids([USER], begins=False) == [[*user, 91]]
    assert ids([USER], answered=False) == [[99, *user]]
    assert ids([USER | {"name": "another key"}]) == [[99, *user, 91]]


def test_templates_without_a_bos_token(tokenizer: PreTrainedTokenizerFast) -> None:
    for template, start in ((TEMPLATE.removeprefix("{{ bos_token }}"), [90]), ("{{ messages[0].content }}", [5])):
        for begins in (True, False):
            (row,) = rows_of([USER], chatting(tokenizer, template), 101, begins=begins)
            assert row.tolist()[:1] == start


MALFORMED = {
    "no content": ([{"role": "user"}], "message 0 of the prompt is {'role': 'user'}: expected a dict whose 'role' and"),
    "no role": ([USER, {"content": "ba"}], "message 1 of the prompt is {'content': 'ba'}: expected a dict"),
    "content that is no text": ([{"role": "user", "content": 3}], "message 0 of the prompt is .*: expected a dict"),
    "text among messages": ([USER, "ba"], "message 1 of the prompt is 'ba': expected a dict"),
    "a number in a batch": ([[USER], [USER, 3]], "message 1 of row 1 of the prompt is 3: expected a dict"),
    "text among conversations": ([[USER], "ba"], "row 1 of the prompt is 'ba' beside rows of chat messages: expected"),
    "an empty conversation": ([[USER], []], r"row 1 of the prompt is \[\] beside rows of chat messages: expected"),
    "an empty conversation first": ([[], [USER]], "row 0 of the prompt is empty"),
    "a message alone": (USER, r"the prompt is of type dict with the keys .*: expected a list of chat messages"),
}


@pytest.mark.parametrize(("prompt", "message"), MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_messages(tokenizer: PreTrainedTokenizerFast, prompt: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rows_of(prompt, chatting(tokenizer), 101, begins=True)


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{{ '' }}{% endfor %}{% endfor %}"


def test_messages_need_a_tokenizer_with_a_template(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match="there is no tokenizer: expected tokenizer="):
        rows_of([USER], None, 101, begins=True)
    with pytest.raises(ValueError, match="the tokenizer has no chat template: expected text or token ids"):
        rows_of([USER], tokenizer, 101, begins=True)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('only one user') }}", "chat template failed with TemplateError: only one user"),
        ("{% if %}", "chat template failed with TemplateSyntaxError: "),
        ("{{ messages[7].content }}", "chat template failed with UndefinedError: "),
        ("{{ messages[0].content + 3 }}", "chat template failed with TypeError: "),
        ("{{ messages.append(3) }}", "chat template failed with SecurityError: "),
        ({"tools": TEMPLATE}, "chat template failed with ValueError: "),
        (ENDLESS, "chat template failed with TimeoutError: no end within 0.2 seconds"),
        ("{{ 'ba ' * 1000000 }}", "chat template wrote 3,000,000 characters: expected at most 1,000,0"),
    ],
)
def test_templates_that_fail(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch, template: Any, message: str
) -> None:
    if template == ENDLESS:
        monkeypatch.setattr("kvjax.request.chat.TEMPLATE_SECONDS", 0.2)
    with pytest.raises(ValueError, match=message):
        rows_of([USER], chatting(tokenizer, template), 101, begins=True)
