"""Renders a recording as one self-contained HTML file: a fixed page with the recording as JSON."""

from __future__ import annotations

import json
from importlib.resources import files

import numpy as np

from kvjax.checks import check_type

from .recording import Recording

PLACE = "RECORDING_AS_JSON"


def page(recording: Recording) -> str:
    """Returns an HTML document that shows each step of a recording. It opens from disk and needs no network.

    Raises:
        ValueError: for what is no recording.
    """
    check_type("recording", recording, Recording)
    # "</script" and "<!--" are special in a script element. In a JSON string, "\u003c" equals "<".
    facts = {**vars(recording), "steps": recording.steps}
    text = json.dumps(facts, ensure_ascii=False, separators=(",", ":"), default=np.ndarray.tolist)
    template = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    assert template.count(PLACE) == 1
    return template.replace(PLACE, text.replace("<", "\\u003c"))
