"""`kvjax info`: prints a model's architecture, the memory of its cache under each policy, and the kernels in use."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from functools import partial
from itertools import groupby, product
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvjax.checks import bytes_text
from kvjax.cli.choices import CHOICES
from kvjax.cli.console import numbers_table, print_json, show_warning
from kvjax.cli.costs import footprint_of, left_out, presets, recommended
from kvjax.cli.loading import read_model
from kvjax.cli.options import AsJson, Mesh, Model, NewTokens
from kvjax.cli.progress import Line

if TYPE_CHECKING:
    from kvjax.models import DecoderConfig


def info(
    path: Model,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="Policy; may be repeated. Default: full and those that docs/guide/choosing.md recommends."),
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(help="Number of prompts per batch; may be repeated. Default: DATA."),
    ] = None,
    length: Annotated[
        list[int] | None,
        typer.Option(help="Number of tokens of a prompt; may be repeated. Default: 8192 or the model's limit."),
    ] = None,
    max_new_tokens: NewTokens = 512,
    mesh: Mesh = "1x1",
    dtype: Annotated[str | None, typer.Option(help="Dtype of the cache. Default: the stored dtype.")] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Show all presets, what each recommended policy is for, and all kernels.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show what a model's cache costs under each policy, the rows that fit into this device, and the kernels.

    The command reads the config and the headers of the weights, but no weights. Budgets are 1/4 of the prompt.
    """
    import jax

    import kvjax
    from kvjax.checkpoint import mesh_sizes
    from kvjax.pallas_kernels import implementations
    from kvjax.plan import bytes_per_device
    from kvjax.policy import named
    from kvjax.request.positions import beyond
    from kvjax.runtime.memory import device_memory

    config, card, parameters, stored, held = read_model(path, dtype)
    data, model = mesh_sizes(mesh)
    lengths = length or [min(8192, config.max_positions)]
    per_token = config.bytes_per_token(held)
    memory = device_memory(jax.local_devices()[:1])
    plans = []
    with Line("planning"):
        for rows, size in product(batch or [data], lengths):
            planned = partial(kvjax.plan_cache, config, batch=rows, length=size, new_tokens=max_new_tokens, dtype=held)
            of_full = planned(policy=kvjax.policies.full()).nbytes
            for text in policy or (presets if everything else recommended)(size, config):
                chosen = kvjax.policies.parse(text)
                with named(text):
                    cache = planned(policy=chosen)
                fits = None
                if memory is not None and data * model == 1:
                    weights = parameters * held.itemsize
                    needed = footprint_of(config, text, weights, held, length=size, new_tokens=max_new_tokens)
                    fits = needed.rows_within(memory)
                plans.append(
                    {
                        "policy": text,
                        "batch": rows,
                        "length": size,
                        "slots": list(cache.entries.mean_slots),
                        "bytes": cache.nbytes,
                        "bytes_per_row": cache.nbytes // rows,
                        "bytes_per_device": bytes_per_device(cache, config, data=data, model=model),
                        "compression": of_full / cache.nbytes,
                        "rows": fits,
                    }
                )
    if (told := beyond(config, max(lengths), "a prompt reaches")) is not None:
        show_warning(told)
    document: dict[str, Any] = {
        "path": str(path),
        "family": config.family,
        "parameters": parameters,
        "stored": stored,
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "query_heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "window_heads": None if config.window_heads is None else config.window_heads._asdict(),
        "attention_sinks": config.attention_sinks,
        "attention_softcap": config.attention_softcap,
        "experts": None if config.mixture is None else asdict(config.mixture),
        "latent": None if config.latent is None else asdict(config.latent),
        "recurrence": None if config.recurrence is None else asdict(config.recurrence),
        "readers": None if config.readers is None else config.readers._asdict(),
        "vocabulary": config.vocab_size,
        "rope": _ropes(config),
        "windows": config.windows,
        "max_positions": config.max_positions,
        "end_tokens": card.end_tokens,
        "bos_token": card.bos_token,
        "pad_token": card.pad_token,
        "sampler": card.sampler,
        "suppressed": card.suppressed._asdict(),
        "not_applied": card.ignored,
        "cache_dtype": str(held),
        "kv_bytes_per_token": per_token,
        "new_tokens": max_new_tokens,
        "mesh": {"data": data, "model": model},
        "memory": memory,
        "plans": plans,
        "left_out": {str(size): left_out(size, config) for size in lengths} if everything and not policy else {},
        "choices": [choice._asdict() for choice in CHOICES],
        "kernels": {operation: chosen._asdict() for operation, chosen in implementations().items()},
    }
    if as_json:
        print_json(document)
    else:
        _show(document, config, everything)


def _ropes(config: DecoderConfig) -> str:
    """RoPE, and the number of layers of each kind if there are several."""
    kinds = Counter(str(config.rope_of(layer)) for layer in range(config.num_layers))
    if len(kinds) == 1:
        return str(config.rope)
    return "; ".join(f"{kind} in {count} of {config.num_layers} layers" for kind, count in kinds.items())


def _attention(config: DecoderConfig) -> list[str]:
    """Names where keys and values come from, if not from hidden states, and what changes the softmax."""
    latent = [] if config.latent is None else [f"from latents of {config.latent.rank} channels"]
    sinks = ["a learned sink per query head"] if config.attention_sinks else []
    softcap = config.attention_softcap
    return latent + sinks + ([f"logits capped at {softcap:g}"] if softcap is not None else [])


def _experts(config: DecoderConfig) -> str:
    """The experts of a layer, how many of them a token takes, and how many layers have some."""
    assert config.mixture is not None
    mixed = sum(map(config.has_experts, range(config.num_layers))) + config.num_recurrent
    shared = "" if config.mixture.shared is None else f" and one of {config.mixture.shared:,} columns for all"
    return (
        f"{config.mixture.experts} of {config.mixture.size:,} columns, {config.mixture.per_token} per token{shared}, "
        f"in {mixed} of {_layers(config)} layers"
    )


def _recurrent(config: DecoderConfig, dtype: str) -> str:
    """The number of recurrent layers, and the bytes of their states."""
    assert config.recurrence is not None
    return (
        f"{config.num_recurrent} of {_layers(config)} layers, with "
        f"{bytes_text(config.recurrence.nbytes(dtype))} of states per row, however long"
    )


def _readers(config: DecoderConfig) -> str:
    """The number of layers that have no entries, and the layers that they read."""
    read = ", ".join(map(str, sorted(set(config.sources))))
    return f"{len(config.sources)} of {_layers(config)} layers, which read the entries of the layers {read}"


def _layers(config: DecoderConfig) -> int:
    """The number of all layers, also those without entries."""
    return config.num_layers + config.num_recurrent + len(config.sources)


def _show(facts: dict[str, Any], config: DecoderConfig, everything: bool) -> None:
    console = Console(highlight=False)
    console.print(_facts(facts, config))
    devices = facts["mesh"]["data"] * facts["mesh"]["model"]
    for (batch, length), plans in groupby(facts["plans"], key=lambda plan: (plan["batch"], plan["length"])):
        title = f"Cache of {batch} x ({length:,} + {facts['new_tokens']:,}) tokens"
        console.print("", _costs(title, list(plans), batch, devices), sep="\n")
        if absent := facts["left_out"].get(str(length)):
            console.print(f"not shown (--json says why): {', '.join(absent)}", style="dim")
    if devices > 1:
        data, model = facts["mesh"]["data"], facts["mesh"]["model"]
        console.print("", f"on {devices} devices, data={data} x model={model}", sep="\n")
    elif facts["memory"] is not None:
        memory = bytes_text(facts["memory"])
        console.print(f"most rows: beside the weights in this device's {memory}, before activations", style="dim")
    if not everything:
        console.print("--all: every preset, which one suits which use, and every kernel", style="dim")
        return
    uses = Table(
        title="Which policy: docs/guide/choosing.md has the evidence", title_justify="left", title_style="bold"
    )
    uses.add_column("use", overflow="fold")
    uses.add_column("policy", no_wrap=True)  # to be copied
    for choice in CHOICES:
        uses.add_row(choice.use, choice.policy)
    console.print("", uses, sep="\n")
    kernels = Table(title="Kernels on this machine", title_justify="left", title_style="bold")
    for name in ("operation", "implementation", "reason"):
        kernels.add_column(name)
    for operation, chosen in facts["kernels"].items():
        kernels.add_row(operation, chosen["name"], escape(chosen["why"]))
    console.print("", kernels, sep="\n")


def _facts(facts: dict[str, Any], config: DecoderConfig) -> Table:
    """The model, in a few lines."""
    windows = sorted({window for window in config.windows if window})
    sliding = sum(window is not None for window in config.windows)
    kinds = " or ".join(f"{number} kv, of {size} channels" for number, size in config.kinds_of_heads)
    heads = [f"{config.num_heads} query, {kinds}", *_attention(config)]
    if windows:
        heads.append(f"a window of {', '.join(map(str, windows))} in {sliding} of {config.num_layers} layers")
    ends = ", ".join(map(str, facts["end_tokens"]))
    vocabulary = [
        f"{config.vocab_size:,} tokens",
        f"end tokens {ends}" if ends else "the tokenizer's end tokens",
        *([f"sampler {facts['sampler']}"] if facts["sampler"] else []),
    ]
    parameters = f"{facts['parameters']:,} parameters in {' and '.join(facts['stored'])}"
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column()
    for name, value in (
        (facts["family"], f"{parameters}, {_layers(config)} layers, {config.hidden_size:,} wide"),
        ("heads", "; ".join(heads)),
        *([("experts", _experts(config))] if config.mixture else []),
        *([("recurrent", _recurrent(config, facts["cache_dtype"]))] if config.recurrence else []),
        *([("readers", _readers(config))] if config.readers else []),
        ("positions", f"{config.max_positions:,}; RoPE with {facts['rope']}"),
        ("vocabulary", "; ".join(vocabulary)),
        *((f"suppressed {name}", ", ".join(map(str, ids))) for name, ids in facts["suppressed"].items() if ids),
        *([("not applied", ", ".join(facts["not_applied"]))] if facts["not_applied"] else []),
        (
            "KV cache",
            f"{bytes_text(facts['kv_bytes_per_token'])} per token in {facts['cache_dtype']}, retained in full",
        ),
        ("kernels", _kernels(facts["kernels"])),
    ):
        grid.add_row(name, value)
    return grid


def _costs(title: str, plans: list[dict[str, Any]], batch: int, devices: int) -> Table:
    """A row for each policy."""
    rows = all(plan["rows"] is not None for plan in plans)
    columns = [
        ("per row", lambda plan: bytes_text(plan["bytes_per_row"])),
        *([(f"{batch} rows", lambda plan: bytes_text(plan["bytes"]))] if batch > 1 else []),
        *([("per device", lambda plan: bytes_text(plan["bytes_per_device"]))] if devices > 1 else []),
        ("smaller", lambda plan: f"{plan['compression']:.1f}x"),
        *([("most rows", lambda plan: f"{plan['rows']:,}")] if rows else []),
    ]
    table = numbers_table(title, "policy", *(name for name, _ in columns), no_wrap=True)
    table.box, table.pad_edge = SIMPLE_HEAD, False
    for plan in plans:
        table.add_row(escape(plan["policy"]), *(text(plan) for _, text in columns))
    return table


def _kernels(kernels: dict[str, dict[str, str]]) -> str:
    """The implementations in use; the operations of all but the one that most have."""
    names: dict[str, list[str]] = {}
    for operation, chosen in kernels.items():
        names.setdefault(chosen["name"], []).append(operation)
    most, *others = sorted(names, key=lambda name: -len(names[name]))
    return "; ".join([most, *(f"{' and '.join(names[name])} by {name}" for name in others)])
