"""`kvjax serve`: an HTTP server that speaks OpenAI's protocol."""

from __future__ import annotations

import math
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from kvjax.checks import bytes_text, counted, installs
from kvjax.cli.console import note
from kvjax.cli.loading import load
from kvjax.cli.options import ChatTemplate, Dtype, Gates, Mesh, Model, NewTokens, as_bytes, as_size
from kvjax.cli.progress import Line

KEY = "KVJAX_API_KEY"


def serve(
    model: Model,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]POLICY",
            help="What the cache retains: PRESET or PRESET:OPTION=VALUE,...; by default full. It may be repeated: "
            "requests name one as MODEL@NAME, where NAME is by default the preset.",
        ),
    ] = None,
    rows: Annotated[
        int, typer.Option(callback=as_size, help="The number of requests that are decoded together, per policy.")
    ] = 8,
    max_prompt: Annotated[int, typer.Option(callback=as_size, help="The most tokens of a prompt.")] = 4096,
    max_new_tokens: NewTokens = 1024,
    max_queue: Annotated[int, typer.Option(callback=as_size, help="The most requests that wait for a row.")] = 256,
    host: Annotated[str, typer.Option(help="The address to listen at; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 takes a free one.")] = 8000,
    name: Annotated[
        str | None, typer.Option(help="The model's name in requests; by default the last part of MODEL.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar=KEY, help="The key that clients must send as a bearer token.")
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(help="A web origin whose pages may use the server, as https://example.org; may be repeated."),
    ] = None,
    max_body: Annotated[int, typer.Option(help="The most bytes of a request.")] = 4_000_000,
    timeout: Annotated[float, typer.Option(help="The most seconds that a request may take.")] = 600.0,
    memory: Annotated[
        str | None,
        typer.Option(
            callback=as_bytes, help="The memory of each device, such as 80GB; the default is what the device says."
        ),
    ] = None,
    prefix_memory: Annotated[
        str | None,
        typer.Option(callback=as_bytes, help="Keep prefixes of requests in so much memory of the host, such as 4GB."),
    ] = None,
    prefix_folder: Annotated[Path | None, typer.Option(help="Keep prefixes on disk too.")] = None,
    conversation_memory: Annotated[
        str | None,
        typer.Option(
            callback=as_bytes,
            help="Continue conversations: keep finished requests in so much memory of the host, such as 4GB.",
        ),
    ] = None,
    conversation_device_memory: Annotated[
        str | None,
        typer.Option(
            callback=as_bytes, help="Of these, keep the last used ones in so much memory of each device, such as 1GB."
        ),
    ] = None,
    chunk: Annotated[
        int, typer.Option(callback=as_size, help="The most tokens that are read between two steps.")
    ] = 512,
    mesh: Mesh = "1x1",
    coordinator: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="On several hosts: that of process 0, or auto under Slurm and on TPU pods."
        ),
    ] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="The number of processes.")] = None,
    process: Annotated[int | None, typer.Option(min=0, help="The index of this process.")] = None,
    dtype: Dtype = None,
    gates: Gates = None,
    chat_template: ChatTemplate = None,
    guided: Annotated[
        bool, typer.Option(help="Compile what grammars, biases, penalties and top log-probabilities need.")
    ] = True,
    tool_calls: Annotated[
        str | None,
        typer.Option(help="The form of calls of tools: hermes, llama, mistral or harmony; by default the template's."),
    ] = None,
) -> None:
    """Serve a model to clients of OpenAI's API: completions, chats, and a page at /."""
    try:
        from kvjax.serve import Ending, Settings, application, listen, models_of, named_policies, run
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed: expected {installs('serve')}") from None
    import jax

    import kvjax
    from kvjax.checkpoint import mesh_sizes
    from kvjax.decoding import sampling
    from kvjax.engine import Engines
    from kvjax.files.writing import check_folder
    from kvjax.serve.settings import LOOPBACK

    if prefix_folder is not None:
        check_folder(prefix_folder, overwrite=True)
    local = host in LOOPBACK
    called = Path(model).name.removesuffix(".gguf") if name is None else name
    if not called:
        raise ValueError("an empty name of the model: expected at least one character")
    settings = Settings(
        api_key=api_key,
        hosts=LOOPBACK if local else None,
        max_body=max_body,
        timeout=timeout,
        origins=tuple(allow_origin or ()),
        tool_calls=tool_calls,
    )
    texts = named_policies(policy or ["full"])
    policies = {name: kvjax.policies.parse(text) for name, text in texts.items()}
    if coordinator is not None and len(policies) > 1:
        raise ValueError(f"{len(policies)} policies with --coordinator: expected one --policy on several hosts")
    follows = connected(coordinator, processes, process, math.prod(mesh_sizes(mesh)))
    listener = None if follows else listen(host, port)  # before anything that takes long
    if not (local or follows) and api_key is None:
        note(f"{host} can be reached from other machines, and there is no --api-key: anybody may use the model")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # requests are tokenized in threads
    params, tokenizer = load(model, dtype, mesh, gates, chat_template=chat_template)
    if params.card.sampler is not None:
        settings = replace(settings, sampler=sampling.parse(params.card.sampler))
    with Line("tracing programs"):
        engines = Engines(
            params,
            policies,
            rows=rows,
            max_prompt=max_prompt,
            max_new_tokens=max_new_tokens,
            tokenizer=tokenizer,
            chunk=chunk,
            max_queue=max_queue,
            memory=memory,
            prefix_memory=prefix_memory,
            prefix_folder=prefix_folder,
            conversation_memory=conversation_memory,
            conversation_device_memory=conversation_device_memory,
            guided=guided,
        )
    with engines:
        if listener is None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # process 0 finishes what runs, and ends all
            note(f"follows process 0 as process {jax.process_index()}")
            for engine in engines.values():
                engine.follow()
            return
        models = models_of(called, texts, engines)
        for one in models:
            told = one.engine.warm_up
            cache = one.engine.stats().cache_bytes
            note(
                f"{one.id}: {told.programs} programs in {told.seconds:.3g} s; {counted(rows, 'row')} reserve "
                f"{bytes_text(cache)}, {bytes_text(cache / rows)} per request"
            )
        ending = Ending()
        app = application(models, settings, ending)
        address = f"[{host}]" if ":" in host else host
        named = ", ".join(one.id for one in models)
        note(f"{named} at http://{address}:{listener.getsockname()[1]}/v1")
        run(app, ending, listener, patience=timeout)


def connected(coordinator: str | None, processes: int | None, process: int | None, devices: int) -> bool:
    """Connects the processes of several hosts. Returns whether this one follows process 0.

    Args:
        devices: the number of devices of the mesh, which must be those of all hosts.

    Raises:
        ValueError: options that do not fit each other, or the devices that there are.
    """
    import jax

    stated = coordinator not in (None, "auto")
    if (processes is not None) != stated or (process is not None) != stated:
        raise ValueError("expected --coordinator HOST:PORT, --processes and --process together, or --coordinator auto")
    if processes is not None and process is not None and process >= processes:
        raise ValueError(f"--process {process}: expected an index below --processes {processes}")
    if coordinator is None:
        return False
    jax.distributed.initialize(coordinator if stated else None, num_processes=processes, process_id=process)
    if devices != jax.device_count():
        raise ValueError(f"--mesh of {devices} devices: expected all {jax.device_count()} devices of all hosts")
    return jax.process_index() > 0
