"""Tokenizers from the metadata of GGUF files, compared with their definitions in slow Python."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from kvjax.checkpoint.gguf.tokenizer import SPACE, build_tokenizer

BYTES = [chr(i) for i in (*range(33, 127), *range(161, 173), *range(174, 256))] + [chr(256 + i) for i in range(68)]
SPECIAL = ["<|start|>", "<|end|>", "<think>"]
MERGES = ["h e", "l l", "he ll", "hell o", "\u0120 hello", "1 2", "12 3", "\u0120 a", "\u0120 1"]
MERGED = [merge.replace(" ", "") for merge in MERGES]
GPT2: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": [*SPECIAL, *BYTES, *MERGED],
    "tokenizer.ggml.token_type": [3, 3, 4, *[1] * (len(BYTES) + len(MERGED))],
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.chat_template": "{% for m in messages %}<|start|>{{ m['content'] }}<|end|>{% endfor %}",
}
PIECES = ["he", "ll", "hell", "hello", f"{SPACE}h", f"{SPACE}hello", "lo", "ab", "abc", f"{SPACE}{SPACE}"]
LETTERS = ["h", "e", "l", "o", "a", "b", "c", SPACE]
HEX = [f"<0x{i:02X}>" for i in range(256)]
LLAMA: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *HEX, *PIECES, *LETTERS, "<|user|>"],
    "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (len(PIECES) + len(LETTERS)), 3],
    "tokenizer.ggml.scores": [0.0, 0.0, 0.0, *[0.0] * 256, *[-float(i) for i in range(len(PIECES))], *[-1e3] * 9],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}


def built(base, **changes) -> PreTrainedTokenizerFast:
    problems: list[str] = []
    tokenizer = build_tokenizer(base | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}, problems)
    assert problems == []
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer


def test_byte_level_tokens_and_special_ones():
    tokenizer = built(GPT2)
    assert tokenizer.tokenize("hello hello<|end|> a<think>") == [
        "hello",
        "\u0120hello",
        "<|end|>",
        "\u0120a",
        "<think>",
    ]
    assert tokenizer.tokenize(" 123") == ["\u0120", "1", "2", "3"]
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<|start|>", "<|end|>", None)
    for text in ("hello \u4e16\u754c\n\t12 e\u0301", "  a  ", "<|start|>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode("a<|end|><think>"), skip_special_tokens=True) == "a<think>"
    assert tokenizer.apply_chat_template([{"content": "hello"}], tokenize=False) == "<|start|>hello<|end|>"


def test_a_saved_tokenizer_is_the_same(tmp_path):
    from transformers import AutoTokenizer

    for base in (GPT2, LLAMA):
        tokenizer = built(base)
        folder = tmp_path / base["tokenizer.ggml.model"]
        tokenizer.save_pretrained(folder)
        again = AutoTokenizer.from_pretrained(folder)
        text = " hello 123 <|end|> \u00e9 abc"
        assert again.encode(text) == tokenizer.encode(text)
        assert (again.eos_token, again.chat_template) == (tokenizer.eos_token, tokenizer.chat_template)


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["It", "'s", " 12345", "x", " HelloWorld", "!!", "\n\n  ", " a", "\n"]),
        ("smollm", ["It", "'s", " ", "1", "2", "3", "4", "5", "x", " HelloWorld", "!!", "\n\n  ", " a", "\n"]),
        ("llama-bpe", ["It", "'s", " ", "123", "45", "x", " HelloWorld", "!!\n\n", "  ", " a", "\n"]),
        ("dbrx", ["It", "'s", " ", "123", "45", "x", " HelloWorld", "!!\n\n", "  ", " a", "\n"]),
        ("qwen2", ["It", "'s", " ", "1", "2", "3", "4", "5", "x", " HelloWorld", "!!\n\n", "  ", " a", "\n"]),
        ("tekken", ["It", "'s", " ", "1", "2", "3", "4", "5", "x", " Hello", "World", "!!\n\n", "  ", " a", "\n"]),
    ],
)
def test_pieces_of_a_text(pre, pieces):
    text = "It's 12345x HelloWorld!!\n\n   a\n"
    tokenizer = built(GPT2, pre=pre).backend_tokenizer
    found = [text[start:end] for _, (start, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    assert found == pieces


def test_first_and_last_tokens():
    assert built(GPT2).encode("a") == [GPT2["tokenizer.ggml.tokens"].index("a")]
    assert built(GPT2, pre="llama-bpe").encode("a")[0] == 0
    assert built(GPT2, pre="llama-bpe", add_bos_token=False).encode("a")[0] != 0
    assert built(GPT2, add_bos_token=True, add_eos_token=True).encode("a")[::2] == [0, 1]
    assert built(LLAMA).encode("a")[0] == 1
    assert built(LLAMA, add_bos_token=False).encode("a")[0] != 1


def literal(text: str) -> list[str]:
    """SentencePiece: merge the adjacent pair whose union has the largest score, the leftmost of equals."""
    pieces = dict(zip(LLAMA["tokenizer.ggml.tokens"], LLAMA["tokenizer.ggml.scores"], strict=True))
    parts = list(SPACE + text.replace(" ", SPACE))
    while True:
        pairs = [(pieces[a + b], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in pieces]
        if not pairs:
            break
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [
        part for piece in parts for part in ([piece] if piece in pieces else [f"<0x{b:02X}>" for b in piece.encode()])
    ]


def test_sentencepiece_merges_by_score():
    tokenizer, rng = built(LLAMA), random.Random(0)
    for _ in range(200):
        text = "".join(rng.choices(["hello", "h", "e", "l", "o", "abc", "a", "b", " ", "  ", "z", "\u00e9"], k=12))
        assert tokenizer.tokenize(text) == literal(text)
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text
    assert built(LLAMA, add_space_prefix=False).tokenize("hello") == ["hello"]


def test_phis_special_tokens_swallow_spaces():
    text = "<|user|>  hello"
    assert built(LLAMA).tokenize(text)[1] == f"{SPACE}{SPACE}"
    phi = build_tokenizer(LLAMA | {"general.architecture": "phi3"}, [])
    assert phi.tokenize(text) == ["<|user|>  ", f"{SPACE}hello"]


def test_chat_templates_with_names():
    several = {"tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "tools"}
    assert build_tokenizer(GPT2 | several, []).chat_template == {
        "tool_use": "tools",
        "default": GPT2["tokenizer.chat_template"],
    }


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (GPT2, {"model": "bert"}, "its tokenizer is of the kind 'bert'; accepted: gpt2, llama"),
        (
            GPT2,
            {"pre": "falcon"},
            "tokenizer.ggml.pre='falcon' is not supported; accepted: dbrx, deepseek-r1-qwen, gpt-2",
        ),
        (GPT2, {"pre": None}, "tokenizer.ggml.pre=None is not supported"),
        (GPT2, {"tokens": None}, "tokenizer.ggml.tokens is not a list of str"),
        (GPT2, {"tokens": [1, 2]}, "tokenizer.ggml.tokens is not a list of str"),
        (GPT2, {"tokens": ["a", "a"]}, "tokenizer.ggml.tokens has a token twice"),
        (GPT2, {"token_type": [1]}, "tokenizer.ggml.token_type has 1 elements; expected 268, one per token"),
        (GPT2, {"merges": ["a"]}, "tokenizer.ggml.merges has a merge of other than two tokens"),
        (GPT2, {"merges": ["a zz"]}, "Token `zz` out of vocabulary"),
        (GPT2, {"eos_token_id": 10**6}, "tokenizer.ggml.eos_token_id=1000000: expected an integer below 268"),
        (LLAMA, {"scores": None}, "tokenizer.ggml.scores is not a list of float"),
        (LLAMA, {"scores": [float("nan")] * 278}, "tokenizer.ggml.scores has a number that is not finite"),
    ],
)
def test_a_tokenizer_that_cannot_be_built_is_one_problem(base, changes, message):
    problems: list[str] = []
    metadata = base | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    assert build_tokenizer(metadata, problems) is None
    (problem,) = problems
    assert message in problem


def test_no_tokenizer():
    problems: list[str] = []
    assert build_tokenizer({}, problems) is None
    assert build_tokenizer({"tokenizer.ggml.model": "none"}, problems) is None
    assert problems == []
