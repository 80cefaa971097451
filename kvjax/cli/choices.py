"""Recommends a policy for each use, as docs/guide/choosing.md recommends from measured results."""

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
    Choice("a prompt that ends with its question", "snapkv:budget={budget},kernel=31,pool=avg"),
    Choice("a question that comes after its text is compressed", "kvzip:budget={budget}"),
    Choice("a question that comes after, from one reading of the text", "leverage_score:budget={budget}"),
    Choice("a question that comes after, with gates trained for the model", "fastkvzip:budget={budget},recent=16"),
    Choice("long answers in constant memory", "morphkv:budget={budget}"),
    Choice("problems solved step by step in constant memory", "rkv:budget={budget},every=16"),
    Choice("dialogues in constant memory, where facts are asked for much later", "keydiff_codes:budget={budget}"),
    Choice("half the memory without a loss", "quantize:bits=8"),
)
