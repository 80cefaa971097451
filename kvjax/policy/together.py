"""A score that lets several scores observe one prompt, and the merges that follow."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Array, Float

from kvjax.cache import Slots

from .merge import Effects, Merge
from .score import Attended, LayerShape, Moment, Needs, Score


@dataclass(frozen=True)
class Together(Score):
    """Shows a prompt to several scores. It ranks nothing itself, so that nothing can be compressed under it.

    Its state per slot and per row are tuples of theirs.

    Attributes:
        scores: the scores that observe.
    """

    scores: tuple[Score, ...]

    @property
    def needs(self) -> Needs:
        """The facts that matter before a cache is compressed. Each score sees what it needs itself."""
        each = [score.needs for score in self.scores]
        return Needs(
            also_received=tuple(dict.fromkeys(wish for needs in each for wish in needs.wishes)),
            keeps_queries=any(needs.keeps_queries for needs in each),
            whole_prompt=any(needs.whole_prompt for needs in each),
            hidden=next((needs.hidden for needs in each if needs.hidden), ""),
        )

    def init(self, shape: LayerShape) -> tuple[Any, Any]:
        return _by_kind([score.init(shape) for score in self.scores])

    def observe(self, entries: Slots, attended: Attended) -> tuple[Any, Any]:
        assert attended.show is not None
        return _by_kind([score.observe(self.only(score, entries), attended.show(score.needs)) for score in self.scores])

    def only(self, score: Score, entries: Slots) -> Slots:
        """Returns the same entries with the state of one of the scores."""
        i = self.scores.index(score)
        return replace(entries, per_slot=entries.per_slot[i], per_row=entries.per_row[i])

    def __call__(self, entries: Slots, moment: Moment) -> Float[Array, "B H M"]:
        raise NotImplementedError


@dataclass(frozen=True)
class MergesLater(Merge):
    """Leaves entries as they are, in the form in which any of several merges can change them.

    Attributes:
        merges: those that follow once the prompt has been read.
    """

    merges: tuple[Merge, ...]

    @property
    def effects(self) -> Effects:
        """The changes of any of them. Each has its own biases."""
        each = [merge.effects for merge in self.merges]
        changes = {name: any(getattr(one, name) for one in each) for name in ("at_prompt", "at_steps", "keys")}
        return Effects(**changes)


def _by_kind(states: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    return tuple(per_slot for per_slot, _ in states), tuple(per_row for _, per_row in states)
