"""Messages about checkpoints say what was given, and stay short where thousands of tensors are wrong."""

import numpy as np
from safetensors.numpy import load_file, save_file

from kvjax.checkpoint import load, source_of
from kvjax.checkpoint.errors import MOST, listed
from tests.checkpoint.folders import WEIGHTS, problems


def test_the_first_names_are_listed_and_the_others_counted():
    names = [str(i) for i in range(MOST + 1234)]
    assert listed(names[:MOST]) == ", ".join(names[:MOST])
    assert listed(names) == ", ".join(names[:MOST]) + " and 1,234 more"


def test_tensors_under_other_names_are_two_short_problems(folder):
    tensors = load_file(folder / WEIGHTS)
    save_file({f"base.{name}": tensor for name, tensor in tensors.items()}, folder / WEIGHTS)
    missing, unexpected = problems(load, folder)
    for problem in (missing, unexpected):
        assert problem.count(",") == MOST - 1
        assert problem.endswith(f" and {len(tensors) - MOST} more")


def test_wrong_dtypes_of_all_tensors_are_counted(folder):
    tensors = load_file(folder / WEIGHTS)
    save_file({name: tensor.astype(np.int8) for name, tensor in tensors.items()}, folder / WEIGHTS)
    found = problems(load, folder)
    assert len(found) == MOST + 1
    assert found[-1] == f"{len(tensors) - MOST} more such shapes and dtypes"


def test_an_adapter_is_no_model(folder):
    (folder / "config.json").unlink()
    (folder / "adapter_config.json").write_text("{}")
    (problem,) = problems(load, folder)
    assert problem == "it has no config.json, but an adapter: expected a model into which the adapter is merged"


def test_a_saved_cache_is_no_model(tmp_path):
    """Also for commands that read no weights."""
    (tmp_path / "facts").mkdir()
    assert problems(lambda path: source_of(path).config(), tmp_path) == (
        "it holds a cache, which kvjax.restore_cache reads",
    )
