"""Counts the bytes of an engine on each device in closed form, and the rows that fit into given memory."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from kvjax.checks import is_integer, shown
from kvjax.kv_cache import KVCache
from kvjax.models import Decoder, DecoderConfig
from kvjax.plan import bytes_per_device, plan_cache

from .plans import Plans

UNITS = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate(("k", "M", "G", "T"), 1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate(("K", "M", "G", "T"), 1)},
}


def bytes_of(memory: Any) -> int:
    """A number of bytes, given as an integer or as a text such as "80GB" or "16GiB".

    Raises:
        ValueError: for anything else, and for less than one byte.
    """
    accepted = f"a number of bytes, or a number and one of {', '.join(UNITS)}"
    if isinstance(memory, str) and (found := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", memory)):
        count = float(found[1]) * UNITS.get(found[2], 0)
    else:
        count = float(memory) if is_integer(memory) else 0
    if not 1 <= count < 2**63:
        raise ValueError(f"memory={shown(memory)}: expected {accepted}")
    return int(count)


@dataclass(frozen=True)
class Footprint:
    """The bytes of an engine on each device.

    Attributes:
        weights: of the model.
        row: of each row that the device holds: its cache, and the state of its answer.
        prompt: of the request whose prompt is read: its cache before and after compression.
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
        sizes, policy, model = plans.sizes, plans.policy, 1 if plans.mesh is None else plans.mesh.size // plans.batch
        length, new_tokens, dtype = sizes.max_prompt, sizes.max_new_tokens, plans.empty.dtype
        planned = plan_cache(config, policy, batch=1, length=length, new_tokens=new_tokens, dtype=dtype)
        cache = bytes_per_device(planned, config, model=model)
        small = sum(
            leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((planned.length, planned.rope, planned.pending))
        )
        # Tokens and log-probabilities, the tokens seen, end tokens, the key, the sampler, and what ends the answer.
        key = jax.eval_shape(jax.random.key, 0).dtype.itemsize
        answer = 8 * sizes.max_new_tokens + config.vocab_size + 4 * sizes.ends + key + (1 + 5 * 4) + (1 + 4 + 4)
        return cls(weights, cache + small + answer, _reading(config, plans, model) + cache)

    def total(self, rows: int) -> int:
        """Returns the bytes with this number of rows on each device."""
        return self.weights + self.prompt + self.workspace + rows * self.row

    def rows_within(self, memory: int) -> int:
        """The most rows of a device with this memory; 0 if none fits."""
        return max(0, (memory - self.total(0)) // self.row)

    def check(self, rows: int, memory: int, data: int) -> None:
        """Raises ValueError if an engine does not fit.

        Args:
            rows: of the engine.
            memory: of each device, in bytes.
            data: the number of devices that the rows are divided over.
        """
        if self.total(rows // data) > memory:
            raise ValueError(
                f"rows={rows} take {self.total(rows // data):,} bytes per device: {self.weights:,} of weights, "
                f"{self.row:,} per row, {self.prompt:,} for the prompt that is read and {self.workspace:,} of "
                f"workspace; expected at most memory={memory:,}, into which {data * self.rows_within(memory)} rows fit"
            )


def _reading(config: DecoderConfig, plans: Plans, model: int) -> int:
    """The bytes of a prompt's cache before compression, of the class that takes most."""
    most = 0
    for plan in map(plans.of_class, plans.sizes.classes):
        held = []
        if plan.chunk is not None:
            held.append(plan.between.slots)
        if plan.end.allocate:
            held.append(plan.last(plans.empty).slots)
        caches = (jax.eval_shape(partial(_with_slots, slots=slots), plans.empty) for slots in held)
        most = max(most, sum(bytes_per_device(cache, config, model=model) for cache in caches))
    return most


def _with_slots(cache: KVCache, slots: tuple[int, ...]) -> KVCache:
    return replace(cache, entries=cache.entries.grow(slots))


def weights_per_device(params: Decoder) -> int:
    """The bytes of a model on each device."""
    return sum(
        int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize for leaf in jax.tree.leaves(params)
    )
