"""Counts the bytes of an engine on each device in closed form, and the rows that fit into given memory."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import numpy as np

from kvjax.checks import counted, is_integer, shown
from kvjax.kv_cache import KVCache
from kvjax.models import Decoder, DecoderConfig
from kvjax.plan import after_prompt, bytes_per_device, plan_cache
from kvjax.runtime.memory import tree_bytes

from .plans import Plans

UNITS = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate(("k", "M", "G", "T"), 1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate(("K", "M", "G", "T"), 1)},
}


def bytes_of(memory: Any, name: str = "memory") -> int:
    """A number of bytes, given as an integer or as a text such as "80GB" or "16GiB". Messages call it `name`.

    Raises:
        ValueError: for anything else, and for less than one byte.
    """
    accepted = f"a number and one of {', '.join(UNITS)}"
    if isinstance(memory, str) and (found := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", memory)):
        count = float(found[1]) * UNITS.get(found[2], 0)
    else:
        count = float(memory) if is_integer(memory) else 0
    if not 1 <= count < 2**63:
        expected = accepted if isinstance(memory, str) else f"an integer of bytes, or a text of {accepted}"
        raise ValueError(f"{name}={shown(memory)}: expected {expected}")
    return int(count)


@dataclass(frozen=True)
class Footprint:
    """The bytes of an engine on each device.

    Attributes:
        weights: of the model.
        row: of each row that the device holds: its cache, and the state of its answer.
        prompt: of the requests whose prompts are read together: their caches before and after compression. And of the
            row that is copied to the host, if conversations are kept, and those that stay on the devices.
        workspace: of the largest program, beside its arguments and results: activations. Compilers decide it, so it is
            known once the programs are compiled, and 0 before that.
    """

    weights: int
    row: int
    prompt: int
    workspace: int = 0

    @classmethod
    def of(cls, config: DecoderConfig, plans: Plans, weights: int) -> Footprint:
        """Returns the footprint of an engine with these plans.

        Args:
            weights: bytes of the model on each device.
        """
        sizes, planned, cache = plans.sizes, planned_row(config, plans), bytes_of_row_per_device(config, plans)
        small = tree_bytes((planned.length, planned.rope, planned.pending))
        # Tokens and log-probabilities, the tokens seen, end tokens, the key, the sampler, and what ends the answer.
        key = jax.eval_shape(jax.random.key, 0).dtype.itemsize
        answer = 8 * sizes.max_new_tokens + config.vocab_size + 4 * sizes.ends + key + (1 + 5 * 4) + (1 + 4 + 4)
        kept = (1 + caches_on_devices(config, plans)) * cache if plans.keeps else 0
        return cls(weights, cache + small + answer, _reading(config, plans) + kept)

    def total(self, rows: int) -> int:
        """Returns the bytes with this number of rows on each device."""
        return self.weights + self.prompt + self.workspace + rows * self.row

    def rows_within(self, memory: int) -> int:
        """The most rows of a device with this memory; 0 if none fits."""
        return max(0, (memory - self.total(0)) // self.row)


def together(footprints: Sequence[Footprint]) -> Footprint:
    """The bytes of engines with the same weights, of which each has the same number of rows."""
    parts = ((one.row, one.prompt, one.workspace) for one in footprints)
    return Footprint(footprints[0].weights, *map(sum, zip(*parts, strict=True)))


def check_room(footprints: Sequence[Footprint], rows: int, memory: int | None, data: int) -> None:
    """Raises ValueError if engines with the same weights do not fit together.

    Args:
        footprints: of the engines.
        rows: of each engine.
        memory: of each device, in bytes; None if it is not known, which is not checked.
        data: the number of devices that the rows of each engine are divided over.
    """
    whole = together(footprints)
    if memory is None or whole.total(rows // data) <= memory:
        return
    row, prompt, workspace = (
        " + ".join(f"{getattr(one, name):,}" for one in footprints) for name in ("row", "prompt", "workspace")
    )
    of = "" if len(footprints) == 1 else f" of each of {len(footprints)} engines"
    raise ValueError(
        f"rows={rows}{of} take {whole.total(rows // data):,} bytes per device: {whole.weights:,} of weights, {row} per "
        f"row, {prompt} for prompts that are read and conversations, and {workspace} of workspace; expected at most "
        f"memory={memory:,}, into which {counted(data * whole.rows_within(memory), 'row')}{of} fit"
    )


def planned_row(config: DecoderConfig, plans: Plans) -> KVCache:
    """The shapes of the cache of a row."""
    sizes, dtype = plans.sizes, plans.empty.dtype
    return plan_cache(
        config, plans.policy, batch=1, length=sizes.max_prompt, new_tokens=sizes.max_new_tokens, dtype=dtype
    )


def bytes_of_row_per_device(config: DecoderConfig, plans: Plans) -> int:
    """The bytes of the cache of a row on each device that holds it."""
    return bytes_per_device(planned_row(config, plans), config, model=plans.model)


def caches_on_devices(config: DecoderConfig, plans: Plans) -> int:
    """The number of conversations that stay on the devices."""
    return plans.device_memory // bytes_of_row_per_device(config, plans) if plans.device_memory else 0


def _reading(config: DecoderConfig, plans: Plans) -> int:
    """The bytes of the caches before and after compression, of the read that takes most."""

    def nbytes(cache: KVCache, slots: tuple[int, ...]) -> int:
        grown = jax.eval_shape(lambda cache: replace(cache, entries=cache.entries.grow(slots)), cache)
        return bytes_per_device(grown, config, model=plans.model)

    @cache
    def nbytes_after(new: int, room: int) -> int:
        after = jax.eval_shape(partial(after_prompt, config=config, new=new, room=room), plans.empty)
        return bytes_per_device(after, config, model=plans.model)

    most, row = 0, planned_row(config, plans)
    after = bytes_of_row_per_device(config, plans)
    for count, size in plans.sizes.reads:
        plan, held = plans.of_class(count, size), 0
        if plan.chunk is not None:
            held += nbytes(plans.empty, plan.between.slots)
            if size <= plans.sizes.padded(plans.most_after):  # after a conversation
                most = max(most, nbytes(row, plans.between(size, row).slots) + after)
        if plan.end.allocate:
            held += nbytes(plans.empty, plan.last(plans.empty).slots)
        leaves_rows = count == 1 or plan.end.allocate
        most = max(most, count * (held + (after if leaves_rows else nbytes_after(plan.new, plan.room))))
    return most


def weights_per_device(params: Decoder) -> int:
    """The bytes of a model on each device."""
    return sum(
        int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize for leaf in jax.tree.leaves(params)
    )
