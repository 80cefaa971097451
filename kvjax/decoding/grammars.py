"""Grammars that an answer follows, and which tokens they allow next: the library llguidance.

docs/notes/grammars.md compares it with others.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import UInt32

from kvjax.checks import cut, installs, shown

BLANK = r"[\x20\x0A\x09]{1,40}"  # between the parts of JSON; without a bound a model may write nothing else


class GrammarError(ValueError):
    """A grammar is not accepted, or an answer cannot follow it any further."""


def _library() -> Any:
    try:
        import llguidance
    except ModuleNotFoundError:
        raise GrammarError(f"grammar: llguidance is not installed; expected {installs('serve')}") from None
    return llguidance


@dataclass(frozen=True)
class Grammar:
    """A grammar.

    Attributes:
        text: in llguidance's form.
    """

    text: str

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any]) -> Grammar:
        """JSON that a schema accepts. Keywords that llguidance does not know are errors when the grammar is used."""
        if not isinstance(schema, Mapping):
            raise GrammarError(f"the JSON schema is {shown(schema)}: expected a dict")
        try:
            return cls(_library().LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_BLANKS))
        except (TypeError, ValueError, RecursionError) as error:
            raise GrammarError(f"the JSON schema is {shown(schema)}: expected JSON; {cut(str(error))}") from None

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text that a regular expression, in the form of Rust's regex, matches as a whole."""
        return cls(_library().LLMatcher.grammar_from_regex(_checked("regular expression", pattern)))

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """A grammar in llguidance's dialect of Lark."""
        return cls(_library().LLMatcher.grammar_from_lark(_checked("grammar", text)))


def _checked(what: str, text: Any) -> str:
    """The text. Raises GrammarError for what is no text in UTF-8."""
    if not isinstance(text, str) or text != text.encode(errors="ignore").decode():
        raise GrammarError(f"the {what} is {shown(text)}: expected a string in UTF-8")
    return text


_BLANKS = {"whitespace_pattern": BLANK}


def lark_of_json(schema: Mapping[str, Any]) -> str:
    """JSON that a schema accepts, as an expression of `Grammar.lark`."""
    return "%json " + json.dumps({**schema, "x-guidance": _BLANKS})


class Grammars:
    """Compiles grammars for one vocabulary."""

    def __init__(self, tokenizer: Any, vocab_size: int, ends: Sequence[int]) -> None:
        """Nothing is compiled yet.

        Args:
            tokenizer: a fast tokenizer, or None.
            vocab_size: the number of tokens that the model has.
            ends: end tokens, of which there is at least one.
        """
        self._tokenizer, self._vocab_size, self._ends = tokenizer, vocab_size, list(ends)

    @cached_property
    def _vocabulary(self) -> Any:
        if self._tokenizer is None:
            raise GrammarError("grammar: the engine has no tokenizer; expected Engine(..., tokenizer=...)")
        if not self._ends:
            raise GrammarError("grammar: the model has no end token, with which an answer could end")
        _library()
        from llguidance.hf import from_tokenizer

        size = max(self._vocab_size, len(self._tokenizer))
        try:
            return from_tokenizer(self._tokenizer, n_vocab=size, eos_token=self._ends)
        except ValueError as error:
            raise GrammarError(f"grammar: llguidance cannot read this tokenizer; {cut(str(error))}") from None

    def matcher(self, grammar: Grammar, ends: Collection[int]) -> Matcher:
        """Follows one answer, which ends with any of `ends`.

        Raises:
            GrammarError: the grammar is not accepted.
        """
        found = _library().LLMatcher(self._vocabulary, grammar.text, log_level=0)
        if found.is_error():
            raise GrammarError(f"grammar {shown(grammar.text)}: {cut(found.get_error())}")
        return Matcher(found, self._vocabulary, self._vocab_size, self._ends, ends)


class Matcher:
    """Follows one answer."""

    def __init__(
        self, matcher: Any, vocabulary: Any, vocab_size: int, known: Collection[int], ends: Collection[int]
    ) -> None:
        """At the beginning of an answer.

        Args:
            matcher: that of llguidance.
            vocabulary: that of llguidance.
            vocab_size: the number of tokens that the model has.
            known: llguidance's end tokens.
            ends: those of the answer.
        """
        self._matcher, self._vocabulary = matcher, vocabulary
        self._known, self._ends = list(known), [end for end in ends if end < vocab_size]
        self._words, self._rest = -(-vocab_size // 32), vocab_size % 32

    def allowed(self) -> UInt32[np.ndarray, "X"]:
        """A bit per token that may come next, the lowest of a word first.

        Raises:
            GrammarError: there is none.
        """
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: self._words].copy()
        if self._matcher.is_error():
            raise GrammarError(f"the answer cannot follow its grammar: {cut(self._matcher.get_error())}")
        self._spell(mask)
        may_end = any(mask[end // 32] >> np.uint32(end % 32) & 1 for end in self._known)
        for tokens, on in ((self._known, False), (self._ends, may_end)):
            for token in tokens:
                bit = np.uint32(1 << token % 32)
                mask[token // 32] = mask[token // 32] | bit if on else mask[token // 32] & ~bit
        if self._rest:
            mask[-1] &= np.uint32((1 << self._rest) - 1)
        if not mask.any():
            raise GrammarError("the answer cannot follow its grammar: no token of the vocabulary may come next")
        return mask

    def _spell(self, mask: UInt32[np.ndarray, "X"]) -> None:
        """Puts ordinary tokens in the place of a special one that the text of a grammar does not match.

        Where a grammar has one text, llguidance allows the first token that the tokenizer makes of this text. If the
        text has the name of a special token, that is the special token, which llguidance then does not accept.
        """
        (words,) = np.nonzero(mask)
        word = int(mask[words[0]]) if words.size == 1 else 0
        token = 32 * int(words[0]) + word.bit_length() - 1 if word.bit_count() == 1 else None
        if token is None or self._matcher.validate_tokens([token]):
            return
        text = self._matcher.compute_ff_bytes().decode(errors="ignore")
        first = self._vocabulary.greedy_tokenize(text)[0]
        mask[words[0]] = 0
        mask[first // 32] = np.uint32(1 << first % 32)

    def take(self, token: int) -> bool:
        """Goes on with a token that was allowed. Returns whether the grammar allows nothing after it."""
        if not self._matcher.consume_token(token):
            raise GrammarError(f"the answer cannot follow its grammar: {cut(self._matcher.get_error())}")
        return self._matcher.is_stopped()
