"""The number of compiled programs is bounded, and programs of the caller stay."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.runtime import host_limits, programs
from tests.tiny import decoder

MOST = 6


@pytest.fixture
def bounded() -> Iterator[None]:
    programs.keep(MOST)
    yield
    programs.keep(2**31 - 1)


@pytest.mark.slow
@pytest.mark.usefixtures("bounded")
def test_a_sweep_keeps_few_programs() -> None:
    mine = jax.jit(lambda x: x + 1)
    mine(jnp.ones(3))
    counts = []
    for budget in range(8, 14):
        first = kvjax.generate(decoder(), [[1, 2, 3]], policy=f"knorm:budget={budget}", max_new_tokens=2).tokens
        counts.append(programs.count())
    assert max(counts) <= MOST + 4  # a call adds a few to what it finds
    assert counts != sorted(counts)  # programs were forgotten
    assert mine._cache_size() == 1
    again = kvjax.generate(decoder(), [[1, 2, 3]], policy="knorm:budget=13", max_new_tokens=2).tokens
    np.testing.assert_array_equal(again, first)


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the system says of its memory and of the process's maps: just enough of both."""
    for name in ("MEMORY", "MAPS", "MOST_MAPS"):
        monkeypatch.setattr(host_limits, name, tmp_path / name)
    monkeypatch.setattr(host_limits, "CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("8000\n")
    (tmp_path / "memory.current").write_text("7500\n")
    (tmp_path / "memory.stat").write_text("anon 6000\ninactive_file 500\n")
    (tmp_path / "MEMORY").write_text("MemTotal:       8000 kB\nMemAvailable:   1000 kB\nHugePages_Total:   0\n")
    (tmp_path / "MAPS").write_text("one\n" * 20)
    (tmp_path / "MOST_MAPS").write_text("40\n")
    monkeypatch.setattr(programs, "FEW", 4)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("MEMORY", "MemTotal:  8000 kB\nMemAvailable:  999 kB\n"),
        ("memory.current", "7501\n"),
        ("MAPS", "one\n" * 21),
        ("MOST_MAPS", "39\n"),
    ],
)
def test_fewer_programs_stay_when_memory_or_maps_are_short(system: Path, name: str, short: str) -> None:
    def counts(least: int) -> list[int]:
        found = []
        for budget in range(least, least + 5):
            kvjax.generate(decoder(), [[1, 2, 3]], policy=f"knorm:budget={budget}", max_new_tokens=2)
            found.append(programs.count())
        return found

    found = counts(8)
    (system / name).write_text("much")  # nothing that could be read
    found += counts(13)
    assert found == sorted(found)
    (system / name).write_text(short)
    assert max(counts(18)[1:]) <= 4 + 4  # a call adds a few to what it finds


def test_what_the_system_says(system: Path) -> None:
    assert (host_limits.available(), host_limits.maps_taken()) == (1 / 8, 1 / 2)
    (system / "memory.stat").write_text("anon 6500\ninactive_file 0\n")
    assert host_limits.available() == 1 / 16
    (system / "memory.max").write_text("max\n")
    assert host_limits.available() == 1 / 8
    for path in system.iterdir():
        path.unlink()
    assert (host_limits.available(), host_limits.maps_taken()) == (1, 0)


@pytest.mark.slow
@pytest.mark.usefixtures("bounded")
def test_a_stream_goes_on_while_its_programs_are_forgotten() -> None:
    rows, options = [[1, 2, 3]], {"policy": "knorm:budget=8", "max_new_tokens": 4, "eos": ()}
    expected = kvjax.generate(decoder(), rows, **options).tokens[0].tolist()
    found = []
    for piece in kvjax.stream(decoder(), rows, **options):
        found += piece.tokens.tolist()
        programs.keep(1)
        programs.make_room()
    assert found == expected


@pytest.mark.parametrize("most", [0, -1, 1.5, True, None])
def test_limits_that_are_none(most: object) -> None:
    with pytest.raises(ValueError, match=f"most={most}: expected an integer in 1 "):
        programs.keep(most)
