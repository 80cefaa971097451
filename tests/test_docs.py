"""The code in documents, run as a reader would run it."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"


@pytest.mark.slow
@pytest.mark.parametrize("page", ["methods.md", "your_own_policy.md", "kernels.md", "caches.md"])
def test_code_runs_from_top_to_bottom(page: str) -> None:
    text = (DOCS / page).read_text()
    names: dict[str, object] = {"__name__": "docs"}
    for found in re.finditer(r"```python\n(.*?)```", text, re.DOTALL):
        line = text[: found.start()].count("\n") + 1
        exec(compile("\n" * line + found[1], DOCS / page, "exec"), names)
