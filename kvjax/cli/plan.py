"""`kvjax plan`: prints how many rows of an engine fit into given memory under each policy."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape

from kvjax.checks import bytes_text, counted
from kvjax.cli.console import numbers_table, print_json, show_warning
from kvjax.cli.costs import footprint_of, recommended
from kvjax.cli.loading import read_model
from kvjax.cli.options import AsJson, Model, NewTokens, as_size
from kvjax.cli.progress import Line


def plan(
    path: Model,
    memory: Annotated[
        str | None, typer.Option(help="The memory of the device, such as 80GB or 16GiB. Default: this device's.")
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="Policy; may be repeated. Default: full and those that docs/guide/choosing.md recommends."),
    ] = None,
    max_prompt: Annotated[int, typer.Option(callback=as_size, help="The most tokens that a prompt may have.")] = 8192,
    max_new_tokens: NewTokens = 1024,
    chunk: Annotated[
        int, typer.Option(callback=as_size, help="The most tokens that are read between two steps.")
    ] = 512,
    dtype: Annotated[str | None, typer.Option(help="Dtype of weights and cache. Default: the stored dtype.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show how many rows of an engine, which answer together, fit into the memory of one device.

    The command reads the config and the headers of the weights, but no weights. Sizes are exact but for activations,
    which the compiler decides: kvjax.Engine counts them when it starts. Default budgets are 1/4 of the prompt.
    """
    from kvjax import policies
    from kvjax.engine.memory import bytes_of, together
    from kvjax.policy import named
    from kvjax.request.positions import beyond

    most = _own_memory() if memory is None else bytes_of(memory)
    for text in policy or ():
        policies.parse(text)
    config, _, parameters, _, held = read_model(path, dtype)
    found, footprints = list[dict[str, Any]](), []
    with Line("planning"):
        for text in policy or recommended(max_prompt, config):
            size = parameters * held.itemsize
            with named(text):
                footprint = footprint_of(
                    config, text, size, held, length=max_prompt, new_tokens=max_new_tokens, chunk=chunk
                )
            footprints.append(footprint)
            found.append(
                {
                    "policy": text,
                    "weights": footprint.weights,
                    "bytes_per_row": footprint.row,
                    "prompt": footprint.prompt,
                    "rows": footprint.rows_within(most),
                }
            )
    if (told := beyond(config, max_prompt + max_new_tokens, "requests may reach")) is not None:
        show_warning(told)
    of_each = together(footprints).rows_within(most) if policy and len(policy) > 1 else None
    if as_json:
        asked = {"max_prompt": max_prompt, "max_new_tokens": max_new_tokens, "chunk": chunk}
        plans = {"plans": found, "rows_of_each": of_each}
        print_json({"path": str(path), "memory": most, "dtype": str(held), **asked, **plans})
        return
    _show(found, f"{max_prompt:,} + {max_new_tokens:,} tokens", max_prompt + max_new_tokens, most, of_each)


def _own_memory() -> int:
    """The bytes of this device. Raises ValueError if it does not state them."""
    import jax

    from kvjax.runtime.memory import device_memory

    most = device_memory(jax.local_devices()[:1])
    if most is None:
        raise ValueError("this device does not state its memory: expected --memory, such as --memory 80GB")
    return most


def _show(found: list[dict[str, Any]], row: str, tokens: int, memory: int, of_each: int | None) -> None:
    """Prints the answer for the first policy, for the one with most rows and for all together, then a table."""
    console = Console(highlight=False)
    best = max(found, key=lambda one: one["rows"])
    console.print(f"{bytes_text(memory)} hold, beside {bytes_text(found[0]['weights'])} of weights, rows of {row}:")
    for one in [found[0]] if best is found[0] else [found[0], best]:
        rows = one["rows"]
        console.print(f"  {counted(rows, 'row')}, {rows * tokens:,} tokens, under {escape(one['policy'])}")
    if of_each is not None:
        console.print(f"  {counted(of_each, 'row')} under each of these policies, on one server")
    table = numbers_table(None, "policy", "rows", "per row", "prompt", no_wrap=True)
    table.box, table.pad_edge = SIMPLE_HEAD, False
    for one in found:
        sizes = [bytes_text(one[name]) for name in ("bytes_per_row", "prompt")]
        table.add_row(escape(one["policy"]), f"{one['rows']:,}", *sizes)
    console.print(table)
    console.print("prompt: what is read at a time; activations of a chunk come on top", style="dim")
