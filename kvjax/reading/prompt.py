"""Reading a prompt into a cache: in one piece or in chunks, then replays and the allocation of a budget."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.extend import jitted_read, jitted_step, read
from kvjax.kv_cache import KVCache
from kvjax.models import Decoder
from kvjax.policy import Texts
from kvjax.reading.allocate import allocated
from kvjax.reading.layerwise import pays, read_by_layers
from kvjax.reading.replays import check_one_call, replayed
from kvjax.reading.room import Compress, ending, grown, occupied_slots, plan_read, with_room
from kvjax.request.prompts import Batch
from kvjax.runtime.clock import Clock

read_on = jax.jit(read, static_argnames="plan", donate_argnames="cache")


def read_prompt(
    params: Decoder,
    cache: KVCache,
    tokens: Int[np.ndarray, "B N"],
    lengths: Int[np.ndarray, "B"],
    *,
    room: int,
    chunk: int | None,
    compress: Compress,
    texts: Texts | None = None,
    clock: Clock | None = None,
) -> tuple[Float[Array, "B V"], KVCache]:
    """Extends a cache by a prompt, in chunks if asked, and leaves room for `room` tokens to be decoded.

    All rows end in the last chunk. Nothing is compressed between chunks, so that the result is that of one call, unless
    `compress` is "chunk". A turn into a pool of segments is read in one piece.

    Args:
        texts: token ids of the texts that the policy's score replays, from `encoded_texts`.
        clock: counts the programs run as "prefill".
    """
    run, put = partial((clock or Clock()).run, "prefill"), cache.put_rows
    if tokens.shape[1] == 1 and cache.filled and compress == "auto":
        return run(jitted_step, params, with_room(cache, room), put(tokens[:, 0]), put(lengths > 0))
    end = ending(cache, compress)
    occupied = occupied_slots(cache)
    begins = not any(occupied)
    if end.allocate:
        check_one_call(cache.policy, begins)
    if cache.entries.preallocates:
        cache, chunk = with_room(cache, tokens.shape[1] + room), None
    *before, last = Batch(tokens, lengths).chunks(chunk)
    size = last.tokens.shape[1]
    if before:
        between = plan_read(cache, occupied, new=len(before) * size, room=0, compress=compress == "chunk", final=False)
        if not begins:  # the first chunk of a prompt has no slots to attend to, and the slots are made when it ends
            cache = grown(cache, size=between.slots)
    for i, part in enumerate(before):
        go = read_on if i else jitted_read  # the first cache is the caller's
        _, cache = run(go, params, cache, put(part.tokens), put(part.lengths), plan=between)
        occupied = occupied_slots(cache)
    plan = plan_read(
        cache, occupied, new=size, room=0 if end.allocate else room, compress=end.compress, final=end.final
    )
    rest = put(last.tokens), put(last.lengths)
    if pays(params, cache, plan):
        logits, cache = read_by_layers(params, cache, *rest, plan=plan, run=run)
    else:
        logits, cache = run(jitted_read, params, cache, *rest, plan=plan)
    if end.allocate:
        cache = replayed(params, cache, put(tokens), put(lengths), texts, run)
        cache = allocated(params, cache, room, begins, run)
    return logits, cache
