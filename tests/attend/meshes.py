"""Meshes of 8 devices, a decoder on them, and the communication of a compiled program."""

import math
import re
from collections import Counter
from dataclasses import dataclass
from functools import cache

import numpy as np
from jax.sharding import Mesh

import kvjax
from benchmarks.aot.lower import lower_prefill
from kvjax.models import Decoder
from kvjax.parts import AdaptiveShares, CompositeShares
from kvjax.policies import parse
from tests.tiny import VOCAB, decoder

RNG = np.random.default_rng(5)
# Longer and shorter than the budget; of distinct tokens, since the keys of equal ones have equal norms and would tie.
ROWS = [RNG.permutation(VOCAB)[:n].tolist() for n in (44, 33, 5, 20, 17, 9, 40, 3)]
NEW = 24
HEADS = 8
PROMPTS = {"batch": len(ROWS), "length": 64, "dtype": np.float32}  # as sizes of a program
QUANTIZED = "quantize:policy=morphkv,policy.budget=24,policy.window=4"


@cache
def mesh(data: int, model: int) -> Mesh:
    return kvjax.make_mesh(data, model)


@cache
def sharded(data: int, model: int, kv_heads: int, layers: int = 1) -> Decoder:
    return kvjax.shard(decoder(HEADS, kv_heads, (None,) * layers), mesh(data, model))


def layers_for(text: str) -> int:
    """One layer suffices for policies that treat all layers alike, and for composites, which heads make together."""
    policy = parse(text)
    return 2 if policy.allocates and not isinstance(policy.budget, AdaptiveShares | CompositeShares) else 1


def policy_for(text: str, kv_heads: int) -> kvjax.Policy:
    """Heads that compete have groups of one head, in all layers, which fit a mesh of any size."""
    return parse(text.replace("groups=2", f"groups={kv_heads}"))


def assert_equal(ours: kvjax.Generation, theirs: kvjax.Generation, atol: float = 1e-5) -> None:
    np.testing.assert_array_equal(ours.tokens, theirs.tokens)
    np.testing.assert_array_equal(ours.lengths, theirs.lengths)
    assert ours.log_probs is not None
    assert theirs.log_probs is not None
    np.testing.assert_allclose(ours.log_probs, theirs.log_probs, atol=atol, rtol=0)
    assert len({row.tobytes() for row in ours.tokens}) > len(ROWS) // 2  # or equality would say little


@dataclass(frozen=True)
class Communication:
    """The collectives of a program: the number of arrays that each kind moves, and the largest of these arrays."""

    counts: Counter
    largest: int

    @classmethod
    def of(cls, hlo: str) -> "Communication":
        kinds = (
            "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast|ragged-all-to-all"
        )
        counts: Counter = Counter()
        sizes = [0]
        for shapes, kind in re.findall(rf"= (\S.*?) ({kinds})(?:-start)?\(", hlo):
            arrays = re.findall(r"\w+\[([\d,]*)\]", shapes)  # several where XLA has combined them
            counts[kind] += len(arrays)
            sizes += [math.prod(map(int, filter(None, array.split(",")))) for array in arrays]
        return cls(counts, max(sizes))


def of_allocation(params: Decoder, policy: kvjax.Policy) -> Communication:
    """What the programs communicate that allocate a budget to layers of one kind, on a mesh of 2 x 4 devices."""
    programs = lower_prefill(params.config, policy, **PROMPTS, new_tokens=NEW, mesh=mesh(2, 4))
    counts: Counter = Counter()
    layers, largest = params.config.num_layers, 0
    for name, times in (("compared", layers), ("divided", 1), ("placed", layers)):
        one = Communication.of(programs[f"{name} 0"].compile().as_text())
        counts.update({kind: count * times for kind, count in one.counts.items()})
        largest = max(largest, one.largest)
    return Communication(counts, largest)
