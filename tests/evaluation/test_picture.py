"""Names at the ends of lines do not overlap; means and intervals are read from either form of a table."""

from __future__ import annotations

import numpy as np
import pytest

from kvjax.evaluation.picture import spread


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
