"""`kvjax train-gates`: trains the gates that learned policies read."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kvjax.cli.console import note, print_json
from kvjax.cli.loading import load_with_texts
from kvjax.cli.options import AsJson, Batch, Batches, Data, Dtype, Length, Mesh, Model, as_size
from kvjax.cli.progress import Bar


class Method(StrEnum):
    """The methods whose gates can be trained."""

    kvzap = "kvzap"
    fastkvzip = "fastkvzip"
    duo_attention = "duo_attention"
    lookaheadkv = "lookaheadkv"
    restorekv = "restorekv"


def train_gates(
    model: Model,
    method: Annotated[Method, typer.Option(help="The policy that will read the gates.")],
    data: Data,
    out: Annotated[Path, typer.Option(help="The folder to write; an interrupted run in it goes on.")],
    steps: Batches = 1000,
    batch: Batch = 1,
    length: Length = 2048,
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
    tokens: Annotated[
        int | None, typer.Option(help="lookaheadkv, restorekv: learned tokens. Default: 32, restorekv: 8.")
    ] = None,
    rank: Annotated[int | None, typer.Option(help="lookaheadkv, restorekv: rank of the adapters. Default: 8.")] = None,
    answer: Annotated[
        int | None, typer.Option(help="lookaheadkv, restorekv: tokens of the model's answer to a text. Default: 32.")
    ] = None,
    question: Annotated[
        int | None,
        typer.Option(help="restorekv: last tokens of a text, which are read behind the compressed cache. Default: 16."),
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="restorekv: the policy that compresses texts. Default: kvzip:budget=0.1.")
    ] = None,
    distinct: Annotated[
        int | None,
        typer.Option(
            help="The number of different batches, which steps use in turn; OUT holds them until the run ends. "
            "Default: each step draws its own."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="The seed of the initial weights and of the texts.")] = 0,
    save_every: Annotated[
        int, typer.Option(callback=as_size, help="The number of steps between two checkpoints of the run.")
    ] = 100,
    mesh: Mesh = "1x1",
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Train the gates of a learned policy, e.g. --method kvzap --data texts/ --out gates/."""
    from kvjax.gates.methods import TRAININGS, check_options
    from kvjax.gates.objective import Recipe
    from kvjax.gates.training import check_training, train

    training = TRAININGS[method.value]
    rate = training.learning_rate if learning_rate is None else learning_rate
    recipe = Recipe(steps, batch, length, rate, seed, distinct)
    options: dict[str, int | str | None] = {"inner": inner, "sinks": sinks, "recent": recent, "tokens": tokens}
    options |= {"rank": rank, "answer": answer, "question": question, "base": base}
    given = {name: value for name, value in options.items() if value is not None}
    check_options(method.value, given)
    check_training(out)
    params, tokenizer, stream = load_with_texts(model, dtype, mesh, data, length)
    objective = training.objective(params, recipe, stream, tokenizer, **given)
    facts = {"model": model, "data": str(data), "texts": stream.facts}
    lines: list[Mapping[str, float]] = []
    with Bar("steps") as bar:
        bar.begin(steps)

        def report(line: Mapping[str, float]) -> None:
            bar.at(f"loss {line['loss']:.4g}")
            bar.reach(int(line["step"]))  # an interrupted run goes on
            lines.append(line)

        gates = train(params, objective, recipe, out, facts=facts, save_every=save_every, report=report)
    if as_json:
        document = {"model": model, "data": str(data), "out": str(out), "method": method.value}
        print_json(document | {"steps": steps, "loss": lines[-1]["loss"] if lines else None})
    elif not gates.form.attached:
        note(f"{out} has the gates; the policy {method.value}:gates={out} reads them")
    else:
        note(f"{out} has the gates; kvjax.with_gates(params, {str(out)!r}) attaches them")
