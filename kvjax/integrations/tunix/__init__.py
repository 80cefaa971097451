"""Rollouts for reinforcement learning with tunix, under any cache policy. docs/guide/rollouts.md says how.

ClusterConfig(rollout_engine=functools.partial(KVJaxRollout, policy="morphkv:budget=512"), ...)
"""

from typing import Any

from .actor import KVJaxActor

__all__ = ["KVJaxActor", "KVJaxRollout"]


def __getattr__(name: str) -> Any:
    """Imports KVJaxRollout, which needs tunix, when it is asked for."""
    if name == "KVJaxRollout":
        from .rollout import KVJaxRollout

        return KVJaxRollout
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
