"""Settled entries on accelerators."""

import pytest

import kvjax
from benchmarks.aot.lower import lower_decode
from kvjax.policies import parse
from tests.aot.compiled import accelerators, llama


@pytest.mark.aot
@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")  # of devices that are not here
def test_codes_become_arrays_one_layer_at_a_time() -> None:
    """A step of four layers holds no more than a step of one."""
    policy = parse("zipcache:base=snapkv,base.budget=1024,base.window=32")
    mesh, sizes = kvjax.make_mesh(devices=accelerators("h200:1")), {"batch": 8, "length": 4096, "new_tokens": 64}
    one, four = (
        lower_decode(llama(n, 1024, 2048, 8), policy, mesh=mesh, **sizes).compile().memory_analysis() for n in (1, 4)
    )
    assert four.temp_size_in_bytes < 1.01 * one.temp_size_in_bytes
