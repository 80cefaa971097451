"""Runs a plan on a Ray cluster. Needs the extra `ray`.

Each group of devices has an actor with the model, which answers a task at a time. If an actor dies, another one takes
the rest of its task and a new actor takes its place. The caller alone writes results.
"""

from __future__ import annotations

import os
import socket
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from kvjax.checks import installs, shown
from kvjax.evaluation.lines import Key, key_of
from kvjax.evaluation.planning import RunPlan
from kvjax.evaluation.sweeping import Answering, Part, Say, Task, failed
from kvjax.evaluation.worker import Worker, load_asker

LOCAL = "local"
TOKEN = Path("~/.ray/auth_token")  # of a cluster, on each of its machines
TRIES = 3  # workers that may die of one task, and of all tasks in a row per worker
TOGETHER = 8  # the most batches of a task whose rows are refilled
CONNECT = 5.0  # seconds to wait for an address to answer
STORE = 256 * 2**20  # bytes of a local cluster's object store, which holds tasks and answers
ACCELERATORS = ("GPU", "TPU")  # resources of Ray


@contextmanager
def connected(address: str) -> Iterator[ModuleType]:
    """Connects to a cluster, and disconnects at the end of the block. Yields the module `ray`.

    Args:
        address: "local" starts a cluster on this machine, which ends with the block; "auto" finds the one that this
            machine belongs to; HOST:PORT is the address of its head.

    Raises:
        ValueError: Ray is not installed, or there is no such cluster.
    """
    if address != LOCAL and TOKEN.expanduser().exists():  # `ray start` asks for it. Ray looks here when it is imported.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    try:
        import ray
    except ModuleNotFoundError:
        raise ValueError(f"--ray needs the package ray: expected {installs('ray')}") from None
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address == LOCAL:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options |= {"include_dashboard": False, "object_store_memory": STORE}
    elif address != "auto":
        _check_reachable(address)
    try:
        with warnings.catch_warnings():  # JAX warns of a fork, after which Ray runs another program at once
            warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
            ray.init(address, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"no Ray cluster at {address} takes this machine: {reason}; expected local, or the address of a cluster "
            "that this machine belongs to (`ray start --address=HOST:PORT` joins it)"
        ) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Raises ValueError for what is no address of a cluster's head. Ray itself would wait for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536 or "/" in host:
        raise ValueError(f"ray {shown(address)}: expected local, auto or HOST:PORT")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT).close()
    except OSError as error:
        raise ValueError(
            f"ray {address} does not answer ({error}): expected the address that `ray start --head` printed"
        ) from None


@dataclass(frozen=True)
class Places:
    """The machines that actors run on.

    Attributes:
        count: the number of actors.
        options: the resources of each, for Ray.
    """

    count: int
    options: dict[str, Any]

    @classmethod
    def of(cls, nodes: Sequence[dict[str, Any]], devices: int, workers: int | None) -> Places:
        """The groups of devices of a cluster: of its GPUs, its TPU chips, or else one per machine.

        Args:
            nodes: `ray.nodes()`.
            devices: the number of devices of an actor.
            workers: the most actors; on CPUs their number.

        Raises:
            ValueError: if no machine has enough devices for one actor.
        """
        alive = [node["Resources"] for node in nodes if node["Alive"]]
        for kind in ACCELERATORS:
            held = [int(found[kind]) for found in alive if found.get(kind)]
            if not held:
                continue
            count = sum(number // devices for number in held)
            if not count:
                raise ValueError(
                    f"a mesh of {devices} devices, but the machines of the cluster have at most {max(held)} of kind "
                    f"{kind}: expected a mesh that fits on one machine"
                )
            wanted = {"num_gpus": devices} if kind == "GPU" else {"resources": {kind: devices}}
            return cls(min(count, workers or count), {"num_cpus": 0, **wanted})
        return cls(workers or len(alive), {"num_cpus": 0, "scheduling_strategy": "SPREAD"})


@dataclass(eq=False)
class _Slot:
    """An actor: the task that it answers, or None while it loads the model or waits.

    Attributes:
        actor: Ray's handle.
        pending: what is waited for: that the model is loaded, or the next part of an answer; None if there is nothing.
        task: the task.
    """

    actor: Any
    pending: Any
    task: _Tried | None = None


@dataclass(eq=False)
class _Tried:
    """A task, and how many actors have died of it."""

    task: Task
    deaths: int = 0


def answer(
    ray: ModuleType,
    plan: RunPlan,
    tasks: Sequence[Task],
    say: Say,
    *,
    workers: int | None = None,
    load: Callable[[RunPlan], Answering] = load_asker,
) -> Iterator[Part]:
    """Answers tasks on a cluster, in the order in which the answers come.

    Args:
        ray: from `connected`.
        workers: the most actors, as `Places.of` takes it.
        load: loads the model in an actor.

    Raises:
        ValueError: no actor could load the model, or all of them died again and again. What was answered has been
            yielded.
    """
    if not tasks:
        return
    places = Places.of(ray.nodes(), plan.grid.mesh[0] * plan.grid.mesh[1], workers)
    yield from _Driver(ray, plan, places, load, say).answers(tasks)


class _Driver:
    """Gives tasks to actors."""

    def __init__(
        self, ray: ModuleType, plan: RunPlan, places: Places, load: Callable[[RunPlan], Answering], say: Say
    ) -> None:
        self._ray, self._say, self._places = ray, say, places
        self._plan, self._load = ray.put(plan), load
        self._class = ray.remote(max_restarts=0, **places.options)(Worker)
        self._slots: list[_Slot] = []
        self._queue: deque[_Tried] = deque()
        self._answered: set[Key] = set()
        self._deaths = 0  # without an answer in between

    def answers(self, tasks: Sequence[Task]) -> Iterator[Part]:
        """Yields the parts of all tasks."""
        self._queue += [_Tried(piece) for task in tasks for piece in pieces(task, self._places.count)]
        try:
            self._slots += [self._started() for _ in range(min(self._places.count, len(self._queue)))]
            while self._queue or any(slot.task for slot in self._slots):
                for slot in self._slots:
                    if slot.pending is None and self._queue:
                        slot.task = self._queue.popleft()
                        slot.pending = slot.actor.answers.options(num_returns="streaming").remote(slot.task.task)
                (done,), _ = self._ray.wait([slot.pending for slot in self._slots if slot.pending is not None])
                yield from self._next(next(slot for slot in self._slots if slot.pending is done))
        finally:
            for slot in self._slots:
                self._ray.kill(slot.actor)

    def _started(self) -> _Slot:
        """A new actor, which loads the model."""
        actor = self._class.remote(self._plan, self._load)
        return _Slot(actor, actor.start.remote())

    def _next(self, slot: _Slot) -> Iterator[Part]:
        """Takes what an actor has made."""
        tried, errors = slot.task, self._ray.exceptions
        try:
            if tried is None:
                self._ray.get(slot.pending)
                slot.pending = None
                return
            try:
                part, said = self._ray.get(next(slot.pending))
            except StopIteration:
                slot.pending = slot.task = None
                return
        except errors.RayActorError as error:
            yield from self._died(slot, tried, _reason(error))
            return
        except errors.RayTaskError as error:
            yield from self._failed(slot, tried, f"{type(error.cause).__name__}: {error.cause}")
            return
        for text in said:
            self._say(text)
        self._deaths = 0
        self._answered |= {key_of(line) for line in part.lines if "error" not in line}
        yield part

    def _died(self, slot: _Slot, tried: _Tried | None, reason: str) -> Iterator[Part]:
        """Another actor takes the rest of a dead one's task, unless too many have died of it."""
        self._slots.remove(slot)
        self._deaths += 1
        if self._deaths >= TRIES * self._places.count:
            raise ValueError(f"{self._deaths} workers died without an answer, the last one of: {reason}")
        self._say(f"a worker died ({reason}); another one goes on with its task")
        if tried is not None:
            tried.deaths += 1
            tried.task = tried.task.without(self._answered)
            if tried.deaths < TRIES:
                self._queue.appendleft(tried)
            else:
                yield from self._lost(tried.task, f"{tried.deaths} workers died of it, the last one of: {reason}")
        self._slots.append(self._started())

    def _failed(self, slot: _Slot, tried: _Tried | None, reason: str) -> Iterator[Part]:
        """An actor that could not load the model is not replaced. One that could has told of an error of a task."""
        if tried is not None:
            slot.pending = slot.task = None
            yield from self._lost(tried.task.without(self._answered), reason)
            return
        self._slots.remove(slot)
        self._ray.kill(slot.actor)
        if not self._slots:
            raise ValueError(f"no worker could load the model; the last one said: {reason}")
        self._say(f"a worker could not load the model and is not replaced: {reason}")

    def _lost(self, task: Task, problem: str) -> Iterator[Part]:
        """The lines of what is left of a task that nobody could answer."""
        for batch, cells in task.asked:
            for cell in cells:
                yield Part(cell, failed(cell, batch, problem))


def pieces(task: Task, actors: int) -> list[Task]:
    """A task for several actors: a batch each, or several batches in a row where rows are refilled."""
    size = min(TOGETHER, -(-len(task.asked) // actors)) if task.refilled else 1
    return [replace(task, asked=task.asked[i : i + size]) for i in range(0, len(task.asked), size)]


def _reason(error: Exception) -> str:
    """The first line of an error of Ray, which is followed by addresses and ids."""
    return str(error).strip().splitlines()[0].rstrip(".")
