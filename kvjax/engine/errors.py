"""Why an engine refuses a request that is correct in itself."""

from __future__ import annotations


class QueueFullError(RuntimeError):
    """Other requests leave no room in rows and queue. Nothing was accepted; try again later."""


class EngineClosedError(RuntimeError):
    """The engine is closed, or its loop has failed; the cause says with which error."""
