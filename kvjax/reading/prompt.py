"""Reading a prompt into a cache: chunk by chunk, then replays and the allocation of a shared budget.

This is the one order of things. `generate`, `stream`, `prefill` and `extend` run it to its end, an engine runs it a
piece at a time, and compiling ahead runs it on shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.attend import ReadPlan
from kvjax.cache import bucket
from kvjax.kv_cache import KVCache
from kvjax.mesh.sharding import fetch
from kvjax.models import Decoder
from kvjax.policy import Policy, Texts
from kvjax.runtime.clock import Run, run_at_once
from kvjax.runtime.compiled import key_of
from kvjax.runtime.progress import Counting, closely_watched

from .allocate import allocated
from .layers import jitted_step, logits_of, read
from .replays import check_one_call, encoded_texts, passes, replay
from .room import Compress, Ending, check_fits, ending, grown, occupied_slots, plan_read, with_room

Result = TypeVar("Result")
Pieces = Generator[None, None, Result]
"""Work that stops between its pieces, and returns a result after the last one."""


@dataclass(frozen=True)
class Batch:
    """Token ids of a batch, padded on the left.

    Attributes:
        tokens: int32. The ids of row b are its last `lengths[b]` columns.
        lengths: int32, the number of tokens of each row.
    """

    tokens: Int[Any, "B N"]
    lengths: Int[Any, "B"]

    @classmethod
    def of(cls, rows: Sequence[Int[np.ndarray, "_"]], size: int | None = None) -> Batch:
        """Pads the rows with zeros to `size` columns. The default is the bucket of the longest row."""
        lengths = np.array([row.size for row in rows], np.int32)
        tokens = np.zeros((len(rows), size or bucket(int(lengths.max()))), np.int32)
        for padded, row in zip(tokens, rows, strict=True):
            padded[padded.size - row.size :] = row
        return cls(tokens, lengths)

    @property
    def arrays(self) -> tuple[Int[Any, "B N"], Int[Any, "B"]]:
        """The tokens and the lengths."""
        return self.tokens, self.lengths

    def chunks(self, size: int | None) -> list[Batch]:
        """Cuts the columns into chunks of `size`, None for one; the first one is padded. All rows end in the last.

        Only arrays of the host are cut into several chunks.
        """
        columns = self.tokens.shape[1]
        if size is None or size >= columns:
            return [self]
        number = -(-columns // size)
        tokens = np.split(np.pad(self.tokens, ((0, 0), (number * size - columns, 0))), number, axis=1)
        behind = range((number - 1) * size, -1, -size)
        return [Batch(part, np.clip(self.lengths - rest, 0, size)) for part, rest in zip(tokens, behind, strict=True)]


@dataclass(frozen=True)
class Plan:
    """The static choices for the reading of a prompt.

    Attributes:
        end: what happens at the end of the prompt.
        chunk: the number of tokens of a chunk; None for all.
        between: the plan of the chunks before the last one.
        new: the number of tokens that follow `occupied`.
        room: the number of slots for tokens to come.
        occupied: the most slots that any row and head of each layer occupies before the last chunk; None if only the
            cache will tell.
        begins: whether the prompt begins its cache.
        longest: the static bound of segments once the budget has been allocated; None if only the cache will tell.
        spares: whether the last chunk leaves rows without a token as they are.
    """

    end: Ending
    chunk: int | None
    between: ReadPlan
    new: int
    room: int
    occupied: Sequence[int] | None
    begins: bool
    longest: int | None = None
    spares: bool = False

    @classmethod
    def of(
        cls,
        cache: KVCache,
        batch: Batch,
        end: Ending,
        occupied: Sequence[int],
        *,
        room: int = 0,
        chunk: int | None = None,
        compress: Compress,
    ) -> Plan:
        """Returns the choices by what a cache holds, whose layers and heads occupy so many slots.

        Raises ValueError if the policy's score replays a prompt that this one does not begin.
        """
        begins = not any(occupied)
        if end.allocate:
            check_one_call(cache.policy, begins)
        *before, last = batch.chunks(chunk)
        new = last.tokens.shape[1]
        # A row without a token has no new scores to be compressed by, so it stays as it is.
        compresses, spares = compress == "chunk", end.compress and cache.filled and _some_wait(last, cache.policy)
        between = plan_read(
            cache,
            occupied,
            new=len(before) * new,
            room=0,
            compress=compresses,
            final=False,
            spares=compresses and not begins and any(_some_wait(part, cache.policy) for part in before),
        )
        if before:
            check_fits(cache, between.slots)
            return cls(end, chunk, between, new, room, None, begins, spares=spares)
        return cls(end, None, between, new, room, occupied, begins, spares=spares)

    def last(self, cache: KVCache) -> ReadPlan:
        """Returns the plan of the last chunk, after those before it have been read into `cache`."""
        occupied = occupied_slots(cache) if self.occupied is None else self.occupied
        room = 0 if self.end.allocate else self.room
        ends = {"compress": self.end.compress, "final": self.end.final, "spares": self.spares}
        plan = plan_read(cache, occupied, new=self.new, room=room, **ends)
        check_fits(cache, plan.slots)
        return plan


def _some_wait(batch: Batch, policy: Policy) -> bool:
    """Returns whether some rows of a batch have no token.

    Traced lengths are not known. Then it is true of policies that have forgotten the scores of the prompt.
    """
    lengths = batch.lengths
    if isinstance(lengths, jax.core.Tracer):
        return policy.every is None
    if isinstance(lengths, jax.Array):
        lengths = fetch(lengths)
    return isinstance(lengths, np.ndarray) and bool((lengths == 0).any())


def pieces(
    params: Decoder,
    cache: KVCache,
    batch: Batch,
    plan: Plan,
    texts: Texts,
    *,
    run: Run = run_at_once,
    put: Callable[[Any], Any],
    owned: bool = False,
) -> Pieces[tuple[Float[Array, "B V"], KVCache]]:
    """Reads a prompt, whose rows all end in the last chunk.

    Args:
        texts: token ids of the texts that the policy's score replays.
        run: how programs are run.
        put: places an array with axes [B, ...] on the devices of the cache.
        owned: as `read` has it.

    Returns:
        Float32 logits after each row's last token, and the extended cache.
    """
    *before, last = batch.chunks(plan.chunk)
    for i, part in enumerate(before):
        _, cache = read(params, cache, *map(put, part.arrays), plan=plan.between, run=run, owned=owned or i > 0)
        yield
    closing = plan.last(cache)
    hidden, cache = read(params, cache, *map(put, last.arrays), plan=closing, run=run, owned=owned, last=True)
    logits = run(logits_of, params.head, hidden, mesh=cache.mesh)
    if plan.end.allocate:
        for part in run(passes, *map(put, batch.arrays), score=cache.policy.score, texts=texts, mesh=cache.mesh):
            yield
            cache = replay(params, cache, part, run=run)
        yield
        cache = allocated(params, cache, plan.room, plan.begins, longest=plan.longest, run=run)
    return logits, cache


def complete(work: Pieces[Result]) -> Result:
    """Runs all pieces, and returns the result."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value


def read_prompt(
    params: Decoder,
    cache: KVCache,
    batch: Batch,
    *,
    room: int = 0,
    chunk: int | None = None,
    compress: Compress = "auto",
    texts: Texts | None = None,
    traced: bool = False,
    more: int = 0,
) -> tuple[Float[Array, "B V"], KVCache]:
    """Extends a cache by a prompt, in chunks of `chunk` tokens, and leaves room for `room` tokens to be decoded.

    Nothing is compressed between chunks, so that the result is that of one call, unless `compress` is "chunk". A turn
    into a pool of segments is read in one piece.

    Args:
        texts: token ids of the texts that the policy's score replays, from `encoded_texts`; None if they are token ids
            already.
        traced: whether the call is a part of a caller's program, which then provides the room.
        more: the number of programs that will run afterwards, for whoever watches.

    Returns:
        Float32 logits after each row's last token, and the extended cache.
    """
    if batch.tokens.shape[1] == 1 and cache.filled and compress == "auto":
        tokens, lengths = map(cache.put_rows, batch.arrays)
        return jitted_step(params, with_room(cache, room), tokens[:, 0], lengths > 0)
    end, occupied = ending(cache, compress), cache.entries.bounds if traced else occupied_slots(cache)
    if cache.entries.preallocates:
        cache, chunk = cache if traced else with_room(cache, batch.tokens.shape[1] + room), None
    plan = Plan.of(cache, batch, end, occupied, room=room, chunk=chunk, compress=compress)
    if plan.chunk is not None and any(occupied):  # a prompt that begins attends to no slots: its first chunk makes them
        cache = grown(cache, size=plan.between.slots)
    texts = encoded_texts(cache.policy, None) if texts is None else texts
    run: Run = run_at_once
    if closely_watched() and not traced:
        run = Counting("reading the prompt", _programs(params, cache, batch, plan, texts), more=more).run
    return complete(pieces(params, cache, batch, plan, texts, run=run, put=cache.put_rows))


def _programs(params: Decoder, cache: KVCache, batch: Batch, plan: Plan, texts: Texts) -> list[Hashable]:
    """Finds the programs that `pieces` will run, from shapes. What is traced for it is not traced again."""
    found: list[Hashable] = []
    results: dict[Hashable, Any] = {}

    def note(program: Any, *args: Any, **static: Any) -> Any:
        found.append(key := key_of(program, args, static))
        if key not in results:
            results[key] = program.eval_shape(*args, **static)
        return results[key]

    owned = cache.entries.preallocates  # `read` makes a copy of such a cache, which shapes need not
    complete(pieces(_shapes(params), _shapes(cache), batch, plan, texts, run=note, put=_shapes, owned=owned))
    return found


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None)), tree)
