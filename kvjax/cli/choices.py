"""Which policy suits which use, as docs/choosing.md recommends from measured results."""

from __future__ import annotations

from typing import NamedTuple


class Choice(NamedTuple):
    """A recommendation.

    Attributes:
        use: what is asked of the model.
        policy: a policy as text, with {budget} for a share or a number of entries.
    """

    use: str
    policy: str


CHOICES = (
    Choice("the prompt ends with its question", "dynamickv:budget={budget}"),
    Choice("the same, and the answer quotes numbers or names", "snapkv:budget={budget},kernel=31,pool=avg"),
    Choice("questions follow a text that is read once", "kvcompose:budget={budget}"),
    Choice("the same, without a second reading", "dynamickv:budget={budget}"),
    Choice("the same, with gates that were trained for the model", "fastkvzip:budget={budget}"),
    Choice("long answers or dialogues in constant memory", "morphkv:budget={budget}"),
    Choice("the same, and facts are asked for much later", "keydiff_codes:budget={budget}"),
    Choice("half the memory without a loss", "quantize:bits=8"),
)
