"""The rows that an engine decodes: one state for all of them, which every program gets and returns in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Int32

from kvjax.decoding.loop import Answers, Decoding, Sampling
from kvjax.decoding.row_guides import RowGuides, most_probable_tokens
from kvjax.decoding.row_samplers import RowSamplers
from kvjax.kv_cache import KVCache
from kvjax.mesh.sharding import DATA, MODEL
from kvjax.models import NONE_SUPPRESSED, Decoder, Suppressed
from kvjax.plan import placed
from kvjax.reading.room import free_room
from kvjax.runtime.gpu_flags import STEP_OPTIONS

from .compiling import Programs
from .plans import Plans
from .reading import Read


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Start:
    """The arguments of a request beside its prompt, as arrays.

    Attributes:
        sampler: its settings.
        ends: its end tokens, padded with -1. int32.
        seed: the last 32 bits of its seed, which are all that `jax.random.key` looks at with 32-bit types. int32.
        seen: marks the tokens of its prompt.
        limit: the most tokens of its answer. int32.
        suppressed: the tokens that are never drawn.
    """

    sampler: RowSamplers
    ends: Int[Any, "B E"]
    seed: Int[Any, "B"]
    seen: Bool[Any, "B V"]
    limit: Int[Any, "B"]
    suppressed: Suppressed = field(default=NONE_SUPPRESSED, metadata={"static": True})

    @classmethod
    def of(cls, each: Sequence[Start]) -> Start:
        """The arguments of several requests."""
        return jax.tree.map(lambda *arrays: np.concatenate(arrays), *each)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Resident:
    """The rows: caches and answers, and the most tokens of each answer. A row that is not active stays as it is."""

    decoding: Decoding
    limits: Int[Array, "B"]

    @classmethod
    def begin(cls, cache: KVCache, start: Start, *, size: int) -> Resident:
        """Rows whose prompts have been read, before the first token of each answer. `size` bounds all answers."""
        # The key that `generate` gives to a batch of one row.
        keys = jax.vmap(lambda seed: jax.random.split(jax.random.key(seed), 1)[0])(start.seed)
        sampling = Sampling(start.sampler, start.ends, keys, start.seen, start.suppressed)
        answers = Answers.begin(sampling, size=size, log_probs=True, put=jnp.asarray)
        return cls(Decoding(cache, answers), start.limit)

    def take(self, logits: Float[Array, "B V"], guides: RowGuides | None = None) -> Resident:
        """The same rows with the next token of every active one, in which its guide has a part if there are any."""
        return replace(self, decoding=self.decoding.take(logits, guides)).within_limits()

    def within_limits(self) -> Resident:
        """The same rows, of which those are active whose answers may go on."""
        answers = self.decoding.answers
        return replace(self, decoding=self.decoding.with_active(answers.active & (answers.lengths < self.limits)))

    def wanted(self, wanted: Bool[Array, "B"]) -> Resident:
        """The same rows, of which only those that are wanted stay active."""
        return replace(self, decoding=self.decoding.with_active(self.decoding.active & wanted))

    def advance(self, params: Decoder) -> Resident:
        """One token for every active row."""
        logits, decoding = self.decoding.step(params)
        return replace(self, decoding=decoding).take(logits)

    def with_slots(self, slots: tuple[int, ...]) -> Resident:
        """The same rows, whose layers have these numbers of slots, which are not below those that they have."""
        cache = self.decoding.cache
        if slots == cache.entries.bounds:
            return self
        return replace(self, decoding=replace(self.decoding, cache=replace(cache, entries=cache.entries.grow(slots))))

    def answers(self) -> Int32[Array, "B 2+T"]:
        """For the host: whether each row goes on, the number of its tokens, and these."""
        answers = self.decoding.answers
        facts = jnp.stack([answers.active.astype(jnp.int32), answers.lengths], axis=1)
        return jnp.concatenate([facts, answers.tokens], axis=1)

    def report(self, first: Int[Array, "B"], *, steps: int) -> Int32[Array, "3 B K"]:
        """For the host: tokens of each row, the bits of their log-probabilities, and whether the row goes on.

        Args:
            first: the index of the first of these tokens in each row's answer.
            steps: their number. Those that no row has taken yet have no meaning.
        """
        answers = self.decoding.answers
        assert answers.log_probs is not None
        columns = jnp.minimum(first[:, None] + jnp.arange(steps), answers.tokens.shape[1] - 1)
        tokens, log_probs = (jnp.take_along_axis(x, columns, axis=1) for x in (answers.tokens, answers.log_probs))
        bits = jax.lax.bitcast_convert_type(log_probs, jnp.int32)
        active = jnp.broadcast_to(answers.active[:, None], tokens.shape).astype(jnp.int32)
        return jnp.stack([tokens, bits, active])


@partial(jax.jit, static_argnames=("rows", "size"))
def idle(cache: KVCache, start: Start, *, rows: int, size: int) -> Resident:
    """Rows that are not active. They hold copies of a row that has been read, because no array may be undefined."""
    one = Resident.begin(cache, start, size=size)

    def copied(one: Resident) -> Resident:
        copies = jax.tree.map(lambda x: jnp.repeat(x, rows // start.limit.size, axis=0), one)
        return replace(copies, decoding=copies.decoding.with_active(jnp.zeros(copies.limits.shape, bool)))

    return _on_devices(copied, one)


@partial(jax.jit, donate_argnames="resident")
def admit(
    resident: Resident,
    cache: KVCache,
    logits: Float[Array, "B V"],
    start: Start,
    rows: Int[Array, "K"],
    guides: RowGuides | None = None,
) -> tuple[Resident, Int32[Array, "R B 1"]]:
    """Writes K requests into rows, and samples the first token of each answer. A row beyond the last is not written.

    On a mesh each part of the batch has read the prompts, and the devices that hold a row write it. The parts report
    the same: `Resident.report`, and of guided requests `most_probable_tokens` too.
    """
    new = Resident.begin(cache, start, size=resident.decoding.answers.tokens.shape[1]).take(logits, guides)
    report = new.report(jnp.zeros_like(start.limit), steps=1)
    return _on_devices(partial(_put, rows=rows), resident, new), report if guides is None else _with_top(report, logits)


def _with_top(report: Int32[Array, "3 B 1"], logits: Float[Array, "B V"]) -> Int32[Array, "R B 1"]:
    """A report with the ids of the most probable tokens, and their log-probabilities' bits."""
    top = most_probable_tokens(logits)
    return jnp.concatenate([report, top.reshape(-1, top.shape[-1], 1)])


@partial(jax.jit, donate_argnames="resident")
def place(resident: Resident, read: Resident, source: Int[Array, ""], row: Int[Array, ""]) -> Resident:
    """Writes row `source` of rows that have been read together into a row. Both have the same shapes, but for B."""
    return _on_devices(lambda resident, read: _put(resident, _row(read, source), row[None]), resident, read)


@partial(jax.jit, static_argnames="times")
def repeated(resident: Resident, *, times: int) -> Resident:
    """So many times the rows. On a mesh, each device repeats those that it holds."""
    return _on_devices(partial(jax.tree.map, lambda x: jnp.concatenate([x] * times)), resident)


@jax.jit
def taken(resident: Resident, row: Int[Array, ""]) -> tuple[KVCache, Int[Array, "B"]]:
    """The cache of a row, for each part of the batch, and the number of tokens for which it has room."""
    one = _on_devices(partial(_row, source=row), resident)
    return one.decoding.cache, free_room(one.decoding.cache)


def _put(resident: Resident, new: Resident, rows: Int[Array, "K"]) -> Resident:
    """The rows of a device with K new ones at `rows` of all rows, those that the device holds.

    New rows with fewer slots get the others one row at a time, so that no array has all of their slots.
    """
    cache, held = resident.decoding.cache, resident.limits.size
    first = 0 if cache.mesh is None else held * jax.lax.axis_index(DATA)

    def put(i: Array, resident: Resident) -> Resident:
        at = rows[i] - first
        inside, at = (at >= 0) & (at < held), jnp.clip(at, 0, held - 1)

        def put_row(x: Array, new: Array) -> Array:
            old = jax.lax.dynamic_slice_in_dim(x, at, 1, axis=0)
            return jax.lax.dynamic_update_slice_in_dim(x, jnp.where(inside, new, old), at, axis=0)

        one = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, i, 1, axis=0), new)
        return jax.tree.map(put_row, resident, one.with_slots(cache.entries.bounds))

    return jax.lax.fori_loop(0, rows.size, put, resident)


def _row(rows: Resident, source: Int[Array, ""]) -> Resident:
    """Row `source` of all rows, on every device."""
    held = rows.limits.size
    if rows.decoding.cache.mesh is None:
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, source, 1, axis=0), rows)
    first = jnp.clip(source - held * jax.lax.axis_index(DATA), 0, held - 1)

    def gathered(x: Array) -> Array:  # one row of each device moves
        own = jax.lax.dynamic_slice_in_dim(x, first, 1, axis=0)
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):  # collectives know no keys
            data = jax.lax.all_gather(jax.random.key_data(own), DATA)[source // held]
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(own))
        return jax.lax.all_gather(own, DATA)[source // held]

    return jax.tree.map(gathered, rows)


def _on_devices(change: Callable[..., Resident], *rows: Resident) -> Resident:
    """`change(*rows)`. On a mesh each device changes the part that it holds."""
    mesh = rows[0].decoding.cache.mesh
    if mesh is None:
        return change(*rows)
    specs = tuple(map(_specs, rows))
    return jax.shard_map(change, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False)(*rows)


def _specs(resident: Resident) -> Resident:
    """Returns how a mesh divides each array of rows: entries by rows and kv heads, all others by rows."""
    specs = jax.tree.map(lambda _: PartitionSpec(DATA), resident)
    entries = jax.tree.map(lambda _: PartitionSpec(DATA, MODEL), resident.decoding.cache.entries)
    cache = replace(specs.decoding.cache, entries=entries)
    return replace(specs, decoding=replace(specs.decoding, cache=cache))


@partial(jax.jit, static_argnames=("tree", "at_once"), donate_argnames="resident", compiler_options=STEP_OPTIONS)
def advance(
    leaves: list[Array], resident: Resident, wanted: Bool[Array, "B"], most: Int[Array, ""], *, tree: Any, at_once: int
) -> tuple[Resident, Int32[Array, "3 B K"], Int[Array, ""]]:
    """Steps of every active row that is still wanted, until one of them ends; `most` steps at most.

    Args:
        leaves: the model's weights. A call with a list takes a fraction of the time of a call with a module.
        tree: the model's structure.
        at_once: bounds `most`. A program of one step has no loop, which a GPU may not capture in a graph.

    Returns:
        The rows, `Resident.report` of all steps, and their number.
    """
    params, before = jax.tree.unflatten(tree, leaves), resident.decoding.answers.lengths
    resident, steps = resident.wanted(wanted), jnp.int32(1)
    if at_once == 1:
        resident = resident.advance(params)
    else:
        resident, steps = _steps(params, resident, wanted, most)
    return resident, _for_host(resident.report(before, steps=at_once), resident), steps


@partial(jax.jit, static_argnames="tree", donate_argnames="resident", compiler_options=STEP_OPTIONS)
def advance_guided(
    leaves: list[Array], resident: Resident, wanted: Bool[Array, "B"], guides: RowGuides, *, tree: Any
) -> tuple[Resident, Int32[Array, "R B 1"]]:
    """One step of every active row that is still wanted, whose token the guides have a part in.

    Returns:
        The rows, and a report as that of `admit`.
    """
    before, resident = resident.decoding.answers.lengths, resident.wanted(wanted)
    logits, decoding = resident.decoding.step(jax.tree.unflatten(tree, leaves))
    resident = replace(resident, decoding=decoding).take(logits, guides)
    return resident, _for_host(_with_top(resident.report(before, steps=1), logits), resident)


def _for_host(report: Int32[Array, "R B K"], resident: Resident) -> Int32[Array, "R B K"]:
    """The report, which process 0 reads on a mesh over several."""
    mesh = resident.decoding.cache.mesh
    if mesh is None or not mesh.is_multi_process:
        return report
    return jax.lax.with_sharding_constraint(report, NamedSharding(mesh, PartitionSpec()))


@partial(jax.jit, static_argnames="tree", donate_argnames="resident", compiler_options=STEP_OPTIONS)
def advance_until(
    leaves: list[Array], resident: Resident, wanted: Bool[Array, "B"], most: Int[Array, ""], *, tree: Any
) -> tuple[Resident, Int32[Array, "B 2+T"], Int[Array, ""]]:
    """Does what `advance` does without a bound on `most`. Returns rows, `Resident.answers` and the number of steps."""
    resident, steps = _steps(jax.tree.unflatten(tree, leaves), resident.wanted(wanted), wanted, most)
    return resident, resident.answers(), steps


def _steps(
    params: Decoder, resident: Resident, wanted: Bool[Array, "B"], most: Int[Array, ""]
) -> tuple[Resident, Int[Array, ""]]:
    """One step of every active row, and further ones while all wanted rows are active; `most` steps at most.

    If a row has ended before, the host does not know it yet: after one step it can give the row to another request.
    """

    def goes_on(carry: tuple[Resident, Array]) -> Array:
        rows, steps = carry
        return (steps < most) & ((steps == 0) | jnp.all(rows.decoding.active == wanted))

    def body(carry: tuple[Resident, Array]) -> tuple[Resident, Array]:
        rows, steps = carry
        return rows.advance(params), steps + 1

    return jax.lax.while_loop(goes_on, body, (resident, jnp.int32(0)))


answers = jax.jit(Resident.answers)
with_slots = jax.jit(Resident.with_slots, static_argnames="slots")


def compile_rows(
    programs: Programs,
    plans: Plans,
    params: Decoder,
    reads: Mapping[int, Read],
    start: Start,
    *,
    at_once: int,
    guides: Callable[[int], RowGuides] | None = None,
) -> None:
    """Adds the programs that make, change and advance all rows.

    Args:
        reads: the shapes of what a read of a number of requests returns.
        start: of any request.
        at_once: the most steps of a program.
        guides: makes those of a number of rows; None if no row is guided.
    """
    rows, size = plans.sizes.rows, plans.sizes.max_new_tokens
    one = reads[1].cache, plans.everywhere(start)
    resident = programs.add("idle", idle, *one, rows=rows, size=size)
    if (mesh := plans.mesh) is not None:
        resident = placed(resident, jax.tree.map(lambda spec: NamedSharding(mesh, spec), _specs(resident)))
    for count, read in reads.items():
        some = read.cache, read.logits, plans.everywhere(Start.of([start] * count)), np.zeros(count, np.int32)
        programs.add(f"admit {count}", admit, resident, *some)
        if guides is not None:
            programs.add(f"admit guided {count}", admit, resident, *some, plans.everywhere(guides(count)))
    if plans.keeps:
        programs.add("take", taken, resident, np.int32(0))
    leaves, tree = jax.tree.flatten(params)
    wanted = plans.put_rows(np.zeros(rows, bool))
    programs.add("advance", advance, leaves, resident, wanted, np.int32(0), tree=tree, at_once=at_once)
    if guides is not None:
        all_rows = jax.tree.map(plans.put_rows, guides(rows))
        programs.add("advance guided", advance_guided, leaves, resident, wanted, all_rows, tree=tree)
