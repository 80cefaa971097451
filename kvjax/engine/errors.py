"""Why an engine refuses a request."""

from __future__ import annotations


class QueueFullError(RuntimeError):
    """The queue holds as many requests as it may. The request was not accepted; try again later."""


class TooLongError(ValueError):
    """The engine has no room for so many tokens."""


class EngineClosedError(RuntimeError):
    """The engine is closed, or its loop has failed; the cause says with which error."""
