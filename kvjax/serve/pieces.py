"""Makes the pieces of one answer of its tokens: what they say, and how they are spelled."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from kvjax.decoding.row_text import special_ids
from kvjax.decoding.spelling import Spelled, Spelling
from kvjax.decoding.text_stream import TextStream
from kvjax.engine import Answer, Finish, Handle, Token
from kvjax.engine.handle import Top

from .dialects import Reading
from .dividing import Call, Said

_REASONS: dict[Finish | None, str | None] = {None: None, "end": "stop", "stop": "stop", "length": "length"}


class Piece(NamedTuple):
    """A piece of an answer.

    Attributes:
        said: what is certain since the last piece.
        tokens: the number of tokens since then.
        spelled: the tokens whose text is certain since then, if the request asks for log-probabilities.
        top: of each of these, the most probable tokens in its place.
        offsets: of each of these, the number of characters of the text before it.
        calls_before: the number of calls that earlier pieces have begun. The first call of this piece may go on with
            the last of them.
        finish: OpenAI's reason, with the last piece of an answer.
    """

    said: Said
    tokens: int
    spelled: Sequence[Spelled]
    top: Sequence[Top] = ()
    offsets: Sequence[int] = ()
    calls_before: int = 0
    finish: str | None = None


class Pieces:
    """Makes the pieces of one answer."""

    def __init__(
        self, tokenizer: Any, handle: Handle, reading: Reading, *, log_probs: bool, only_prompt: bool = False
    ) -> None:
        """No piece yet.

        Args:
            tokenizer: that of the engine.
            handle: whose tokens will come.
            reading: how the answer is read.
            log_probs: whether tokens are spelled.
            only_prompt: whether an answer that begins with the prompt ends there, one token before it does.
        """
        self._tokenizer, self._echoed, self._only_prompt = tokenizer, handle.echoed, only_prompt
        begins = frozenset(self._echoed[:1].tolist())  # with a special token, whose name the text has
        self._shown = handle.shown | begins.intersection(special_ids(tokenizer).values())
        self._divider, self._most = reading.divider(), reading.most_calls
        self._spelling = Spelling(tokenizer, self._shown) if log_probs else None
        self._read, self._place = codecs.getincrementaldecoder("utf-8")("replace"), 0  # up to the spelled tokens
        self._tokens, self._calls = -handle.echoed.size, 0
        self._top: deque[Top] = deque()  # of tokens that are not spelled yet

    def add(self, tokens: Sequence[Token], text: str, finish: Finish | None) -> Piece | None:
        """The piece after some more tokens and more certain text; None if there is nothing to say.

        Args:
            tokens: of the engine, whose text is not looked at.
            text: that the engine is certain of.
            finish: why the answer ends, with its last tokens.
        """
        last, before = finish is not None, min(self._calls, self._most)
        self._tokens += len(tokens)
        said = self._divider.add(text, last=last)
        said = said._replace(calls=tuple(self._kept(said.calls)))
        spelled: Sequence[Spelled] = ()
        if self._spelling is not None:
            self._top.extend(token.top for token in tokens)
            spelled = self._spelling.add(((token.id, token.log_prob) for token in tokens), text, last=last)
        if not (said or spelled or last):
            return None
        reason = "tool_calls" if self._calls and finish in ("end", "stop") else _REASONS[finish]
        top = [self._top.popleft() for _ in spelled]
        piece = Piece(said, self._tokens, spelled, top, [*self._offsets(spelled)], before, reason)
        self._tokens = 0
        return piece

    def _offsets(self, spelled: Sequence[Spelled]) -> Iterator[int]:
        """The places of tokens in the text. All tokens of one character have its place."""
        for token in spelled:
            yield self._place
            self._place += len(self._read.decode(token.data))

    def _kept(self, calls: Sequence[Call]) -> Iterator[Call]:
        """Calls, and parts of calls, but for those beyond the most calls of an answer."""
        for call in calls:
            self._calls += call.name is not None
            if self._calls <= self._most:
                yield call

    def whole(self, answer: Answer) -> Piece:
        """All of an answer as one piece. The first token of a prompt that is scored has no log-probability."""
        log_probs: Sequence[float | None] = [None] * len(answer.tokens)
        if answer.log_probs is not None:
            log_probs = answer.log_probs.tolist()
        facts = zip(answer.tokens.tolist(), log_probs, answer.top, strict=True)
        tokens = [Token(i, None, log_prob, top) for i, log_prob, top in facts]
        text = answer.text or ""
        if self._echoed.size:
            tokens = [Token(int(self._echoed[0]), None, None), *(tokens[:-1] if self._only_prompt else tokens)]
            stream = TextStream(self._tokenizer, shown=self._shown)
            text = "".join(stream.add(token.id) for token in tokens) + stream.end()
        piece = self.add(tokens, text, answer.finish)
        assert piece is not None
        return piece
