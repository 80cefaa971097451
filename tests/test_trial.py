"""`python -m tests.trial` tries each kind of calls."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from tests import trial


@pytest.mark.long
def test_each_kind_begins(tmp_path: Path) -> None:
    first = {}
    for kind, outcomes in trial.kinds(tmp_path).items():
        with closing(outcomes):  # what it has patched is as before
            first[kind] = next(outcomes)
    assert len(first) == 7
    assert set(first.values()) <= {"accepted", "refused"}
