"""What an engine runs on accelerators: the admission of a row copies nothing but that row, and a step no cache."""

from __future__ import annotations

from functools import cache

import jax
import pytest

import kvjax
from benchmarks.aot.engine import lower_engine
from benchmarks.aot.hlo import Loop
from kvjax.kv_cache import KVCache
from kvjax.policies import parse
from tests.aot.compiled import CONFIG, SINGLE_LAYERS, accelerators
from tests.products import part

ROWS = 8
POLICIES = [
    "morphkv:budget=1024,window=32",  # constant slots, and queries beside them
    "full",  # slots that grow
    "adakv:base=h2o,base.budget=1024,groups=2",  # segments
]
TARGETS = ["h200:1", "v5e:2x2"]
CASES = [(name, text, which) for name in TARGETS for text in POLICIES for which in ("admit 1", "advance")]
CHOSEN = [
    ("h200:1", POLICIES[0], "admit 1"),
    ("h200:1", POLICIES[0], "advance"),
    ("h200:1", POLICIES[2], "admit 1"),
    ("v5e:2x2", POLICIES[0], "admit 1"),
]


@cache
def lowered(name: str, text: str) -> tuple[dict[str, jax.stages.Lowered], KVCache]:
    """Of an engine whose prompts are short, so that one program reads them, and whose answers are long."""
    config = SINGLE_LAYERS["v6e:2x2"]
    mesh = kvjax.make_mesh(devices=accelerators(name)[:1])
    return lower_engine(config, parse(text), mesh=mesh, rows=ROWS, max_prompt=16, max_new_tokens=1024)


@pytest.mark.aot
@pytest.mark.usefixtures("optimized")
@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")
@pytest.mark.parametrize(("name", "text", "which"), part(CASES, CHOSEN, CHOSEN[:2]))
def test_rows_are_changed_in_place(name: str, text: str, which: str) -> None:
    programs, row = lowered(name, text)
    compiled = programs[which].compile()
    memory, whole = compiled.memory_analysis(), Loop.whole(compiled.as_text())
    keys = max(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(row.entries))  # of a layer and one row
    assert keys >= 1024 * CONFIG.num_kv_heads * CONFIG.head_dim * 2
    # All rows are donated, and come back where they were.
    assert memory.alias_size_in_bytes >= ROWS * row.nbytes
    assert memory.output_size_in_bytes < 1.01 * memory.alias_size_in_bytes
    if which == "admit 1":
        assert whole.rewrites(keys + 1) == []
        assert memory.temp_size_in_bytes < row.nbytes
    else:
        assert whole.rewrites(ROWS * keys) == []
        assert memory.temp_size_in_bytes < ROWS * keys
    assert not whole.collectives
