"""Programs on a mesh of 8 devices communicate what is declared, and nothing else."""

import re
from collections import Counter
from itertools import product

import jax
import numpy as np
import pytest

import kvjax
from benchmarks.aot.lower import lower_decode, lower_prefill
from kvjax.cache import Segments
from kvjax.models import Decoder
from kvjax.policies import parse
from kvjax.reading.layers import step
from tests.attend.meshes import (
    HEADS,
    NEW,
    PROMPTS,
    QUANTIZED,
    ROWS,
    Communication,
    layers_for,
    mesh,
    of_allocation,
    policy_for,
    sharded,
)
from tests.conftest import DISTINCT, POLICIES
from tests.products import part
from tests.tiny import VOCAB, decoder

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")

# Per layer beyond the two all-reduces of tensor parallelism: (all-reduces, all-gathers where devices share a kv head).
DECLARED = {
    "full": (0, 0),
    "streaming_llm:budget=24": (0, 0),
    "streaming_llm:budget=24,positions=in_cache": (0, 0),
    "h2o:budget=24": (0, 1),  # the group's queries
    "tova:budget=24": (1, 1),  # the mean over heads; the group's queries
    "snapkv:budget=24,window=4": (0, 0),  # nothing once the prompt is read
    "morphkv:budget=24,window=4": (0, 2),  # the group's queries, and their log-sum-exp
    "morphkv:budget=24,window=4,every=4": (0, 2),
    "kvcrush:base=snapkv,base.budget=24,base.window=4,share=0.5": (0, 0),  # as snapkv
    "cam:budget=24,tokens=4": (0, 1),  # as h2o
    "d2o:budget=24,layer_budgets=False": (1, 1),  # the mean over heads of a merge; as h2o
    "kvmerger:budget=24,recent=8,merge.heavy=4,merge.theta=None": (0, 0),
    "keyformer:budget=24,recent=8": (0, 1),  # the group's queries
    "scissorhands:budget=24,window=8,drop=0.25": (0, 1),
    QUANTIZED: (0, 2),  # as morphkv
    "pyramidkv:budget=24,window=4,beta=2": (0, 0),  # as snapkv
    "restkv:budget=24,window=4,reach=4": (0, 0),  # as snapkv
    "finch:budget=24,window=4,chunk=8": (0, 0),
    "expected_attention:budget=24,future=16": (0, 0),  # the statistics of queries only while a prompt is read
    "knorm:budget=24": (0, 0),
    "keydiff:budget=24,every=1": (0, 0),
    "random:budget=24,every=1": (0, 0),
    "lagkv:budget=24,sinks=2,lag=4,every=4": (0, 0),
    "epikv:budget=24,window=4,recent=4": (0, 0),  # each device has the residual stream of its rows
    "chunkkv:base=h2o,base.budget=24,length=5": (0, 1),  # as h2o
    "criticalkv:base=h2o,base.budget=24": (0, 2),  # as h2o; the norms of projected values
    "compactor:budget=24,chunk=16,sketch=6": (0, 0),  # nothing once the prompt is read
    "dynamickv:budget=24,window=4": (0, 0),  # nothing once the budget is allocated
    "kvcompose:budget=24": (0, 0),
    "adakv:base=h2o,base.budget=24,groups=2": (0, 1),  # as h2o
    "kvzip:budget=24,score.chunk=16,score.instruction='',score.starting='',score.suffix='',groups=2": (0, 0),
    "kvgrad:budget=24,score.chunk=16,score.instruction='',score.starting='',score.suffix='',groups=2": (0, 0),
}


def of_step(params: Decoder, policy: kvjax.Policy, data: int, model: int) -> tuple[kvjax.KVCache, Communication]:
    """A cache as `generate` holds it, as shapes, and what a step communicates that writes to it."""
    filled = kvjax.plan_cache(params.config, policy, **PROMPTS, new_tokens=NEW, mesh=mesh(data, model))
    active = jax.ShapeDtypeStruct((len(ROWS),), bool, sharding=filled.length.sharding)
    lowered = jax.jit(step, donate_argnums=1).lower(params, filled, filled.pending, active)
    return filled, Communication.of(lowered.compile().as_text())


# Tried also where no devices share a kv head: a policy that would gather, one that reduces as well, and a pool.
ALONE = ("morphkv:budget=24,window=4,every=4", "d2o:budget=24,layer_budgets=False", DISTINCT[5])


@pytest.mark.slow(first=2)
@pytest.mark.parametrize(
    ("data", "model", "kv_heads", "text"),
    part(
        [(2, 4, kv_heads, text) for kv_heads in (4, 2) for text in (*POLICIES, QUANTIZED)],
        [*((2, 4, 4, text) for text in ALONE), *((2, 4, 2, text) for text in (*DISTINCT, QUANTIZED))],
    ),
)
def test_a_step_communicates_what_is_declared(data: int, model: int, kv_heads: int, text: str) -> None:
    layers = layers_for(text)
    filled, found = of_step(sharded(data, model, kv_heads, layers), policy_for(text, kv_heads), data, model)
    reduces, gathers = DECLARED[text]
    gathers = gathers if model > kv_heads else 0
    # Once a step: the embedding is summed over the devices that hold the vocabulary, and logits are gathered from them.
    assert found.counts == Counter({"all-reduce": layers * (2 + reduces) + 1, "all-gather": layers * gathers + 1})
    assert found.largest <= len(ROWS) // data * VOCAB
    keys = jax.tree.leaves(filled.entries.stored[0])[0].size
    assert found.largest < keys // (layers if isinstance(filled.entries, Segments) else 1) // (
        data * min(model, kv_heads)
    )


@pytest.mark.slow
def test_full_heads_communicate_nothing() -> None:
    """Each device has one kv head, which retains everything in one of the two layers."""
    policy = kvjax.policies.duo_attention(((0.9, 0.1, 0.8, 0.2), (0.1, 0.7, 0.2, 0.6)), 0.5, 2, 10, groups=4)
    _, found = of_step(sharded(2, 4, 4, layers=2), policy, 2, 4)
    assert found.counts == Counter({"all-reduce": 2 * 2 + 1, "all-gather": 1})


@pytest.mark.long
@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kvcompose:budget=24", {"all-reduce": 2 + 1}),  # the mean score of each layer's heads; composites
        ("kvcompose:budget=24,structured=False,groups=4,score.head_mean=False", {}),
        ("dynamickv:budget=24,window=4", {"all-gather": 1}),  # all scores
        (
            "d2o:budget=24,dense_first=0,dense_last=0",
            {"all-gather": 1, "all-reduce": 2},
        ),  # variances; each layer's merge
    ],
)
def test_an_allocation_communicates_what_is_declared(text: str, expected: dict[str, int]) -> None:
    assert of_allocation(sharded(2, 4, 4, layers=2), parse(text)).counts == Counter(expected)


# While a prompt is read and compressed, per layer and beyond the two all-reduces of tensor parallelism: (all-reduces,
# all-gathers over kv heads, all-gathers where devices share one).
READING = {
    "snapkv:budget=24,window=4": (0, 0, 2),  # the window's queries and their log-sum-exp
    "kvcrush:base=snapkv,base.budget=24,base.window=4,share=0.5": (1, 2, 2),  # the anchor; ranks and positions
    "chunkkv:base=snapkv,base.budget=24,base.window=4": (0, 2, 2),  # scores and positions
    "criticalkv:base=snapkv,base.budget=24,base.window=4": (0, 0, 3),  # the norms of projected values
    "restkv:budget=24,window=4,reach=4": (0, 0, 3),  # how far the output of each query head moves
    "d2o:budget=24,layer_budgets=False": (1, 0, 2),  # the mean over heads of a merge; the group's queries and lse
    "expected_attention:budget=24,future=16": (0, 0, 3),  # number, mean and scatter of the group's queries
    "compactor:budget=24,chunk=16,sketch=6": (2, 0, 1),  # mean and variance over the layer; the group's queries
}


# Without devices that share a kv head: one of each kind of communication, and one of none.
ALONE_READING = ("chunkkv", "d2o", "expected_attention")


@pytest.mark.long
@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    ("text", "kv_heads"),
    part(
        product(READING, (4, 2)),
        {*product(READING, (2,)), *((text, 4) for text in READING if text.startswith(ALONE_READING))},
    ),
)
def test_a_prompt_communicates_what_is_declared(text: str, kv_heads: int) -> None:
    reduces, gathers, shared = READING[text]
    gathers += shared if kv_heads < 4 else 0
    config = decoder(HEADS, kv_heads).config
    programs = lower_prefill(config, parse(text), **PROMPTS, new_tokens=NEW, mesh=mesh(2, 4))
    found = {name: Communication.of(lowered.compile().as_text()).counts for name, lowered in programs.items()}
    assert found.pop("_read_layers 0") == Counter({"all-reduce": 2 + reduces, "all-gather": gathers})
    assert found == {"begin 0": {"all-reduce": 1}, "logits_of 0": {"all-gather": 1}}


def test_the_loop_communicates_one_bit_more() -> None:
    """Sampling and the arrays of answers communicate nothing. One bit per step says whether any row continues."""
    config, sampler = decoder(HEADS, 2).config, kvjax.Sampler(temperature=0.7, top_p=0.9)
    lowered = lower_decode(config, parse("tova:budget=24"), **PROMPTS, new_tokens=NEW, mesh=mesh(2, 4), sampler=sampler)
    found = Communication.of(lowered.compile().as_text())
    assert found.counts == Counter({"all-reduce": 3 + 1 + 1, "all-gather": 1 + 1})


@pytest.mark.slow
def test_rows_alone_communicate_nothing() -> None:
    _, found = of_step(sharded(8, 1, 2), parse("tova:budget=24"), 8, 1)
    assert not found.counts


@pytest.mark.slow
def test_one_device_pays_nothing() -> None:
    params = decoder(HEADS, 2)
    cache = kvjax.plan_cache(params.config, parse("tova:budget=24"), **PROMPTS, new_tokens=NEW)
    program = str(jax.make_jaxpr(step)(params, cache, cache.pending, np.ones(len(ROWS), bool)))
    assert not re.search("shard_map|sharding_constraint|psum|all_gather|axis_index", program)
