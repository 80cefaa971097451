"""What a policy hands to its parts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import jax.numpy as jnp
import numpy as np

from kvjax.cache import Slots
from kvjax.models import AttentionLayer, Rope
from kvjax.policies import h2o
from kvjax.policy import Effects, Merge, Moment, Protect


@dataclass(frozen=True)
class Noting(Merge):
    """Drops entries, and notes the scores with which it is shown them."""

    seen: list = field(default_factory=list, hash=False)

    @property
    def effects(self) -> Effects:
        return Effects(at_steps=True)

    def absorb(self, entries, moment, scores, lost, count):
        self.seen.append((np.asarray(scores), np.asarray(moment.protected)))
        return super().absorb(entries, moment, scores, lost, count)


def test_a_merge_while_decoding_sees_the_scores_of_protected_entries():
    """CaM, say, compares scores with the mean of those after them, which are the recent ones."""
    merge = Noting()
    policy = replace(h2o(4), merge=merge, protect=Protect(sinks=1, recent=2))
    keys, weights = jnp.ones((1, 1, 6, 8)), jnp.arange(1.0, 7.0)[None, None]
    positions = jnp.array([[[0, 3, 1, 4, 2, -1]]])
    entries = Slots(keys, keys, positions, jnp.array([[5]]), per_slot=weights)
    moment = Moment(jnp.array([5]), AttentionLayer(0, Rope(1e4), None, 1.0, None))
    left = policy.release(entries, moment, jnp.arange(6) == jnp.full((1, 1, 1), 2), 1)
    ((scores, protected),) = merge.seen
    np.testing.assert_array_equal(scores, [[[1, 2, 3, 4, 5, -np.inf]]])
    np.testing.assert_array_equal(protected, [[[True, True, False, True, False, False]]])
    np.testing.assert_array_equal(left.positions, [[[0, 3, -1, 4, 2, -1]]])
