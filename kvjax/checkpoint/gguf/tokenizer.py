"""Builds a tokenizer from the metadata of a GGUF file.

Two kinds are served: `gpt2`, byte-level BPE, and `llama`, the BPE of SentencePiece.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from kvjax.checkpoint.errors import one_line
from kvjax.checkpoint.tokenizer_files import transformers_quietly
from kvjax.checks import shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPACE = "\u2581"  # SentencePiece's space


class Splitting(NamedTuple):
    """The rules by which byte-level BPE splits a text before it merges.

    Attributes:
        pattern: a regular expression of the pieces; None for GPT-2's.
        digits: whether each digit is a piece of its own, before the pattern is applied.
        composed: whether characters are composed first (NFC).
        whole: whether a piece that is a token is never split.
        begins: whether a text begins with the first token, unless the metadata says.
    """

    pattern: str | None = None
    digits: bool = False
    composed: bool = False
    whole: bool = False
    begins: bool = False


WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
ENDS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|"
LLAMA3 = Splitting(WORDS + r"\p{N}{1,3}" + ENDS, whole=True, begins=True)
QWEN2 = Splitting(WORDS + r"\p{N}" + ENDS, composed=True)
SPLITTINGS = {
    "dbrx": Splitting(WORDS + r"\p{N}{1,3}" + ENDS),  # the name of Phi-4's, too
    "deepseek-r1-qwen": QWEN2,
    "gpt-2": Splitting(),
    "llama-bpe": LLAMA3,
    "llama-v3": LLAMA3,
    "llama3": LLAMA3,
    "qwen2": QWEN2,
    "smollm": Splitting(digits=True),
    "tekken": Splitting(CASED + r"\p{N}" + ENDS.replace(r"[\r\n]*", r"[\r\n/]*", 1), whole=True, begins=True),
}


class _Vocabulary(NamedTuple):
    """The tokens, and the type of each one."""

    tokens: list[str]
    kinds: list[int]

    @property
    def ids(self) -> dict[str, int]:
        return {token: i for i, token in enumerate(self.tokens)}


class _BadTokenizerError(Exception):
    """The sentence that says what is wrong with the tokenizer."""


def build_tokenizer(metadata: Mapping[str, Any], problems: list[str]) -> PreTrainedTokenizerBase | None:
    """Returns the tokenizer, or None if the file has none. Appends to `problems` if it cannot be built."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind in (None, "none", "no_vocab"):
        return None
    if kind not in BUILDERS:
        problems.append(f"its tokenizer is of the kind {shown(kind)}; accepted: {', '.join(BUILDERS)}")
        return None
    keys = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    try:
        vocabulary = _vocabulary(keys)
        special = _special(keys, vocabulary.tokens)
        backend, begins = BUILDERS[kind](keys, vocabulary, special)
        _add_tokens(backend, vocabulary, stripped=kind == "llama" and metadata.get("general.architecture") == "phi3")
        _frame(backend, special, vocabulary.ids, keys.get("add_bos_token", begins), keys.get("add_eos_token", False))
        with transformers_quietly():
            from transformers import PreTrainedTokenizerFast
        return PreTrainedTokenizerFast(
            tokenizer_object=backend,
            clean_up_tokenization_spaces=False,
            chat_template=_chat_template(metadata),
            **special,
        )
    except _BadTokenizerError as error:
        problems.append(f"its tokenizer cannot be built: {error}")
    except Exception as error:  # tokenizers raises bare Exceptions
        problems.append(f"its tokenizer cannot be built: {one_line(error)}")
    return None


def _listed(keys: Mapping[str, Any], key: str, kind: type, count: int | None = None) -> list[Any]:
    """Reads a list of `count` elements of a type."""
    value = keys.get(key)
    if not isinstance(value, list) or not all(type(x) is kind for x in value):
        raise _BadTokenizerError(f"tokenizer.ggml.{key} is not a list of {kind.__name__}")
    if count is not None and len(value) != count:
        raise _BadTokenizerError(f"tokenizer.ggml.{key} has {len(value):,} elements; expected {count:,}, one per token")
    return value


def _vocabulary(keys: Mapping[str, Any]) -> _Vocabulary:
    tokens = _listed(keys, "tokens", str)
    if len(set(tokens)) < len(tokens):
        raise _BadTokenizerError("tokenizer.ggml.tokens has a token twice")
    kinds = (
        _listed(keys, "token_type", int, len(tokens)) if "token_type" in keys else [int(TokenType.NORMAL)] * len(tokens)
    )
    return _Vocabulary(tokens, kinds)


def _special(keys: Mapping[str, Any], tokens: list[str]) -> dict[str, str]:
    """The special tokens by transformers' names of them."""
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {}
    for name, theirs in names.items():
        index = keys.get(f"{theirs}_token_id")
        if index is None:
            continue
        if type(index) is not int or not 0 <= index < len(tokens):
            raise _BadTokenizerError(
                f"tokenizer.ggml.{theirs}_token_id={shown(index)}: expected an integer below {len(tokens):,}"
            )
        special[name] = tokens[index]
    return special


def _byte_level(keys: Mapping[str, Any], vocabulary: _Vocabulary, special: Mapping[str, str]) -> tuple[Tokenizer, bool]:
    """Byte-level BPE, and whether a text begins with the first token by default."""
    named = keys.get("pre")
    if named not in SPLITTINGS:
        raise _BadTokenizerError(
            f"tokenizer.ggml.pre={shown(named)} is not supported; accepted: {', '.join(SPLITTINGS)}"
        )
    splitting = SPLITTINGS[named]
    merges = [tuple(merge.split(" ")) for merge in _listed(keys, "merges", str)]
    if not all(len(merge) == 2 for merge in merges):
        raise _BadTokenizerError("tokenizer.ggml.merges has a merge of other than two tokens")
    backend = Tokenizer(models.BPE(vocab=vocabulary.ids, merges=merges, ignore_merges=splitting.whole))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if splitting.digits else []
    if splitting.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(splitting.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitting.pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if splitting.composed:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend, splitting.begins


def _sentencepiece(
    keys: Mapping[str, Any], vocabulary: _Vocabulary, special: Mapping[str, str]
) -> tuple[Tokenizer, bool]:
    """SentencePiece's BPE, and that a text begins with the first token by default."""
    scores = _listed(keys, "scores", float, len(vocabulary.tokens))
    if not all(map(math.isfinite, scores)):
        raise _BadTokenizerError("tokenizer.ggml.scores has a number that is not finite")
    backend = Tokenizer(
        models.BPE(
            vocab=vocabulary.ids,
            merges=_merges(vocabulary, scores),
            unk_token=special.get("unk_token"),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefixed = keys.get("add_space_prefix", True)
    replace = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace]) if prefixed else replace
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
    return backend, True


def _merges(vocabulary: _Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
    """The merges that the scores imply: SentencePiece merges the pair whose union has the largest score."""
    normal = {
        token: score
        for token, kind, score in zip(vocabulary.tokens, vocabulary.kinds, scores, strict=True)
        if kind == TokenType.NORMAL
    }
    pairs = [
        (-score, token[:cut], token[cut:])
        for token, score in normal.items()
        for cut in range(1, len(token))
        if token[:cut] in normal and token[cut:] in normal
    ]
    return [(left, right) for _, left, right in sorted(pairs, key=lambda pair: pair[0])]


BUILDERS: dict[str, Callable[..., tuple[Tokenizer, bool]]] = {"gpt2": _byte_level, "llama": _sentencepiece}


def _add_tokens(backend: Tokenizer, vocabulary: _Vocabulary, stripped: bool) -> None:
    """Tells the tokenizer which tokens occur whole in a text.

    Args:
        backend: the tokenizer.
        vocabulary: its tokens.
        stripped: whether these tokens swallow the spaces after them, as Phi-3's do.
    """
    kept = ("<unk>", "<s>", "<|endoftext|>")
    for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True):
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN):
            added = AddedToken(token, special=True, normalized=False, rstrip=stripped and token not in kept)
            backend.add_special_tokens([added])
        elif kind == TokenType.USER_DEFINED:
            backend.add_tokens([AddedToken(token, normalized=False)])


def _frame(backend: Tokenizer, special: Mapping[str, str], ids: Mapping[str, int], begins: bool, ends: bool) -> None:
    """Puts the first token before each text, and the last token after it, if the metadata say so."""
    first = [special["bos_token"]] if begins and "bos_token" in special else []
    last = [special["eos_token"]] if ends and "eos_token" in special else []
    if first or last:
        backend.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last],
            pair=[*first, "$A", *last, *first, "$B:1", *last],
            special_tokens=[(token, ids[token]) for token in {*first, *last}],
        )


def _chat_template(metadata: Mapping[str, Any]) -> str | dict[str, str] | None:
    """The chat template; a mapping if there are several."""
    template = metadata.get("tokenizer.chat_template")
    named = {name: metadata[f"tokenizer.chat_template.{name}"] for name in metadata.get("tokenizer.chat_templates", ())}
    return named | ({} if template is None else {"default": template}) if named else template
