"""The number of compiled programs is bounded, and programs of the caller stay."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import programs
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


@pytest.mark.slow
def test_fewer_programs_stay_when_memory_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "meminfo"
    monkeypatch.setattr(programs, "MEMORY", info)
    monkeypatch.setattr(programs, "FEW", 4)

    def counts(available: str) -> list[int]:
        info.write_text(f"MemTotal:       8000 kB\nMemFree:          10 kB\n{available}HugePages_Total:   0\n")
        found = []
        for budget in range(8, 13):
            kvjax.generate(decoder(), [[1, 2, 3]], policy=f"knorm:budget={budget}", max_new_tokens=2)
            found.append(programs.count())
        return found

    for plenty in ("MemAvailable:  1000 kB\n", "", "MemAvailable:  much kB\n"):
        found = counts(plenty)
        assert found == sorted(found)
    info.unlink()
    assert programs._available() == 1
    assert max(counts("MemAvailable:   999 kB\n")[1:]) <= 4 + 4  # a call adds a few to what it finds


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
