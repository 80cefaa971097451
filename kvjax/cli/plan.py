"""`kvjax plan`: prints how many rows of an engine fit into given memory under each policy."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from kvjax.checks import bytes_text
from kvjax.cli.console import numbers_table, print_json
from kvjax.cli.loading import read_model
from kvjax.cli.options import AsJson, Model, NewTokens


def plan(
    path: Model,
    memory: Annotated[str, typer.Option(help="The memory of the device, such as 80GB or 16GiB.")],
    policy: Annotated[list[str] | None, typer.Option(help="Policy; may be repeated. Default: full.")] = None,
    max_prompt: Annotated[int, typer.Option(help="The most tokens that a prompt may have.")] = 8192,
    max_new_tokens: NewTokens = 1024,
    chunk: Annotated[int, typer.Option(help="The most tokens of a prompt that are read between two steps.")] = 512,
    dtype: Annotated[str | None, typer.Option(help="Dtype of weights and cache. Default: the stored dtype.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show how many rows of an engine fit into the memory of one device.

    The command reads the config and the headers of the weights, but no weights. Sizes are exact but for activations,
    which the compiler decides: kvjax.Engine counts them when it starts.
    """
    from kvjax import policies
    from kvjax.engine import Footprint
    from kvjax.engine.memory import bytes_of
    from kvjax.engine.plans import Plans
    from kvjax.engine.sizes import Sizes
    from kvjax.plan import check_sizes

    most = bytes_of(memory)
    check_sizes(max_prompt=max_prompt, max_new_tokens=max_new_tokens, chunk=chunk)
    config, _, parameters, _, held = read_model(path, dtype, quiet=as_json)
    sizes = Sizes.of(1, max_prompt, max_new_tokens, chunk=chunk)
    found: list[dict[str, Any]] = []
    for text in policy or ["full"]:
        plans = Plans.of(config, policies.parse(text), sizes, held, None, ())
        footprint = Footprint.of(config, plans, parameters * held.itemsize)
        found.append(
            {
                "policy": text,
                "weights": footprint.weights,
                "bytes_per_row": footprint.row,
                "prompt": footprint.prompt,
                "rows": footprint.rows_within(most),
            }
        )
    if as_json:
        sizes_asked = {"max_prompt": max_prompt, "max_new_tokens": max_new_tokens, "chunk": sizes.chunk}
        print_json({"path": str(path), "memory": most, "dtype": str(held), **sizes_asked, "plans": found})
        return
    title = f"Rows of {max_prompt:,} + {max_new_tokens:,} tokens in {bytes_text(most)}"
    table = numbers_table(title, "policy", "weights", "prompt", "per row", "rows", no_wrap=True)
    for one in found:
        sizes_text = [bytes_text(one[name]) for name in ("weights", "prompt", "bytes_per_row")]
        table.add_row(escape(one["policy"]), *sizes_text, f"{one['rows']:,}")
    console = Console(highlight=False)
    console.print(table)
    console.print("activations of a chunk come on top; kvjax.Engine counts them when it starts", style="dim")
