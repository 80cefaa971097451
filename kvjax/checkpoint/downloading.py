"""Downloads folders from the Hugging Face hub, and tells whoever watches how many bytes there are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvjax.runtime.progress import Doing, Report, reporter

SECOND = "Downloading bytes"  # the hub's second bar for the same bytes, before they are unpacked


def download(name: str, patterns: Sequence[str]) -> Path:
    """Returns the folder of a repository on the hub, with the files that match the patterns.

    Raises what the hub's client raises: an OSError or a ValueError.
    """
    from huggingface_hub import snapshot_download

    report = reporter()
    bars: Any = {} if report is None else {"tqdm_class": _bars(report)}
    return Path(snapshot_download(name, allow_patterns=list(patterns), **bars))


def _bars(report: Report) -> type:
    """The class of bars that the hub's client counts bytes with, in threads of its own. They draw nothing."""
    from tqdm.auto import tqdm

    class Bar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            self.counts = options.get("unit") == "B" and options.get("desc") != SECOND
            super().__init__(*args, **options | {"disable": True})

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if self.counts and self.total:
                report(Doing("downloading", int(self.n), int(self.total), "bytes"))

    return Bar
