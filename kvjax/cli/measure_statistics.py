"""`kvjax measure-statistics`: measures the statistics of queries that some policies read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from kvjax.cli.console import note, working
from kvjax.cli.progress import Bar
from kvjax.compiled import keep_compiled


def measure_statistics(
    model: Annotated[str, typer.Argument(help="Checkpoint folder, GGUF file, or repository on the hub.")],
    data: Annotated[Path, typer.Option(help="A text file, or a folder with files *.txt.")],
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    batches: Annotated[int, typer.Option(help="The number of batches.")] = 100,
    batch: Annotated[int, typer.Option(help="The number of texts per batch.")] = 1,
    length: Annotated[int, typer.Option(help="The number of tokens per text.")] = 1024,
    sinks: Annotated[int, typer.Option(help="The number of first tokens of each text that do not count.")] = 4,
    seed: Annotated[int, typer.Option(help="The seed of the texts.")] = 0,
    mesh: Annotated[
        str, typer.Option(metavar="DATAxMODEL", help="Spread the model over devices, such as 1x4 for four.")
    ] = "1x1",
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; the default is the dtype of the stored weights.")
    ] = None,
) -> None:
    """Measure what qfilter, expected_attention_stats and triattention read, e.g. --data texts/ --out statistics/."""
    import numpy as np

    from kvjax.checkpoint import load_named, mesh_sizes
    from kvjax.checks import check_size
    from kvjax.gates.texts import read_stream
    from kvjax.policy import check_integer
    from kvjax.statistics.files import write_statistics
    from kvjax.statistics.measure import measured
    from kvjax.writing import check_folder

    for name, value in {"batches": batches, "batch": batch, "length": length}.items():
        check_size(name, value)
    check_integer("sinks", sinks, least=0)
    check_integer("seed", seed, least=0)
    if length <= sinks + 1:
        raise ValueError(f"length={length}: expected an integer > sinks + 1 = {sinks + 1}")
    check_folder(out, overwrite=False, argument="another folder")
    keep_compiled()
    with working(f"loading {model}"):
        params, tokenizer = load_named(model, dtype, mesh_sizes(mesh))
    if length > params.config.max_positions:
        raise ValueError(f"length={length}: expected at most {params.config.max_positions}, the model's positions")
    stream = read_stream(data, tokenizer, least=length)
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
    note(f"{out} has the statistics; kvjax.with_statistics(params, {str(out)!r}) attaches them")
