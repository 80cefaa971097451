"""A recording as one HTML file that needs nothing else: the recording as JSON within a page that is always the same."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from .recording import Recording

PLACE = "RECORDING_AS_JSON"


def page(recording: Recording) -> str:
    """An HTML document that opens from disk, without a network, and shows each step."""
    # In a script element "</script" and "<!--" have a meaning of their own, in JSON strings "\u003c" is the same "<".
    document = json.dumps(_document(recording), ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    template = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    assert template.count(PLACE) == 1
    return template.replace(PLACE, document)


def _document(recording: Recording) -> dict[str, Any]:
    return {
        "policy": recording.policy,
        "prompt": recording.prompt,
        "steps": recording.steps,
        "tokens": recording.tokens.tolist(),
        "texts": recording.texts,
        "left": recording.left.tolist(),
        "into": None if recording.into is None else recording.into.tolist(),
    }
