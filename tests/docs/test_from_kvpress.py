"""The page for users of kvpress: its policies exist, and name every press that this repository compares."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from kvjax.policies import parse

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/guide/from_kvpress.md").read_text()
ROWS = dict(re.findall(r"^\| `(.*?)`.* \| `(.*)` \|$", PAGE, re.MULTILINE))


@pytest.mark.parametrize("press", ROWS)
def test_policies_of_the_table(press: str) -> None:
    assert parse(ROWS[press].replace("{budget}", "0.25"))


def test_every_press_that_is_compared_is_named() -> None:
    own = {"DrawnGates": "DuoAttentionPress", "DrawnSketches": "CompactorPress", "DrawnCurve": "LUKVPress"}
    (first, *_) = sorted((ROOT / "tests/golden").rglob("*.npz"))
    with np.load(first) as archive:
        described = json.loads(str(archive["meta"]))["presses"].values()
    presses = {own.get(press["press"], press["press"]) for press in described}
    assert len(presses) > 20
    assert {press for press in presses if press not in PAGE} == set()
