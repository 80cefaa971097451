"""Tokenizers in the forms that published checkpoints have, and what is said of those that cannot be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto import tokenization_auto

from kvjax.checkpoint import load, save_hf
from kvjax.checkpoint.tokenizer_files import read_tokenizer
from tests.checkpoint.folders import WEIGHTS, decoder, problems

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 12345\n"
ADDED = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
INTERNLM2 = {
    "auto_map": {"AutoTokenizer": ["tokenization_internlm2.InternLM2Tokenizer", None]},
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "tokenizer_class": "InternLM2Tokenizer",
}


def write(folder: Path, **files: Any) -> None:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


@pytest.fixture
def internlm2(folder: Path) -> Path:
    """A tokenizer.model with tokens that have other names in tokenizer_config.json, as those of InternLM2."""
    sentencepiece = pytest.importorskip("sentencepiece")
    if "internlm2" not in getattr(tokenization_auto, "MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS", ()):
        pytest.skip("this version of transformers reads no tokenizer of InternLM2 without its code")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the quick brown fox", "hello there world"] * 20),
        **{"model_prefix": str(folder / "tokenizer"), "model_type": "bpe", "vocab_size": 60, "minloglevel": 2},
        **{"hard_vocab_limit": False, "user_defined_symbols": ["[UNUSED_TOKEN_145]", "[UNUSED_TOKEN_146]"]},
    )
    (folder / "tokenizer.vocab").unlink()
    names = {"3": "<|im_end|>", "4": "<|im_start|>"}
    added = {i: {"content": name, **ADDED} for i, name in names.items()}
    write(folder, tokenizer_config=INTERNLM2 | {"added_tokens_decoder": added})
    write(folder, config={"model_type": "internlm2"})
    return folder


def test_the_tokenizer_of_internlm2_needs_none_of_its_code(internlm2, tmp_path):
    """Its own class, which is not run, puts the first token before a text."""
    found: list[str] = []
    tokenizer = read_tokenizer(internlm2, found)
    assert found == []
    pieces = tokenizer.convert_ids_to_tokens(tokenizer("<|im_start|>hello world<|im_end|>")["input_ids"])
    assert (pieces[:2], pieces[-1]) == (["<s>", "<|im_start|>"], "<|im_end|>")
    assert tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|im_start|>"]) == [3, 4]
    assert tokenizer("x", add_special_tokens=False)["input_ids"][0] != tokenizer.bos_token_id
    save_hf(decoder(), tmp_path / "again", tokenizer)
    for name in ("tokenizer.model", "tokenizer_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (internlm2 / name).read_bytes()


def test_internlm2_may_say_that_texts_begin_without_the_first_token(internlm2):
    fields = json.loads((internlm2 / "tokenizer_config.json").read_text())
    write(internlm2, tokenizer_config=fields | {"add_bos_token": False})
    tokenizer = read_tokenizer(internlm2, [])
    assert tokenizer.bos_token_id not in tokenizer("hello world")["input_ids"]


@pytest.mark.parametrize("name", ["tekken.json", "tiktoken.model", "tokenizer_config.json"])
def test_a_tokenizer_in_another_form_is_no_lack_of_one(folder, name):
    (folder / name).write_text("{}")
    with pytest.warns(UserWarning, match=f"its tokenizer has {name}: expected one of tokenizer.json, tokenizer.model"):
        assert load(folder)[1] is None


def test_tokenizers_of_mistral_are_those_with_a_chat_template(folder, monkeypatch):
    """transformers takes tekken.json and not tokenizer.json if mistral-common is installed and nothing else is said."""
    from transformers import AutoTokenizer

    for name in ("tokenizer.json", "tekken.json"):
        (folder / name).write_text("{}")
    given: dict[str, Any] = {}
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda folder, **options: given.update(options))
    read_tokenizer(folder, [])
    assert given["mistral_format"] is False


def test_a_tokenizer_that_is_code_is_named(folder):
    (folder / "tokenizer.json").write_text("{}")
    write(folder, tokenizer_config={"auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}})
    with pytest.warns(UserWarning, match="it is code of the checkpoint .auto_map in .*, which kvjax never runs"):
        load(folder)


def test_pointers_of_git_lfs_are_named(folder):
    (folder / "tokenizer.json").write_text(POINTER)
    with pytest.warns(UserWarning, match="tokenizer.json is a pointer of Git LFS, not the file: expected its content"):
        load(folder)
    (folder / WEIGHTS).write_text(POINTER)
    (problem,) = problems(load, folder)
    assert problem.startswith(f"{WEIGHTS} is a pointer of Git LFS")


def test_a_gguf_file_may_be_a_pointer_of_git_lfs(folder):
    pytest.importorskip("gguf")
    file = folder / "model.gguf"
    file.write_text(POINTER)
    (problem,) = problems(load, file)
    assert problem.startswith("model.gguf is a pointer of Git LFS")
