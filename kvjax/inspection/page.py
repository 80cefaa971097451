"""Renders a recording as one self-contained HTML file: a fixed page with the recording as JSON."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from .recording import Recording

PLACE = "RECORDING_AS_JSON"


def page(recording: Recording) -> str:
    """Returns an HTML document that shows each step of a recording. It opens from disk and needs no network."""
    # "</script" and "<!--" are special in a script element. In a JSON string, "\u003c" equals "<".
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
