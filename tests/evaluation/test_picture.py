"""Names at the ends of lines do not overlap; means and intervals are read from either form of a table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvjax.evaluation.picture import Place, accuracy_by_memory, bars, spread


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


def test_means_and_intervals_of_the_readmes_picture() -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib (the extra `plot`)")
    from benchmarks.draw_accuracy_by_memory import ends_of

    assert ends_of("83.3 ± 20.8") == (83.3, 62.5, 100)
    assert ends_of("83.3 (50.0 to 100.0)") == (83.3, 50, 100)


def test_a_mean_beside_its_interval_by_the_last_digit_is_drawn(tmp_path: Path) -> None:
    """Where all answers to seven tasks are right, their mean is 1, and the sum of seven sevenths may be less."""
    pytest.importorskip("matplotlib", reason="pictures need matplotlib (the extra `plot`)")
    least = 1 - 2**-52
    places = [Place("above", 1e6, 1.0, least, least), Place("below", 2e6, least, 1.0, 1.0)]
    accuracy_by_memory(tmp_path / "a.png", {"both": places}, score="exact")
    assert (tmp_path / "a.png").stat().st_size > 0
    assert bars([(0.5, 0.25, 1.0), (0.7, 0.8, 0.9)]) == [[25, 0], [50, pytest.approx(20)]]
