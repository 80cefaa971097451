"""`kvjax train-gates`: trains the gates that learned policies read."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kvjax.cli.console import note, working
from kvjax.cli.progress import Bar
from kvjax.compiled import keep_compiled


class Method(StrEnum):
    """The methods whose gates can be trained."""

    kvzap = "kvzap"
    fastkvzip = "fastkvzip"
    duo_attention = "duo_attention"


def train_gates(
    model: Annotated[str, typer.Argument(help="Checkpoint folder, GGUF file, or repository on the hub.")],
    method: Annotated[Method, typer.Option(help="The policy that will read the gates.")],
    data: Annotated[Path, typer.Option(help="A text file, or a folder with files *.txt.")],
    out: Annotated[Path, typer.Option(help="The folder to write; an interrupted run in it goes on.")],
    steps: Annotated[int, typer.Option(help="The number of batches.")] = 1000,
    batch: Annotated[int, typer.Option(help="The number of texts per batch.")] = 1,
    length: Annotated[int, typer.Option(help="The number of tokens per text.")] = 2048,
    learning_rate: Annotated[
        float | None,
        typer.Option(help="The largest learning rate. Default: 0.02 of duo_attention, 0.001 of the others."),
    ] = None,
    inner: Annotated[
        int | None, typer.Option(help="kvzap: width of the hidden layer; 0: linear. Default: hidden size / 8.")
    ] = None,
    sinks: Annotated[
        int | None, typer.Option(help="duo_attention: first tokens that streaming heads see. Default: 128.")
    ] = None,
    recent: Annotated[
        int | None, typer.Option(help="duo_attention: most recent tokens that streaming heads see. Default: 256.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The seed of the initial weights and of the texts.")] = 0,
    save_every: Annotated[int, typer.Option(help="The number of steps between two checkpoints of the run.")] = 100,
    mesh: Annotated[
        str, typer.Option(metavar="DATAxMODEL", help="Spread the model over devices, such as 1x4 for four.")
    ] = "1x1",
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; the default is the dtype of the stored weights.")
    ] = None,
) -> None:
    """Train the gates of a learned policy, e.g. --method kvzap --data texts/ --out gates/."""
    from kvjax.checkpoint import load_named, mesh_sizes
    from kvjax.checks import check_size
    from kvjax.gates.methods import TRAININGS, check_options
    from kvjax.gates.objective import Recipe
    from kvjax.gates.texts import read_stream
    from kvjax.gates.training import check_training, train

    training = TRAININGS[method.value]
    recipe = Recipe(steps, batch, length, training.learning_rate if learning_rate is None else learning_rate, seed)
    check_size("save_every", save_every)
    options = {"inner": inner, "sinks": sinks, "recent": recent}
    given = {name: value for name, value in options.items() if value is not None}
    check_options(method.value, given)
    check_training(out)
    keep_compiled()
    with working(f"loading {model}"):
        params, tokenizer = load_named(model, dtype, mesh_sizes(mesh))
    if length > params.config.max_positions:
        raise ValueError(f"length={length}: expected at most {params.config.max_positions}, the model's positions")
    stream = read_stream(data, tokenizer, least=length)
    objective = training.objective(params, recipe, stream, tokenizer, **given)
    facts = {"model": model, "data": str(data)}
    with Bar("steps") as bar:
        bar.begin(steps)

        def report(line: Mapping[str, float]) -> None:
            bar.at(f"loss {line['loss']:.4g}")
            bar.advance()

        gates = train(params, objective, recipe, out, facts=facts, save_every=save_every, report=report)
    if gates.form.score is None:
        note(f"{out} has the gates; the policy {method.value}:gates={out} reads them")
    else:
        note(f"{out} has the gates; kvjax.with_gates(params, {str(out)!r}) attaches them")
