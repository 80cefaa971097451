"""What was measured of queries, as a score reads it."""

from __future__ import annotations

from jaxtyping import Array, Float

from kvjax.policy import Moment


def whole_statistics(moment: Moment, *names: str) -> tuple[Float[Array, "Hq *rest"], ...]:
    """The layer's statistics of these names, of all query heads of the kv heads that a device holds.

    On a mesh where devices hold the same kv head they are gathered.
    """
    statistics = moment.layer.statistics
    assert statistics is not None
    return tuple(moment.heads.whole_groups(statistics[name][None])[0] for name in names)
