"""`kvjax measure-statistics`: measures the statistics of queries that some policies read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from kvjax.cli.console import note, print_json
from kvjax.cli.loading import load_with_texts
from kvjax.cli.options import AsJson, Batch, Batches, Data, Dtype, Length, Mesh, Model
from kvjax.cli.progress import Bar


def measure_statistics(
    model: Model,
    data: Data,
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    batches: Batches = 100,
    batch: Batch = 1,
    length: Length = 1024,
    sinks: Annotated[int, typer.Option(help="The number of first tokens of each text that do not count.")] = 4,
    seed: Annotated[int, typer.Option(help="The seed of the texts.")] = 0,
    mesh: Mesh = "1x1",
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Measure what qfilter, expected_attention_stats and triattention read, e.g. --data texts/ --out statistics/."""
    import numpy as np

    from kvjax.files.writing import check_folder
    from kvjax.policy import check_integer
    from kvjax.statistics.files import write_statistics
    from kvjax.statistics.measure import measured

    check_integer("sinks", sinks, least=0)
    check_integer("seed", seed, least=0)
    if length <= sinks + 1:
        raise ValueError(f"length={length}: expected an integer > sinks + 1 = {sinks + 1}")
    check_folder(out, overwrite=False, argument=None)
    params, _, stream = load_with_texts(model, dtype, mesh, data, length)
    with Bar("batches") as bar:
        bar.begin(batches)
        bar.at("measuring")

        def drawn() -> Iterator[Any]:
            for i in range(batches):
                yield stream.windows(batch, length, np.random.default_rng([seed, i]))
                bar.advance()

        statistics = measured(params, drawn(), sinks)
    facts = {
        "model": model,
        "data": str(data),
        "texts": f"{batches * batch:,} of {length:,} tokens, drawn with seed {seed}",
        "first tokens of each text that do not count": sinks,
    }
    write_statistics(statistics, out, facts=facts)
    if as_json:
        shapes = {name: list(np.shape(array)) for name, array in statistics.items()}
        print_json(
            {"model": model, "data": str(data), "out": str(out), "tokens": batches * batch * length}
            | {"statistics": shapes}
        )
        return
    note(f"{out} has the statistics; kvjax.with_statistics(params, {str(out)!r}) attaches them")
