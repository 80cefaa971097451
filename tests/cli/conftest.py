"""What all tests of commands share: a model, and no compilation cache of the user."""

from __future__ import annotations

from pathlib import Path

import pytest
from flax import nnx

import kvjax
from kvjax.evaluation.tasks.vocabulary import WORDS, tokenizer
from kvjax.models import Decoder, DecoderConfig, Rope


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tiny random model that speaks the demo's words."""
    return saved(tmp_path_factory.mktemp("model"), layers=2)


@pytest.fixture(scope="session")
def shallow_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same with one layer, for commands that run it."""
    return saved(tmp_path_factory.mktemp("shallow_model"), layers=1)


@pytest.fixture(scope="session")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The model with more positions, for texts with pass keys."""
    return saved(tmp_path_factory.mktemp("long_model"), layers=2, positions=512)


def saved(folder: Path, layers: int, positions: int = 128) -> str:
    config = DecoderConfig("llama", len(WORDS), 16, 16, 4, 2, 8, (None,) * layers, Rope(1e4), positions)
    kvjax.save_hf(Decoder(config, nnx.Rngs(0)), folder, tokenizer())
    return str(folder)


@pytest.fixture(autouse=True)
def _no_cache_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")


@pytest.fixture(autouse=True)
def _no_progress_of_slow_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvjax.cli.progress.EVERY", 1e4)
