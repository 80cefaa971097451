"""Layers without keys and values of their own, behind all others: each reads the entries of one of those."""

from typing import NamedTuple


class Readers(NamedTuple):
    """The static description of the layers that read another layer's entries.

    Attributes:
        sources: of each reader, the index of the layer whose entries it reads. Its window, its RoPE and the number and
            size of kv heads are that layer's.
        mlp_size: F of their MLPs.
    """

    sources: tuple[int, ...]
    mlp_size: int
