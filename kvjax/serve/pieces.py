"""Makes the pieces of one answer of its tokens: what they say, and how they are spelled."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from kvjax.decoding.spelling import Spelled, Spelling, alone, between
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
        calls_before: the number of calls that earlier pieces have begun. The first call of this piece may go on with
            the last of them.
        finish: OpenAI's reason, with the last piece of an answer.
    """

    said: Said
    tokens: int
    spelled: Sequence[Spelled]
    top: Sequence[Top] = ()
    calls_before: int = 0
    finish: str | None = None


class Pieces:
    """Makes the pieces of one answer."""

    def __init__(self, tokenizer: Any, handle: Handle, reading: Reading, *, log_probs: bool) -> None:
        """No piece yet.

        Args:
            tokenizer: that of the engine.
            handle: whose tokens will come.
            reading: how the answer is read.
            log_probs: whether tokens are spelled.
        """
        self._tokenizer, self._echoed = tokenizer, handle.echoed
        self._divider, self._most = reading.divider(), reading.most_calls
        self._spelling = Spelling(tokenizer, handle.shown) if log_probs else None
        self._tokens, self._calls = -max(0, handle.echoed.size - 1), 0
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
        piece = Piece(said, self._tokens, spelled, top, before, reason)
        self._tokens = 0
        return piece

    def _kept(self, calls: Sequence[Call]) -> Iterator[Call]:
        """Calls, and parts of calls, but for those beyond the most calls of an answer."""
        for call in calls:
            self._calls += call.name is not None
            if self._calls <= self._most:
                yield call

    def whole(self, answer: Answer) -> Piece:
        """All of an answer as one piece."""
        log_probs: Sequence[float | None] = [None] * len(answer.tokens)
        if answer.log_probs is not None:
            log_probs = answer.log_probs.tolist()
        facts = zip(answer.tokens.tolist(), log_probs, answer.top, strict=True)
        piece = self.add([Token(i, None, p, top) for i, p, top in facts], answer.text or "", answer.finish)
        assert piece is not None
        return self._after_first(piece, int(answer.tokens[0])) if self._echoed.size else piece

    def _after_first(self, piece: Piece, second: int) -> Piece:
        """The piece after the first token of a prompt, of which it has the others. That token has no probability."""
        token = int(self._echoed[0])
        text, space = alone(self._tokenizer, token), between(self._tokenizer, token, second)
        said = piece.said._replace(content=text + space + piece.said.content)
        spelled = [Spelled(text, text.encode(), None), *piece.spelled]
        if space:
            following = spelled[1]
            spelled[1] = following._replace(text=space + following.text, data=space.encode() + following.data)
        return piece._replace(said=said, spelled=spelled, top=[(), *piece.top])
