"""What `generate` runs, lowered from shapes: the same programs; and what they are on accelerators."""

from collections import Counter
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from benchmarks.aot.hlo import Loop
from benchmarks.aot.lower import lower_decode, lower_prefill, read_ahead
from kvjax.decoding.loop import Decoding
from kvjax.engine.compiling import Programs
from kvjax.models import DecoderConfig
from kvjax.plan import on_mesh
from kvjax.policies import parse
from kvjax.reading.prompt import Batch, Plan, complete, pieces
from kvjax.reading.room import ending
from kvjax.request.request import AnswerOptions, Request, read_request
from tests.aot.compiled import CONFIG, accelerators, llama, sized
from tests.products import part
from tests.tiny import VOCAB, decoder

LAYERS, BATCH, SLOTS = len(CONFIG.windows), 4, 2048
POLICY = f"morphkv:budget={SLOTS},window=8"


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
@pytest.mark.parametrize("sampler", [kvjax.Greedy(), kvjax.Sampler(temperature=0.8, repetition_penalty=1.3)])
def test_it_runs_on_what_generate_would_give_it(sampler) -> None:
    params, mesh = decoder(8, 4), kvjax.make_mesh(data=2, model=4)
    rows = np.random.default_rng(0).integers(0, VOCAB, (4, 20))
    policy, sizes = parse("morphkv:budget=12,window=4"), {"batch": 4, "length": 20, "new_tokens": 9}
    lowered = lower_decode(params.config, policy, mesh=mesh, dtype=jnp.float32, sampler=sampler, **sizes)
    compiled = lowered.compile()
    params = kvjax.shard(params, mesh)
    request = Request.of(params, rows, policy=policy, answer=AnswerOptions(9, sampler))
    logits, cache = read_request(params, request)
    assert request.sampling is not None
    request = replace(request, sampling=replace(request.sampling, ends=np.full((4, 1), -1, np.int32)))
    state, steps = compiled(
        params, Decoding.begin(request.sampling, cache, size=64, log_probs=False), logits, np.int32(9)
    )
    expected = kvjax.generate(decoder(8, 4), rows, policy=policy, sampler=sampler, max_new_tokens=9)
    np.testing.assert_array_equal(np.asarray(state.answers.tokens)[:, :9], expected.tokens)
    assert int(steps) == 8
    assert Loop.of(compiled.as_text()).collectives == Counter({"all-reduce": 2 + 1 + 1, "all-gather": 1})


@pytest.mark.long
@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
def test_prompts_are_read_as_generate_would() -> None:
    params, mesh = decoder(8, 4), kvjax.make_mesh(data=2, model=4)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (4, 24)).astype(np.int32)
    policy, lengths = parse("snapkv:budget=12,window=4"), np.full(4, 24, np.int32)
    sizes = {"batch": 4, "length": 24, "new_tokens": 9}
    programs = Programs(partial(on_mesh, mesh=mesh))
    read_ahead(programs, params.config, policy, mesh=mesh, dtype=jnp.float32, **sizes)
    programs.finish()
    params = kvjax.shard(params, mesh)
    request = Request.of(params, tokens, policy=policy, answer=AnswerOptions(9))
    batch, empty = Batch(tokens, lengths), request.cache
    plan = Plan.of(empty, batch, ending(empty, "auto"), empty.entries.bounds, room=request.room, compress="auto")
    units = pieces(params, empty, batch, plan, (), run=programs.call, put=empty.put_rows)
    logits, cache = complete(units)  # runs nothing but what was compiled
    planned = kvjax.plan_cache(params.config, policy, mesh=mesh, dtype="float32", **sizes)
    assert jax.tree.map(jnp.shape, cache) == jax.tree.map(jnp.shape, planned)
    expected, other = read_request(params, request)
    for ours, theirs in zip(jax.tree.leaves((logits, cache)), jax.tree.leaves((expected, other)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("name", ["v5p:2x2x2", "h200:8"])
def test_on_accelerators(name: str) -> None:
    """Two all-reduces a layer and one for the embedding; logits gathered; no cache copied, none of it kept twice."""
    devices = accelerators(name)
    sizes = {"batch": BATCH, "length": SLOTS, "new_tokens": 64}
    mesh = kvjax.make_mesh(model=8, devices=devices)
    compiled = lower_decode(CONFIG, parse(POLICY), mesh=mesh, **sizes).compile()
    loop = Loop.of(compiled.as_text())
    assert loop.collectives == Counter({"all-reduce": 2 * LAYERS + 1, "all-gather": 1})
    keys = BATCH * SLOTS * CONFIG.head_dim * 2  # one kv head a device
    assert loop.rewrites(keys) == []
    assert loop.rewrites(1)  # smaller ones are seen
    memory = compiled.memory_analysis()
    cache = kvjax.plan_cache(CONFIG, parse(POLICY), dtype="bfloat16", **sizes)
    assert memory.alias_size_in_bytes >= cache.nbytes / 8  # donated: updated in place
    assert memory.output_size_in_bytes < 1.01 * memory.alias_size_in_bytes


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("name", part(["v5p:2x2x2", "h200:1"], []))  # below, presets on one device
def test_on_one_device(name: str) -> None:
    mesh = kvjax.make_mesh(devices=accelerators(name)[:1])
    lowered = lower_decode(CONFIG, parse(POLICY), mesh=mesh, batch=1, length=SLOTS, new_tokens=64)
    loop = Loop.of(lowered.compile().as_text())
    assert not loop.collectives
    assert loop.rewrites(SLOTS * CONFIG.num_kv_heads * CONFIG.head_dim * 2) == []


def temporaries(programs: dict[str, jax.stages.Lowered]) -> dict[str, int]:
    """The bytes that each program needs beside its arguments and results."""
    return {name: lowered.compile().memory_analysis().temp_size_in_bytes for name, lowered in programs.items()}


# All have the kv heads of Llama 3 8B. A narrow model has smaller activations, which fewer layers exceed.
NARROW, WIDE, WIDER = llama(5, 1024, 14_336, 8), llama(18, 4096, 14_336, 32), llama(24, 4096, 14_336, 32)
READ = ("full", "h2o:budget=24", "snapkv:budget=24,window=4")
KVMERGER = "kvmerger:budget=24,recent=8,merge.heavy=4,merge.theta=None"


@pytest.mark.aot
@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")
@pytest.mark.parametrize(
    ("name", "config", "tokens", "text"),
    [
        ("h200:1", NARROW, 65_536, READ[1]),  # it scores by all queries, snapkv by a few, and full by none
        *(pytest.param("h200:1", NARROW, 65_536, READ[i], marks=pytest.mark.exhaustive) for i in (0, 2)),
        *(pytest.param("h200:1", WIDE, 16_384, text, marks=pytest.mark.exhaustive) for text in (*READ, KVMERGER)),
        pytest.param("v6e:2x2", WIDER, 16_384, READ[2], marks=pytest.mark.exhaustive),  # three minutes
    ],
    ids=lambda value: {NARROW: "5", WIDE: "18", WIDER: "24"}.get(value) if isinstance(value, DecoderConfig) else None,
)
def test_a_prompt_is_held_a_layer_at_a_time(name: str, config: DecoderConfig, tokens: int, text: str) -> None:
    """Less is held beside weights and cache than the keys and values of all layers, or the MLP for all tokens."""
    mesh = kvjax.make_mesh(devices=accelerators(name)[:1])
    programs = lower_prefill(config, sized(text), mesh=mesh, batch=1, length=tokens, new_tokens=64)
    assert max(temporaries(programs).values()) < tokens * config.bytes_per_token("bfloat16")


CHUNK = 4096


@pytest.mark.aot
@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")
@pytest.mark.parametrize("text", part(READ, [READ[1]], [READ[1]]))
def test_a_chunk_takes_two_layers_and_its_activations(text: str) -> None:
    """Beside weights and cache: at most the keys and values of two layers, and what the MLP makes of 4,096 tokens."""
    mesh, length = kvjax.make_mesh(devices=accelerators("h200:1")[:1]), 65_536
    programs = lower_prefill(NARROW, sized(text), mesh=mesh, batch=1, length=length, new_tokens=64, chunk=CHUNK)
    assert sum(name.startswith("_read_layers") for name in programs) == 3  # of the first chunk, the last, and others
    layer = length * NARROW.bytes_per_token("bfloat16") // NARROW.num_layers
    activations = 3 * CHUNK * NARROW.mlp_size * 2
    assert max(temporaries(programs).values()) < 2 * layer + activations


@pytest.mark.parametrize("lower", [lower_decode, lower_prefill])
def test_sizes_that_do_not_fit(lower) -> None:
    mesh = kvjax.make_mesh(devices=jax.devices()[:1])
    with pytest.raises(ValueError, match="new_tokens=0: expected an integer in 1"):
        lower(CONFIG, parse("full"), mesh=mesh, batch=1, length=8, new_tokens=0)
    if jax.device_count() >= 3:
        with pytest.raises(ValueError, match="model=3 does not fit"):
            lower(CONFIG, parse("full"), mesh=kvjax.make_mesh(model=3), batch=1, length=8, new_tokens=1)
