"""A sweep keeps the programs of few policies, and its answers do not depend on that."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import kvjax
from kvjax.decoding.sampling import Greedy
from kvjax.evaluation import programs
from kvjax.evaluation.asking import Asker
from kvjax.evaluation.batches import batches, readings
from kvjax.evaluation.tasks.vocabulary import WORDS, tokenizer
from kvjax.policies import parse
from tests.evaluation.test_asking import item
from tests.tiny import decoder

MOST = 16


@pytest.fixture
def bounded() -> Iterator[None]:
    """The limit is MOST, and no programs are counted yet."""
    programs.keep(1)
    programs.make_room("other tests")
    programs.keep(MOST)
    yield
    programs.keep(2**31 - 1)


@jax.jit
def one_program(x: jax.Array) -> jax.Array:
    return x + 1


def forgotten(subject: int, compiled: list[str]) -> bool:
    """Whether a program is compiled again once there is room for the programs of a subject."""
    one_program(jnp.ones(3))
    compiled.clear()
    programs.make_room(subject)
    one_program(jnp.ones(3))
    return any("one_program" in name for name in compiled)


@pytest.mark.long
@pytest.mark.usefixtures("bounded")
def test_all_programs_are_forgotten_at_the_limit(compiled: list[str]) -> None:
    found = [i for i in range(3 * MOST) if forgotten(i, compiled)]
    assert found == [MOST - 1, 2 * MOST - 1, 3 * MOST - 1]  # the fixture's subject is the first of all
    assert not any(forgotten(3 * MOST - 1, compiled) for _ in range(2 * MOST))  # a subject counts once


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the system says of its memory and of the process's maps: just enough of both."""
    for name in ("MEMORY", "MAPS", "MOST_MAPS"):
        monkeypatch.setattr(programs, name, tmp_path / name)
    monkeypatch.setattr(programs, "CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("8000\n")
    (tmp_path / "memory.current").write_text("7500\n")
    (tmp_path / "memory.stat").write_text("anon 6000\ninactive_file 500\n")
    (tmp_path / "MEMORY").write_text("MemTotal:       8000 kB\nMemAvailable:   1000 kB\nHugePages_Total:   0\n")
    (tmp_path / "MAPS").write_text("one\n" * 20)
    (tmp_path / "MOST_MAPS").write_text("40\n")
    return tmp_path


@pytest.mark.long
@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("MEMORY", "MemTotal:  8000 kB\nMemAvailable:  999 kB\n"),
        ("memory.current", "7501\n"),
        ("MAPS", "one\n" * 21),
        ("MOST_MAPS", "39\n"),
    ],
)
def test_fewer_programs_stay_when_memory_or_maps_are_short(
    system: Path, compiled: list[str], name: str, short: str
) -> None:
    assert not any(forgotten(subject, compiled) for subject in range(4))
    (system / name).write_text("much")  # nothing that could be read
    assert not any(forgotten(subject, compiled) for subject in range(4, 8))
    (system / name).write_text(short)
    assert [forgotten(subject, compiled) for subject in range(8, 14)] == [True, False] * 3


def test_what_the_system_says(system: Path) -> None:
    assert (programs.available(), programs.maps_taken()) == (1 / 8, 1 / 2)
    (system / "memory.stat").write_text("anon 6500\ninactive_file 0\n")
    assert programs.available() == 1 / 16
    (system / "memory.max").write_text("max\n")
    assert programs.available() == 1 / 8
    for path in system.iterdir():
        path.unlink()
    assert (programs.available(), programs.maps_taken()) == (1, 0)


@pytest.mark.slow
@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("question", ["after", "before"])
def test_answers_of_a_sweep_that_forgets_programs(question: str, compiled: list[str]) -> None:
    """Between the caches of one prefill, and while rows are refilled."""
    ask = Asker(decoder(vocab=len(WORDS)), tokenizer(), Greedy())
    items = [item("a", 41, 5), item("b", 47, 7), item("c", 33, 4)]
    policies = [parse(f"knorm:budget={budget}") for budget in (8, 9, 10)]
    batch, *_ = batches(readings(items, question), lambda _: 4)

    def answers() -> list:
        padded = [[a.tokens for mine in found for a in mine] for _, found, _ in ask(batch, policies)]
        refilled = {
            (e.reading.asks[0].item.example.id, tuple(e.answer.tokens)) for e in ask.refilled([batch], policies[0], 1)
        }
        return [padded, refilled]

    expected = answers()
    compiled.clear()
    assert answers() == expected
    assert not compiled
    programs.keep(1)
    programs.make_room("another sweep")
    assert answers() == expected
    assert sum("decode" in name for name in compiled) == len(policies)
    assert any("advance" in name for name in compiled)


@pytest.mark.slow
def test_a_stream_goes_on_while_its_programs_are_forgotten() -> None:
    rows, options = [[1, 2, 3]], {"policy": "knorm:budget=8", "max_new_tokens": 4, "eos": ()}
    expected = kvjax.generate(decoder(), rows, **options).tokens[0].tolist()
    found = []
    for piece in kvjax.stream(decoder(), rows, **options):
        found += piece.tokens.tolist()
        jax.clear_caches()
    assert found == expected


@pytest.mark.parametrize("most", [0, -1, 1.5, True, None])
def test_limits_that_are_none(most: object) -> None:
    with pytest.raises(ValueError, match=f"most={most}: expected an integer in 1 "):
        programs.keep(most)
