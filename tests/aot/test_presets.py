"""The decode loop of every preset, compiled for one GPU and one TPU: what it copies, and what temporaries take."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import pytest

import kvjax
from benchmarks.aot.hlo import Loop
from benchmarks.aot.lower import lower_decode
from kvjax.parts import (
    DistancePreference,
    GlobalAttention,
    JointImportance,
    KeyDifference,
    LagDifference,
    NoisyAttention,
    ProjectedValues,
    SalientCodes,
    SimilarityMerge,
)
from kvjax.policies import PRESETS, parse
from tests.aot.compiled import KERNELS, SINGLE_LAYERS, accelerators, answering, sized
from tests.conftest import DISTINCT, POLICIES
from tests.products import part

# What writes keys or values of a layer anew, and how many times the bytes of the keys its temporaries take at most.
REWRITING: dict[type, float] = {
    LagDifference: 2.5,  # it normalises a partition's keys whenever it evicts
    ProjectedValues: 20,  # it projects all values whenever it evicts
    JointImportance: 5,  # it compares normalised keys in float32 whenever it evicts
    GlobalAttention: 5,  # the same
    DistancePreference: 1.5,  # it computes norms of all pairs of channels in float32 whenever it evicts
    SalientCodes: 2.5,  # codes become arrays, one layer at a time
}
IN_CACHE = 3.5  # positions in the cache rotate all keys at each step
# They read all keys without a kernel. A TPU's compiler may fetch these into its fast memory, where they are read twice
# and one of them is overwritten, and write them back meanwhile.
READING_KEYS = (KeyDifference, NoisyAttention, SimilarityMerge)

# Of each preset, those with options that tests of other modules have, or its own defaults.
EACH = [*POLICIES, *(name for name in PRESETS if not any(text.split(":")[0] == name for text in POLICIES))]
# tests/aot/test_steps.py compiles larger programs of full and morphkv for the H200.
H200_PRESETS = [text for text in DISTINCT if not text.startswith(("full", "morphkv"))]
# Presets that store entries in forms of their own, or evict by what no policy above looks at.
H200_PRESETS += ["fastgen", "gkv", "keydiff_codes", "lacache", "quantize", "rkv", "think", "zipcache"]


def test_all_policies_have_sizes():
    for text in EACH:
        assert sized(text)


@pytest.mark.aot
@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")  # of devices that are not here
@pytest.mark.parametrize(
    ("name", "text"),
    part(
        product(KERNELS, EACH),
        [
            *product(["h200:1"], H200_PRESETS),
            *(("v6e:2x2", text) for text in DISTINCT if "d2o" in text or "every" in text),
        ],
        [("h200:1", DISTINCT[2]), ("h200:1", DISTINCT[5]), ("h200:1", "zipcache"), ("v6e:2x2", DISTINCT[0])],
    ),
)
def test_presets_on_one_device(name: str, text: str) -> None:
    """The kernels attend, no layer's keys are copied, and temporaries are few: 1 % of wide arguments.

    On a GPU the whole loop is a CUDA graph.
    """
    policy = sized(text)
    parts = (policy.score, policy.merge, policy.storage)
    hlo, loop, memory, keys, outside = answering(name, SINGLE_LAYERS[name], policy, 8, 1)
    assert not loop.collectives
    assert not outside
    anew = [times for kind, times in REWRITING.items() if any(isinstance(each, kind) for each in parts)]
    if policy.positions == "in_cache":
        anew.append(IN_CACHE)
    if anew:
        assert memory.temp_size_in_bytes < max(anew) * keys
    else:
        written = set(loop.rewrites(keys))
        fetched = name.startswith("v6e") and any(isinstance(each, READING_KEYS) for each in parts)
        assert {what.split()[0] for what in written} <= ({"copy-start"} if fetched else set())
        most = 0.01 * memory.argument_size_in_bytes if name == "h200:1" else keys
        assert memory.temp_size_in_bytes < most
    assert KERNELS[name] in hlo


SNAPKV, DYNAMICKV = "snapkv,policy.budget=1024,policy.window=32", "dynamickv,policy.budget=1024"
TPU_CODES = ("v6e:2x2", SNAPKV, 4)


class Coded(NamedTuple):
    """A decode loop over codes.

    Attributes:
        codes: bytes of the codes of a layer's keys.
    """

    hlo: str
    memory: Any
    codes: int


@cache
def coded(name: str, text: str, bits: int) -> Coded:
    config, sizes = SINGLE_LAYERS[name], {"batch": 8, "length": 4096, "new_tokens": 1024}
    config = replace(config, windows=(None,) * layers_of(text))
    policy, mesh = parse(f"quantize:policy={text},bits={bits}"), kvjax.make_mesh(devices=accelerators(name)[:1])
    compiled = lower_decode(config, policy, mesh=mesh, **sizes).compile()
    cache = kvjax.plan_cache(config, policy, dtype="bfloat16", **sizes)
    return Coded(compiled.as_text(), compiled.memory_analysis(), cache.entries.stored[0].codes.size)


def layers_of(text: str) -> int:
    """Two for policies whose layers compete, else one."""
    return 2 if "dynamickv" in text else 1


@pytest.mark.aot
@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")
@pytest.mark.parametrize(
    ("name", "text", "bits"),
    part(product(KERNELS, [SNAPKV, DYNAMICKV], [8, 4]), [("h200:1", SNAPKV, 4), ("h200:1", DYNAMICKV, 8), TPU_CODES]),
)
def test_codes_are_read_as_such(name: str, text: str, bits: int) -> None:
    """No array is written in a step that could be a layer's codes, and temporaries are few: 1 % of wide arguments."""
    hlo, memory, codes = coded(name, text, bits)
    assert Loop.of(hlo).rewrites(codes) == []
    most = 0.01 * memory.argument_size_in_bytes if name == "h200:1" else codes
    assert memory.temp_size_in_bytes < most
    assert hlo.count(KERNELS[name]) >= layers_of(text)


@pytest.mark.aot
@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")
def test_4_bits_take_half_of_a_tpus_memory() -> None:
    """Arguments as a v6e lays them out, padding of 64 bytes per entry included. Weights are few beside the cache."""
    four, eight = (coded("v6e:2x2", SNAPKV, bits).memory.argument_size_in_bytes for bits in (4, 8))
    assert 0.5 < four / eight < 0.56
