"""`Engines`: one engine per policy, with one copy of the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from kvjax.checks import shown
from kvjax.models import Decoder
from kvjax.policy import Policy
from kvjax.runtime.modes import own_modes

from .engine import Engine
from .memory import Footprint, weights_per_device
from .planning import plans_of
from .sizes import CHUNK, ENDS


class Engines(Mapping[str, Engine]):
    """Engines of one model by name, each with a policy, rows and a queue of its own.

    Their programs take turns on the devices. See docs/guide/engine.md.
    """

    @own_modes()
    def __init__(
        self,
        params: Decoder,
        policies: Mapping[str, Policy | str],
        *,
        rows: int,
        max_prompt: int,
        max_new_tokens: int,
        tokenizer: Any = None,
        chunk: int = CHUNK,
        max_end_tokens: int = ENDS,
        conversation_memory: int | str | None = None,
        conversation_device_memory: int | str | None = None,
        **options: Any,
    ) -> None:
        """Makes all engines, or none.

        Args:
            params: the decoder, which all engines share.
            policies: what the caches of each engine retain, as `Engine` takes it.
            rows, max_prompt, max_new_tokens, tokenizer, chunk, max_end_tokens: of each engine.
            conversation_memory, conversation_device_memory: of each engine.
            options: the other arguments of `Engine`, the same for all.

        Raises:
            ValueError: as `Engine`; for engines that do not fit into the memory together, before anything is compiled;
                and for several policies on the devices of several processes.
        """
        if not isinstance(policies, Mapping) or not policies:
            raise ValueError(f"policies={shown(policies)}: expected a dict of at least one policy by name")
        each: dict[str, Any] = {
            "rows": rows,
            "max_prompt": max_prompt,
            "max_new_tokens": max_new_tokens,
            "tokenizer": tokenizer,
            "chunk": chunk,
            "max_end_tokens": max_end_tokens,
            "conversation_memory": conversation_memory,
            "conversation_device_memory": conversation_device_memory,
        }
        plans = {name: plans_of(params, policy, **each) for name, policy in policies.items()}
        if len(plans) > 1 and any(one.on_hosts for one in plans.values()):
            raise ValueError(
                f"{len(plans)} policies on the devices of several processes: expected one, because all processes run "
                "the programs of one engine in the same order"
            )
        weights = weights_per_device(params)
        footprints = {name: Footprint.of(params.config, one, weights) for name, one in plans.items()}
        self._engines: dict[str, Engine] = {}
        with ExitStack() as unless_all:
            for name, one in plans.items():
                beside = [footprint for other, footprint in footprints.items() if other != name]
                engine = Engine(params, one.policy, **each, **options, beside=beside)
                unless_all.enter_context(engine)
                self._engines[name], footprints[name] = engine, engine.footprint
            unless_all.pop_all()

    def __getitem__(self, name: str) -> Engine:
        return self._engines[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._engines)

    def __len__(self) -> int:
        return len(self._engines)

    def close(self, *, drain: bool = True) -> None:
        """Closes all engines, as `Engine.close` does."""
        for engine in self.values():
            engine.close(drain=drain)

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        self.close(drain=kind is None)
