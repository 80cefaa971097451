"""The static sizes of an engine, and the classes of prompt lengths, each of which has its programs. Integers only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from kvjax.cache import bucket, room_for

CHUNK = 512  # tokens that are read between two steps, unless the caller says otherwise
ENDS = 24  # end tokens of a request: a checkpoint's, and the 16 that a request to a server may add
SHORTEST_ON_GPU = 128  # a GPU reads fewer tokens in the same time, which its weights take
TOGETHER = 4  # short prompts that one program reads: the weights are read once, and each prompt's cache takes memory


@dataclass(frozen=True)
class Sizes:
    """The sizes that bound the requests of an engine.

    Attributes:
        rows: the number of requests that are decoded together.
        max_prompt: the most tokens of a prompt.
        max_new_tokens: the most tokens of an answer.
        chunk: the most tokens that are read between two steps.
        ends: the most end tokens of a request.
        shortest: the fewest tokens that are read at a time, to which a shorter prompt is padded; at most a chunk.
    """

    rows: int
    max_prompt: int
    max_new_tokens: int
    chunk: int
    ends: int
    shortest: int

    @classmethod
    def of(
        cls,
        rows: int,
        max_prompt: int,
        max_new_tokens: int,
        *,
        chunk: int = CHUNK,
        ends: int = ENDS,
        platform: str = "cpu",
    ) -> Sizes:
        """The sizes on a platform, with a chunk that is a bucket and no longer than the longest prompt."""
        chunk = min(bucket(chunk), bucket(max_prompt))
        shortest = SHORTEST_ON_GPU if platform == "gpu" else 1
        return cls(rows, max_prompt, max_new_tokens, chunk, ends, min(shortest, chunk))

    @property
    def prompt(self) -> int:
        """The padded size of the longest prompt, for which caches are made."""
        return bucket(self.max_prompt)

    @property
    def room(self) -> int:
        """The number of slots set aside for an answer where a layer grows."""
        return room_for(self.max_new_tokens)

    def padded(self, length: int) -> int:
        """The class of a prompt: its bucket if it is read at once, and else whole chunks."""
        size = bucket(max(length, self.shortest))
        if size <= self.chunk:
            return size
        return min(self.chunks(size), self.chunks(self.max_prompt)) * self.chunk

    @property
    def classes(self) -> list[int]:
        """All classes of prompts, ascending."""
        found, length = [], self.shortest
        while length <= self.max_prompt:
            found.append(self.padded(length))
            length = bucket(length) + 1
        return sorted({*found, self.padded(self.max_prompt)})

    @property
    def parts(self) -> list[int]:
        """The classes of prompts that are read together, ascending: powers of two, so that they are few."""
        smallest, most = bucket(-(-self.shortest // TOGETHER)), self.chunk // TOGETHER if self.rows >= TOGETHER else 0
        return [size for size in (2**i for i in range(most.bit_length())) if smallest <= size <= most]

    def together(self, lengths: Iterable[int]) -> int:
        """The number of prompts that are read together, first to last, of those with these lengths: TOGETHER or 1."""
        first = list(islice(lengths, TOGETHER))
        return TOGETHER if len(first) == TOGETHER and max(first) <= max(self.parts, default=0) else 1

    @property
    def reads(self) -> list[tuple[int, int]]:
        """All shapes of what is read from its beginning: the number of prompts, and their class."""
        return [(1, size) for size in self.classes] + [(TOGETHER, size) for size in self.parts]

    def class_of(self, lengths: Sequence[int]) -> int:
        """The class of prompts that are read together, or of one prompt."""
        if len(lengths) == 1:
            return self.padded(lengths[0])
        return min(size for size in self.parts if size >= max(lengths))

    def chunks(self, length: int) -> int:
        """The number of chunks of a prompt."""
        return -(-length // self.chunk)
