"""Messages about packages that are not installed name a command that installs them."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from kvjax.checks import installs

ROOT = Path(__file__).parents[1]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_the_packages_of_an_extra_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    stated = ["jax>=0.10", 'optax>=0.2 ; extra == "train"', "chex; extra == 'train'", 'ray ; extra == "ray"']
    monkeypatch.setattr("importlib.metadata.requires", lambda name: stated)
    assert installs("train") == 'pip install "optax>=0.2" "chex" (the extra train)'

    def absent(name: str) -> list[str]:
        raise PackageNotFoundError

    monkeypatch.setattr("importlib.metadata.requires", absent)
    assert installs("train") == 'pip install ".[train]" in a checkout of kvjax'


def test_messages_and_documents_name_extras_that_exist_and_never_the_package_alone() -> None:
    used = set()
    for path in [
        ROOT / "README.md",
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("docs/**/*.ipynb"),
        *ROOT.glob("kvjax/**/*.py"),
        *ROOT.glob("benchmarks/**/*.py"),
    ]:
        text = path.read_text()
        # From the repository it is ours; from an index it would be whoever registers the name.
        alone = r"pip install (?:-\S+ )*[\\\"']*kvjax(?!\S* @ git\+https://github\.com/kvjax/kvjax)"
        assert not re.search(alone, text), path
        used |= set(re.findall(r"installs\([\"']([a-z-]+)[\"']\)", text))
        for several in re.findall(r"pip install [\"']\.\[([a-z0-9,-]+)\]", text):
            used |= set(several.split(","))
    assert {"serve", "plot", "ray", "tpu"} <= used <= EXTRAS.keys()
