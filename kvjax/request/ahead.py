"""Compiles an answer's steps in a thread, while the prompt's programs are compiled and run."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import jax
import numpy as np

from kvjax.decoding.loop import Decoding, advance, decode, take
from kvjax.kv_cache import KVCache
from kvjax.models import Decoder
from kvjax.request.request import Request
from kvjax.runtime.compiled import key_of
from kvjax.runtime.progress import tell

Lower: TypeAlias = Callable[[Decoder, Decoding, Any], jax.stages.Lowered]
"""Lowers a program of steps. It is called with the parameters, and with shapes of the state and of the logits."""

_begun: WeakKeyDictionary[Decoder, set[Hashable]] = WeakKeyDictionary()


def lower_loop(params: Decoder, state: Decoding, logits: Any) -> jax.stages.Lowered:
    """Lowers the loop that decodes whole answers."""
    return decode.lower(params, state, logits, np.int32(1))


def lower_step(params: Decoder, state: Decoding, logits: Any) -> jax.stages.Lowered:
    """Lowers the step behind the first token."""
    leaves, tree = jax.tree.flatten(params)
    active = jax.ShapeDtypeStruct(state.active.shape, bool)
    return advance.lower(leaves, take.eval_shape(state, logits), active, tree=tree)


class Ahead:
    """The compilation of an answer's steps before the prompt has been read, once per kind of call.

    JAX keeps what a lowered program was compiled to, and the call of its function finds it. An error of the compiler
    is raised by that call, which compiles again.
    """

    def __init__(self, params: Decoder, request: Request, begun: Decoding, lower: Lower) -> None:
        """Compiles nothing yet.

        Args:
            begun: the state before the prompt is read.
            lower: the steps.
        """
        self._params, self._begun, self._lower = params, begun, lower
        self._future: Future[Any] | None = None
        facts = request.batch.tokens.shape, request.texts, request.chunk, request.compress, request.room
        self._key = key_of(lower, (begun,), {"facts": facts})

    @property
    def foresee(self) -> Callable[[Any, KVCache], None] | None:
        """Returns what `read_request` tells the shapes of its results; None if there is nothing to compile.

        Shapes do not say where arrays lie, so nothing is compiled for parameters that were put on a device or a mesh.
        """
        known = self._key in _begun.get(self._params, ())
        placed = getattr(self._params.embed[...], "committed", True)
        return None if known or placed or jax.config.jax_disable_jit else self._start

    def _start(self, logits: Any, cache: KVCache) -> None:
        _begun.setdefault(self._params, set()).add(self._key)
        logits, cache = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (logits, cache))
        # Lowering is in this thread, whose modes of JAX are a part of the program.
        lowered = self._lower(self._params, replace(self._begun, cache=cache), logits)
        pool = ThreadPoolExecutor(1, "kvjax-compile")
        self._future = pool.submit(lowered.compile)
        pool.shutdown(wait=False)

    def wait(self) -> None:
        """Waits until the compilation has ended, if one has begun, and tells so."""
        if self._future is not None:
            tell("compiling the answer's steps")
            wait([self._future])
            tell("running")
            self._future = None
