"""The figure of `draw`. This module needs matplotlib."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from matplotlib.backends.backend_agg import FigureCanvasAgg  # needs no display and no global state
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

WIDTH, DPI = 9.0, 100  # inches; pixels per inch
COLUMNS = 700  # at most: each has a pixel
LINED = 16  # layers at most between which lines have room


class Picture(Figure):
    """A figure that a notebook shows without pyplot."""

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()


def strip(shares: Float[np.ndarray, "L N"], positions: range, texts: Sequence[str] | None, heads: int) -> Picture:
    """A row per layer and a column per position.

    Args:
        shares: the share of kv heads that retain each position.
        positions: the N positions.
        texts: the label of each position. Without them the axis has numbers.
        heads: the number of kv heads.
    """
    layers = len(shares)
    tall = max(min(0.25 * layers, 6.0), 0.7)  # the strip, in inches
    figure = Picture(figsize=(WIDTH, tall + (1.2 if texts else 0.8)), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    first = np.arange(0, len(positions), -(-len(positions) // COLUMNS))  # of the positions of each column
    means = np.add.reduceat(shares, first, axis=1) / np.diff(first, append=len(positions))
    edges = positions.start - 0.5 + np.append(first, len(positions))
    image = axes.pcolormesh(edges, np.arange(layers + 1) - 0.5, means, cmap="Blues", vmin=0, vmax=1)
    axes.invert_yaxis()
    if layers <= LINED:
        for layer in range(1, layers):
            axes.axhline(layer - 0.5, color="white", linewidth=2)
    axes.set_ylabel("layer")
    axes.yaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
    axes.tick_params(axis="y", length=0)
    axes.spines[:].set_color("0.7")
    if texts:
        axes.set_xticks(list(positions), texts, rotation=90, fontsize=8, parse_math=False)
        axes.tick_params(axis="x", length=0)
    else:
        axes.set_xlabel("position")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    bar = figure.colorbar(image, ax=axes, pad=0.01, aspect=12 * tall, label=f"of {heads} kv heads")
    bar.set_ticks([0, 0.5, 1], labels=["none", "half", "all"])
    return figure
