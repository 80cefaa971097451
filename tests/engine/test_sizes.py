"""Classes of prompts: few, each large enough, and all known beforehand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax.engine.sizes import TOGETHER, Sizes


@given(
    longest=st.integers(1, 5000),
    chunk=st.integers(1, 1000),
    platform=st.sampled_from(["cpu", "gpu"]),
    share=st.floats(0, 1),
)
def test_every_prompt_fits_into_its_class(longest: int, chunk: int, platform: str, share: float) -> None:
    sizes = Sizes.of(4, longest, 1, chunk=chunk, platform=platform)
    length = max(1, round(longest * share))
    size = sizes.padded(length)
    assert size in sizes.classes
    assert size >= length
    assert size <= sizes.chunk or (size % sizes.chunk == 0 and size >= sizes.chunks(length) * sizes.chunk)
    assert sizes.chunk >= min(chunk, longest)
    for size in sizes.parts:
        assert sizes.shortest <= TOGETHER * size <= sizes.chunk
        lengths = [1, size, max(1, size - 1), 1]
        assert sizes.together(lengths) == sizes.together([*lengths, longest]) == TOGETHER
        assert sizes.class_of(lengths) == size
    above = max(sizes.parts, default=0) + 1
    assert sizes.together([1, 1, 1, above]) == sizes.together([1, 1, 1]) == 1
    assert sizes.class_of([length]) == sizes.padded(length)


@pytest.mark.parametrize(
    ("longest", "chunk", "classes"),
    [
        (1, 512, [16]),
        (100, 512, [16, 24, 32, 48, 64, 96, 128]),
        (1000, 256, [16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 768, 1024]),
        (700, 200, [16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 768]),
        (500, 16, [16, 32, 48, 64, 96, 128, 192, 256, 384, 512]),
    ],
)
def test_classes_of_some_engines(longest: int, chunk: int, classes: list[int]) -> None:
    assert Sizes.of(1, longest, 1, chunk=chunk).classes == classes


@pytest.mark.parametrize(
    ("rows", "chunk", "platform", "parts"),
    [
        (4, 512, "cpu", [16, 32, 64, 128]),
        (4, 512, "gpu", [32, 64, 128]),
        (4, 192, "cpu", [16, 32]),
        (3, 512, "cpu", []),
    ],
)
def test_classes_of_prompts_that_are_read_together(rows: int, chunk: int, platform: str, parts: list[int]) -> None:
    assert Sizes.of(rows, 2048, 1, chunk=chunk, platform=platform).parts == parts


@pytest.mark.parametrize(
    ("longest", "chunk", "classes"),
    [(1, 512, [16]), (100, 512, [128]), (1000, 256, [128, 192, 256, 512, 768, 1024]), (70, 16, [16, 32, 48, 64, 80])],
)
def test_classes_on_a_gpu(longest: int, chunk: int, classes: list[int]) -> None:
    """A class of less than 128 tokens is a chunk, or the longest prompt."""
    assert Sizes.of(1, longest, 1, chunk=chunk, platform="gpu").classes == classes
