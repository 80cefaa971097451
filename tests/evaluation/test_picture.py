"""Names at the ends of lines do not overlap; the README's picture has what the published runs have."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvjax.evaluation.picture import Place, accuracy_by_memory, bars, spread
from kvjax.evaluation.report.results import read_results


@pytest.mark.parametrize(
    ("values", "gap", "places"),
    [
        ([10, 50, 90], 5, [10, 50, 90]),
        ([50, 50, 50], 5, [50, 55, 60]),
        ([99, 100, 100], 5, [90, 95, 100]),
        ([0, 0, 0, 0], 50, [0, 100 / 3, 200 / 3, 100]),  # too little room: evenly
        ([], 5, []),
    ],
)
def test_places_of_names_are_apart_and_within_the_panel(values: list[float], gap: float, places: list[float]) -> None:
    np.testing.assert_allclose(spread(values, gap, 0, 100), places, atol=1e-9)


def test_places_of_the_readmes_picture() -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib (the extra `plot`)")
    from benchmarks.draw_accuracy_by_memory import NAMES, QUESTION, RUNS, place_of

    (results,) = read_results(RUNS)
    whole = results.full(QUESTION)
    assert whole is not None
    assert place_of(whole) == (pytest.approx(101.44992), (1, 1, 1))
    for name in NAMES:
        cells = results.of(name, QUESTION)
        assert [cell.name.budget for cell in cells] == [0.5, 0.25, 0.125]
        for cell, (megabytes, _) in zip(cells, map(place_of, cells), strict=True):
            assert megabytes == pytest.approx(101.44992 * cell.name.budget, rel=1e-3)


def test_a_mean_beside_its_interval_by_the_last_digit_is_drawn(tmp_path: Path) -> None:
    """Where all answers to seven tasks are right, their mean is 1, and the sum of seven sevenths may be less."""
    pytest.importorskip("matplotlib", reason="pictures need matplotlib (the extra `plot`)")
    least = 1 - 2**-52
    places = [Place("above", 1e6, 1.0, least, least), Place("below", 2e6, least, 1.0, 1.0)]
    accuracy_by_memory(tmp_path / "a.png", {"both": places}, score="exact")
    assert (tmp_path / "a.png").stat().st_size > 0
    assert bars([(0.5, 0.25, 1.0), (0.7, 0.8, 0.9)]) == [[25, 0], [50, pytest.approx(20)]]
