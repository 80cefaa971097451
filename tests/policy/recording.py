"""A score that notes what it is shown and asked, for tests of what stands between a score and a cache."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from kvjax.policy import ScoreWrapper

NOTES: defaultdict[str, list[tuple[str, Any]]] = defaultdict(list)


def note(name: str, what: str, layer: Any = None, **shown: Any) -> None:
    """Notes values, arrays as NumPy arrays, when the program that this is traced into runs.

    Args:
        what: with a place for the index of the layer.
    """
    jax.debug.callback(partial(_write, name, what), layer, shown)


def _write(name: str, what: str, layer: Any, shown: Any) -> None:
    NOTES[name].append((what.format(layer), jax.device_get(shown)))


def notes(name: str) -> list[tuple[str, Any]]:
    """What has been noted under a name since it was last asked for."""
    jax.effects_barrier()
    return NOTES.pop(name, [])


@dataclass(frozen=True)
class Recording(ScoreWrapper):
    """Its base, with notes of all that the base is shown and asked, and of what it answers.

    Attributes:
        name: where the notes are kept.
    """

    name: str = ""

    def init(self, shape):
        if (f"init of {shape}", None) not in NOTES[self.name]:  # stateless scores are asked more than once
            NOTES[self.name].append((f"init of {shape}", None))
        return self.base.init(shape)

    def asks(self, per_row, positions):
        asked = self.base.asks(per_row, positions)
        given = None if asked is None else (asked.queries, asked.positions)
        note(self.name, "asks", positions=positions, asked=given)
        return asked

    def observe(self, entries, attended):
        note(
            self.name,
            f"observe in layer {{}}, decoding={attended.decoding}",
            attended.layer.index,
            queries=attended.queries,
            positions=attended.positions,
            lse=attended.lse,
            received=attended.received,
            lengths=attended.lengths,
            asked=attended.asked,
            replay=attended.replay,
            keys=entries.keys,
            held=entries.positions,
            state=(entries.per_slot, entries.per_row),
        )
        return self.base.observe(entries, attended)

    def passes(self, tokens, lengths, texts):
        passes = self.base.passes(tokens, lengths, texts)
        note(self.name, "passes", passes=list(passes))
        return passes

    def __call__(self, entries, moment):
        scores = self.base(entries, moment)
        note(
            self.name,
            "scores of layer {}",
            moment.layer.index,
            entries=entries,
            next_position=moment.next_position,
            protected=moment.protected,
            counts=moment.counts,
            scores=scores,
        )
        return scores
