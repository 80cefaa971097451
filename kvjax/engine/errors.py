"""Why an engine refuses a request."""


class QueueFullError(RuntimeError):
    """Other requests leave no room in rows and queue. Nothing was accepted; try again later."""


class TooLongError(ValueError):
    """The engine has no room for so many tokens."""


class EngineClosedError(RuntimeError):
    """The engine is closed, or its loop has failed; the cause says with which error."""
