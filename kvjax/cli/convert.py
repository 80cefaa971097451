"""`kvjax convert`: converts a checkpoint to another format or dtype."""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kvjax.checks import bytes_text
from kvjax.cli.console import note, print_json, stderr
from kvjax.cli.options import AsJson, Dtype
from kvjax.cli.progress import Line


class Form(StrEnum):
    """The formats of a checkpoint."""

    hf = "hf"
    orbax = "orbax"


def convert(
    source: Annotated[
        str,
        typer.Argument(metavar="IN", help="Checkpoint folder in either format, GGUF file, or repository on the hub."),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    to: Annotated[Form, typer.Option(help="hf: config.json and safetensors; orbax: what kvjax.save writes.")] = Form.hf,
    dtype: Dtype = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the checkpoint in OUT.")] = False,
    as_json: AsJson = False,
) -> None:
    """Convert a checkpoint to another format or dtype, on the CPU."""
    from kvjax.checkpoint import dtype_named, plan_conversion

    started = time.perf_counter()
    with Line(f"reading {source}"):
        plan = plan_conversion(source, out, to.value, dtype_named(dtype), overwrite)
    if not as_json:
        stderr().print(
            f"{plan.parameters:,} parameters, {bytes_text(plan.parameter_bytes)} in {plan.dtype}; "
            f"the conversion needs about {bytes_text(plan.peak_bytes)} of memory",
            soft_wrap=True,
        )
    with Line("converting"):
        plan.run()
    seconds = time.perf_counter() - started
    if as_json:
        print_json(
            {
                "source": str(plan.source),
                "from": plan.form,
                "out": str(plan.out),
                "to": plan.to,
                "dtype": str(plan.dtype),
                "parameters": plan.parameters,
                "parameter_bytes": plan.parameter_bytes,
                "peak_bytes": plan.peak_bytes,
                "seconds": seconds,
            }
        )
    else:
        note(f"{out} was written in {seconds:.3g} s")
