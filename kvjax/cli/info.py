"""`kvjax info`: prints a model's architecture, the memory of its cache under each policy, and the kernels in use."""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import asdict
from functools import partial
from itertools import groupby, product
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvjax.checks import bytes_text
from kvjax.cli.choices import CHOICES
from kvjax.cli.console import numbers_table, print_json
from kvjax.cli.loading import read_model
from kvjax.cli.options import AsJson, Mesh, Model, NewTokens

if TYPE_CHECKING:
    from kvjax.models import DecoderConfig


def info(
    path: Model,
    policy: Annotated[
        list[str] | None, typer.Option(help="Policy; may be repeated. Default: all presets with a budget of 1/4.")
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
    as_json: AsJson = False,
) -> None:
    """Show a model's architecture, the memory of its cache under each policy, and the kernels in use.

    The command reads the config and the headers of the weights, but no weights.
    """
    import kvjax
    from kvjax.checkpoint import mesh_sizes
    from kvjax.pallas_kernels import implementations
    from kvjax.plan import bytes_per_device

    config, card, parameters, stored, held = read_model(path, dtype, quiet=as_json)
    data, model = mesh_sizes(mesh)
    lengths = length or [min(8192, config.max_positions)]
    per_token = config.bytes_per_token(held)
    plans = []
    for rows, size in product(batch or [data], lengths):
        planned = partial(kvjax.plan_cache, config, batch=rows, length=size, new_tokens=max_new_tokens, dtype=held)
        of_full = planned(policy=kvjax.policies.full()).nbytes
        for text in policy or _presets(size, config):
            cache = planned(policy=kvjax.policies.parse(text))
            plans.append(
                {
                    "policy": text,
                    "batch": rows,
                    "length": size,
                    "slots": list(cache.entries.mean_slots),
                    "bytes": cache.nbytes,
                    "bytes_per_device": bytes_per_device(cache, config, data=data, model=model),
                    "compression": of_full / cache.nbytes,
                }
            )
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
        "attention_sinks": config.attention_sinks,
        "attention_softcap": config.attention_softcap,
        "experts": None if config.mixture is None else asdict(config.mixture),
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
        "plans": plans,
        "choices": [choice._asdict() for choice in CHOICES],
        "kernels": {operation: chosen._asdict() for operation, chosen in implementations().items()},
    }
    if as_json:
        print_json(document)
    else:
        _show(document, config)


def _presets(length: int, config: DecoderConfig) -> list[str]:
    """Every preset that suits the model, with 1/4 of the prompt as budget; presets that wrap a policy wrap SnapKV."""
    from kvjax.policies import PRESETS

    budget = max(length // 4, 64)
    options = {
        "budget": f":budget={budget}",
        "base": f":base=snapkv,base.budget={budget}",
        "policy": f":policy=snapkv,policy.budget={budget}",
    }
    of_one_model = {"gates", "importance", "curve", "shares"}
    presets = (
        name + next((text for option, text in options.items() if option in inspect.signature(preset).parameters), "")
        for name, preset in PRESETS.items()
        if of_one_model.isdisjoint(inspect.signature(preset).parameters)
    )
    return [text for text in presets if _suits(text, config)]


def _suits(text: str, config: DecoderConfig) -> bool:
    """Whether the model has enough layers and heads for a policy that divides its budget among them."""
    from kvjax.policies import parse

    try:
        parse(text).budget.check_model(config.num_layers, config.num_kv_heads)
    except ValueError:
        return False
    return True


def _ropes(config: DecoderConfig) -> str:
    """RoPE, and the number of layers of each kind if there are several."""
    kinds = Counter(str(config.rope_of(layer)) for layer in range(config.num_layers))
    if len(kinds) == 1:
        return str(config.rope)
    return "; ".join(f"{kind} in {count} of {config.num_layers} layers" for kind, count in kinds.items())


def _attention(config: DecoderConfig) -> str:
    """What changes the softmax of attention; empty if nothing does."""
    sinks = ["a learned sink per query head"] if config.attention_sinks else []
    softcap = config.attention_softcap
    return ", ".join(sinks + ([f"logits capped at {softcap:g}"] if softcap is not None else []))


def _experts(config: DecoderConfig) -> str:
    """The experts of a layer, how many of them a token takes, and how many layers have some."""
    assert config.mixture is not None
    mixed = sum(map(config.has_experts, range(config.num_layers)))
    return (
        f"{config.mixture.experts} of {config.mixture.size:,} columns, {config.mixture.per_token} per token, "
        f"in {mixed} of {config.num_layers} layers"
    )


def _show(facts: dict[str, Any], config: DecoderConfig) -> None:
    windows = sorted({window for window in config.windows if window})
    sliding = sum(window is not None for window in config.windows)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column()
    for name, value in (
        ("family", facts["family"]),
        ("parameters", f"{facts['parameters']:,} in {' and '.join(facts['stored'])}"),
        ("layers", f"{config.num_layers}, {config.hidden_size:,} wide"),
        ("heads", f"{config.num_heads} query, {config.num_kv_heads} kv, of {config.head_dim} channels"),
        *([("attention", _attention(config))] if _attention(config) else []),
        *([("experts", _experts(config))] if config.mixture else []),
        ("vocabulary", f"{config.vocab_size:,}"),
        ("rope", facts["rope"]),
        ("window", f"{', '.join(map(str, windows))} in {sliding} of {config.num_layers} layers" if windows else "none"),
        ("max positions", f"{config.max_positions:,}"),
        ("end tokens", ", ".join(map(str, facts["end_tokens"])) or "those of the tokenizer"),
        ("sampler", facts["sampler"] or "none is stated"),
        *((f"suppressed {name}", ", ".join(map(str, ids))) for name, ids in facts["suppressed"].items() if ids),
        *([("not applied", ", ".join(facts["not_applied"]))] if facts["not_applied"] else []),
        (
            "KV cache",
            f"{bytes_text(facts['kv_bytes_per_token'])} per token in {facts['cache_dtype']}, retained in full",
        ),
    ):
        grid.add_row(name, value)
    console = Console(highlight=False)
    console.print(grid)
    devices = facts["mesh"]["data"] * facts["mesh"]["model"]
    for (batch, length), plans in groupby(facts["plans"], key=lambda plan: (plan["batch"], plan["length"])):
        title = f"Cache of {batch} x ({length:,} + {facts['new_tokens']:,}) tokens"
        sizes = ("reserved", "per device") if devices > 1 else ("reserved",)
        table = numbers_table(title, "policy", "slots per head", *sizes, "smaller", no_wrap=True)
        for plan in plans:
            low, high = min(plan["slots"]), max(plan["slots"])
            slots = f"{low:,}" if low == high else f"{low:,} - {high:,}"
            share = [bytes_text(plan["bytes_per_device"])] if devices > 1 else []
            smaller = f"{plan['compression']:.1f}x"
            table.add_row(escape(plan["policy"]), slots, bytes_text(plan["bytes"]), *share, smaller)
        console.print("", table, sep="\n")
    if devices > 1:
        console.print(
            "", f"on {devices} devices, data={facts['mesh']['data']} x model={facts['mesh']['model']}", sep="\n"
        )
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
