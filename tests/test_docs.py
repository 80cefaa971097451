"""The code in documents, run as a reader would run it, but with smaller models than those that they load."""

import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from flax import nnx

import kvjax
from kvjax import policies
from kvjax.models import Decoder

DOCS = Path(__file__).resolve().parents[1] / "docs"


@pytest.mark.long
@pytest.mark.parametrize(
    ("page", "layers"),
    [
        ("methods/index.md", 1),
        ("extend/family.md", 1),
        ("extend/parts.md", 2),
        ("extend/policy.md", 2),
        ("extend/task.md", 1),
        ("guide/accelerators.md", 1),
        ("guide/caches.md", 1),
        ("guide/command_line.md", 1),
        ("guide/dialogues.md", 1),
        ("guide/engine.md", 1),
        ("guide/evaluation_tasks.md", 1),
        ("guide/from_kvpress.md", 1),
        ("guide/long_answers.md", 1),
        ("guide/long_prompts.md", 1),
        pytest.param(
            "guide/rollouts.md", 1, marks=pytest.mark.skipif(not find_spec("tunix"), reason="tunix is not installed")
        ),
    ],
)
def test_code_runs_from_top_to_bottom(page: str, layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing depends on what the models say. Where layers share a budget there are two of them."""
    load = kvjax.load

    def small(*args: Any, **options: Any) -> tuple[Decoder, Any]:
        params, tokenizer = load(*args, **options)
        config = replace(params.config, windows=params.config.windows[:layers])
        return Decoder(config, nnx.Rngs(0)), tokenizer

    monkeypatch.setattr(kvjax, "load", small)
    text = (DOCS / page).read_text()
    names: dict[str, object] = {"__name__": "docs"}
    for found in re.finditer(r"```python\n(.*?)```", text, re.DOTALL):
        line = text[: found.start()].count("\n") + 1
        exec(compile("\n" * line + found[1], DOCS / page, "exec"), names)


@pytest.mark.long
def test_the_readme_prints_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    text = (DOCS.parent / "README.md").read_text()
    (code,), (shown,) = (re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL) for language in ("python", "text"))
    exec(compile(code, "README.md", "exec"), {"__name__": "docs"})
    assert capsys.readouterr().out == shown
    assert f"{len(policies.PRESETS.own)} presets" in text
