"""A worker of a Ray cluster: a process with the model, which answers tasks. It knows nothing of Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from kvjax.evaluation.asking import Asker
from kvjax.evaluation.model import load_model
from kvjax.evaluation.planning import RunPlan
from kvjax.evaluation.sweeping import Answering, Part, Sweeping, Task
from kvjax.runtime.compiled import keep_compiled
from kvjax.runtime.gpu_flags import set_gpu_flags


def load_asker(plan: RunPlan) -> Asker:
    """The model of a plan, ready to answer. Raises ValueError if it cannot be loaded."""
    return Asker.of(plan.grid, *load_model(plan.grid))


class Worker:
    """Answers tasks of a plan. The sizes that fit into the memory stay from task to task of a sweep."""

    def __init__(self, plan: RunPlan, load: Callable[[RunPlan], Answering]) -> None:
        """Keeps what `start` needs, so that an error of loading is an error of a call and not the end of the worker."""
        self._plan, self._load = plan, load
        self._ask: Any = None
        self._said: list[str] = []
        self._sweeps: dict[int, Sweeping] = {}

    def start(self) -> None:
        """Loads the model. Raises ValueError if it cannot be loaded."""
        set_gpu_flags()
        keep_compiled()
        self._ask = self._load(self._plan)

    def answers(self, task: Task) -> Iterator[tuple[Part, list[str]]]:
        """Yields the answers of a task as they come, each with what the user should know."""
        sweeping = self._sweeps.setdefault(task.sweep, Sweeping(self._plan, self._ask, self._said.append))
        for part in sweeping.answers(task):
            said = self._said.copy()
            self._said.clear()
            yield part, said
