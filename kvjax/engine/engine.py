"""`Engine`: requests come and go in the rows of one resident cache."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np

from kvjax.checks import check_truth, checked_size, shown
from kvjax.decoding.grammars import Grammars
from kvjax.decoding.row_guides import RowGuides
from kvjax.decoding.sampling import SamplingMethod
from kvjax.models import Decoder
from kvjax.policy import Policy
from kvjax.request.chat import TemplateOptions
from kvjax.request.ends import EndTokens, default_ends
from kvjax.request.positions import beyond
from kvjax.request.prompts import Prompt
from kvjax.runtime.memory import device_memory
from kvjax.runtime.modes import own_modes

from .device import Device
from .guide import BIASES, Guide
from .handle import Handle
from .hosts import Channel, Leader, follow
from .loop import Loop
from .memory import Footprint, bytes_of, check_room, weights_per_device
from .planning import plans_of
from .reuse import Reuse
from .sizes import CHUNK, ENDS
from .stats import Stats
from .ticket import Options, Ticket


class Engine:
    """Answers requests as they come, many at a time, in the rows of one resident cache.

    A request's tokens are those of `kvjax.generate` for this request alone, in float32. They do not depend on the other
    requests, on the order in which they come, or on the row. See docs/guide/engine.md.

    Threads: the constructor compiles all programs and starts one thread, which alone runs them. Every method may be
    called from any thread. `close` ends the thread; so does the end of a `with` block.

    Several hosts: each process makes the engine with the same arguments. Process 0 takes requests, and all others call
    `follow`, which runs what process 0 runs.

    Attributes:
        params: the model.
        policy: what caches retain.
        tokenizer: encodes prompts and decodes answers, or None.
        sizes: rows, max_prompt, max_new_tokens, chunk.
        ends: the end tokens of requests that state none.
        footprint: the bytes that the engine holds on each device.
        steps_at_once: the most steps of one program.
        guided: whether requests may have a `Guide`.
        warm_up: the number of programs, and the seconds that they took. No program is compiled later.
    """

    @own_modes()
    def __init__(
        self,
        params: Decoder,
        policy: Policy | str | None = None,
        *,
        rows: int,
        max_prompt: int,
        max_new_tokens: int,
        tokenizer: Any = None,
        chunk: int = CHUNK,
        max_queue: int = 1024,
        max_end_tokens: int = ENDS,
        steps_at_once: int | None = None,
        memory: int | str | None = None,
        prefix_memory: int | str | None = None,
        prefix_folder: str | Path | None = None,
        conversation_memory: int | str | None = None,
        conversation_device_memory: int | str | None = None,
        guided: bool = False,
        beside: Sequence[Footprint] = (),
    ) -> None:
        """Compiles all programs and starts the loop.

        Args:
            params: the decoder, an nnx module `Decoder` that `load` returns.
            policy: what caches retain: a policy, or a text that `policies.parse` reads. The default is
                `policies.full()`.
            rows: the number of requests that are decoded together.
            max_prompt: the most tokens of a prompt.
            max_new_tokens: the most tokens of an answer.
            tokenizer: a fast tokenizer of transformers. Without one, prompts are token ids, and answers have no text.
            chunk: the most tokens that are read between two steps: of one prompt, or of four short ones. It is rounded
                up to a bucket.
            max_queue: the most requests that wait for a row.
            max_end_tokens: the most end tokens of a request.
            steps_at_once: the most steps of one program, which it takes while no request could be admitted. A request
                that comes meanwhile waits for at most two programs. The default is 1, and on CPUs as many steps as take
                50 ms at the warm-up, at most 16.
            memory: of each device: a number of bytes, or a text such as "80GB". The default is what the device says it
                has, and on a CPU the host's.
            prefix_memory: the most bytes of stored prefixes on the host, in the same form. None: requests have no
                prefix.
            prefix_folder: where prefixes are kept on disk too, for later engines of the same model, policy and sizes.
            conversation_memory: the most bytes on the host of finished requests' caches, in the same form. A request
                whose prompt continues one of them reads its new tokens alone. None: every prompt is read.
            conversation_device_memory: the most bytes on each device of those that were used last, in the same form.
                None: all go to the host.
            guided: whether requests may have a `Guide`. It compiles a second form of two programs, which run only while
                some row has a guide.
            beside: the footprints of other engines of the same rows and `params` on these devices, which count too.

        Raises:
            ValueError: for an argument that is not accepted, before anything is compiled; and for rows that do not fit
                into the memory, before any cache is made.
        """
        max_queue = checked_size("max_queue", max_queue)
        steps_at_once = None if steps_at_once is None else checked_size("steps_at_once", steps_at_once)
        check_truth("guided", guided)
        if not isinstance(beside, list | tuple) or not all(isinstance(each, Footprint) for each in beside):
            raise ValueError(f"beside={shown(beside)}: expected a list of the footprints of other engines")
        plans = plans_of(
            params,
            policy,
            rows=rows,
            max_prompt=max_prompt,
            max_new_tokens=max_new_tokens,
            tokenizer=tokenizer,
            chunk=chunk,
            max_end_tokens=max_end_tokens,
            conversation_memory=conversation_memory,
            conversation_device_memory=conversation_device_memory,
        )
        config = params.config
        self.params, self.tokenizer = params, tokenizer
        self.policy, self.sizes = plans.policy, plans.sizes
        self.ends = default_ends(params, tokenizer)
        rows, longest = plans.sizes.rows, plans.sizes.max_prompt + plans.sizes.max_new_tokens
        if (told := beyond(config, longest, "requests may reach")) is not None:
            warnings.warn(told, stacklevel=3)
        self.footprint = Footprint.of(config, plans, weights_per_device(params))
        devices = params.embed[...].sharding.addressable_devices
        most = device_memory(devices) if memory is None else bytes_of(memory)
        check_room([self.footprint, *beside], rows, most, plans.batch)
        self._reuse = Reuse(
            params,
            plans,
            prefix_memory=prefix_memory,
            prefix_folder=prefix_folder,
            conversation_memory=conversation_memory,
            conversation_device_memory=conversation_device_memory,
        )
        example = Ticket.of([0], Options(1), self.sizes, None, config.vocab_size, params.card.suppressed)
        size = self.sizes.max_new_tokens + BIASES
        guides = partial(RowGuides.none, vocab_size=config.vocab_size, size=size) if guided else None
        self.guided = guided
        self._grammars = Grammars(tokenizer, config.vocab_size, self.ends) if guided else None
        device = Device(params, plans, example, self._reuse, steps_at_once, guides)
        self._row = device.row
        self.footprint = replace(self.footprint, workspace=device.workspace)
        check_room([self.footprint, *beside], rows, most, plans.batch)
        self.warm_up = device.start(example)
        self.steps_at_once = device.at_once
        self._cache_bytes = device.cache.nbytes
        channel = Channel() if plans.on_hosts else None
        leader = None if channel is None else Leader(device, channel)
        self._loop = Loop(leader or device, rows, max_queue, device.at_once, guides, keeps=plans.keeps)
        self._follow: Callable[[], None] | None = None
        if channel is not None and jax.process_index() > 0:
            self._follow = partial(follow, device, channel, example.start)
            return
        run = self._loop.run if leader is None else partial(leader.lead, self._loop)
        self._thread = threading.Thread(target=run, name="kvjax.Engine", daemon=True)
        self._thread.start()
        # Without this the thread would outlive an engine that nobody closes, and the interpreter.
        self._end = weakref.finalize(self, _stop, self._loop, self._thread)

    @own_modes()
    def submit(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int | None = None,
        sampler: SamplingMethod | None = None,
        seed: int = 0,
        eos: EndTokens = None,
        stop: str | Sequence[str] = (),
        log_probs: bool = False,
        prefix: Prompt | None = None,
        chat_template_kwargs: TemplateOptions = None,
        shown_tokens: Sequence[str] = (),
        guide: Guide | None = None,
        reuse: bool = True,
    ) -> Handle:
        """Accepts a request, and returns at once. The answer is that of `kvjax.generate` with the same arguments.

        Args:
            prompt: one prompt, as `generate` takes it: a string, token ids, or chat messages.
            max_new_tokens: the most tokens of the answer. The default is the engine's.
            sampler: draws the tokens: `Greedy()`, the default, or a `Sampler`.
            seed: an integer of 64 bits, which determines the draws.
            eos: an end token, or a list of them. The default is the checkpoint's and the tokenizer's.
            stop: a string that ends the answer, or a list of them.
            log_probs: whether to return the log-probability of each token.
            prefix: a document or system prompt that other requests begin with too. It is read and compressed once. The
                answer is that of `generate(params, prompt, cache=prefill(params, prefix))`.
            chat_template_kwargs: options of the chat template, such as {"enable_thinking": False}; only for messages.
            shown_tokens: special tokens that the text names, such as "<|python_tag|>"; it leaves out all others.
            guide: a grammar, biases, penalties and the most probable tokens; it needs Engine(guided=True).
            reuse: whether the request may continue a conversation, and later ones this one; only with
                Engine(conversation_memory=...).

        Raises:
            TooLongError: a ValueError, for a prompt that is longer than the engine's.
            ValueError: for any other argument that is not accepted: an empty prompt, an answer that is longer than the
                engine's, bad settings.
            QueueFullError: others fill the rows, and `max_queue` requests wait already.
            EngineClosedError: the engine is closed, or its loop has failed.
            RuntimeError: on several hosts, this is not process 0.
        """
        return self.submit_all(
            [prompt],
            [seed],
            max_new_tokens=max_new_tokens,
            sampler=sampler,
            eos=eos,
            stop=stop,
            log_probs=log_probs,
            prefix=prefix,
            chat_template_kwargs=chat_template_kwargs,
            shown_tokens=shown_tokens,
            guide=guide,
            reuse=reuse,
        )[0]

    @own_modes()
    def submit_all(self, prompts: Sequence[Prompt], seeds: Sequence[int], **options: Any) -> list[Handle]:
        """Accepts several requests, all or none, and returns at once.

        Args:
            prompts: of the requests.
            seeds: one per prompt.
            options: the other arguments of `submit`, the same for all.

        Raises:
            ValueError: as `submit`, and for more requests than rows and queue can ever take.
            QueueFullError, EngineClosedError, RuntimeError: as `submit`.
        """
        if self._follow is not None:
            raise RuntimeError(
                f"requests go to the engine of process 0; on process {jax.process_index()} call follow()"
            )
        seeds = seeds.tolist() if isinstance(seeds, np.ndarray) else seeds
        lists = all(isinstance(each, Sequence) and not isinstance(each, str) for each in (prompts, seeds))
        if not lists or len(prompts) != len(seeds):
            raise ValueError(
                f"prompts={shown(prompts)} and seeds={shown(seeds)}: expected a list of prompts, and one of a seed per "
                "prompt"
            )
        if len(prompts) > self._loop.capacity:
            raise ValueError(
                f"{len(prompts)} answers at a time: expected at most {self._loop.capacity}, the rows and the queue"
            )
        tickets = [self._ticket(prompt, seed, **options) for prompt, seed in zip(prompts, seeds, strict=True)]
        self._loop.submit(tickets)
        return [
            Handle(
                ticket.feed,
                ticket.prompt_tokens,
                text=ticket.text is not None,
                log_probs=ticket.log_probs,
                shown=ticket.shown,
                echoed=ticket.echoed,
                cancel=partial(self._cancel, ticket),
            )
            for ticket in tickets
        ]

    def _ticket(self, prompt: Prompt, seed: int, *, eos: EndTokens = None, **options: Any) -> Ticket:
        """A request that has been checked."""
        if (prefix := options.get("prefix")) is not None and self._reuse.prefixes is None:
            raise ValueError(f"prefix={shown(prefix)}: expected an engine with prefix_memory=")
        asked = Options(seed=seed, eos=self.ends if eos is None else eos, **options)
        vocab_size, suppressed = self.params.config.vocab_size, self.params.card.suppressed
        ticket = Ticket.of(prompt, asked, self.sizes, self.tokenizer, vocab_size, suppressed, self._grammars)
        self._reuse.check(ticket.wanted, self._row)
        return ticket

    def _cancel(self, ticket: Ticket) -> None:
        """Ends a request. By this method a handle keeps its engine, which would close if nobody had it."""
        self._loop.cancel(ticket)

    def stats(self) -> Stats:
        """Returns what the engine has done until now, and what it holds."""
        loop = self._loop
        return loop.counters.snapshot(
            rows=self.sizes.rows,
            rows_busy=loop.busy,
            queue=loop.waiting,
            failed=loop.error is not None,
            cache_bytes=self._cache_bytes,
            **self._reuse.counts,
        )

    def follow(self) -> None:
        """Runs what process 0 runs, until its engine is closed: on several hosts, what all other processes call.

        Raises:
            RuntimeError: this is the engine of process 0, or of one process.
            EngineClosedError: the loop of process 0 has failed.
        """
        if self._follow is None:
            raise RuntimeError("this engine takes requests: expected follow() on the processes after process 0")
        self._follow()

    def close(self, *, drain: bool = True) -> None:
        """Refuses new requests, and waits until all others have ended. A second call only waits.

        On several hosts process 0 ends the engines of all. On the others this does nothing.

        Args:
            drain: whether to finish what was accepted. If not, it is cancelled.
        """
        if self._follow is None:
            self._loop.close(drain=drain)
            self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        self.close(drain=kind is None)


def _stop(loop: Loop, thread: threading.Thread) -> None:
    """Ends the loop of an engine that nobody holds any more."""
    loop.close(drain=False)
    if thread is not threading.current_thread():
        thread.join()
