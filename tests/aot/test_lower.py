"""What `generate` runs, lowered from shapes: the same programs; and what they are on accelerators."""

import re
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.aot.graphs import compile_listed, outside_graphs
from kvjax.aot.hlo import Loop
from kvjax.aot.lower import Part, lower_decode, lower_prefill
from kvjax.aot.targets import target
from kvjax.decode import Decoding
from kvjax.models import DecoderConfig
from kvjax.parts import KeyDifference, LagDifference, ProjectedValues, SimilarityMerge
from kvjax.policies import parse
from kvjax.request import AnswerOptions, Request, read_request
from tests.conftest import DISTINCT, POLICIES
from tests.products import part
from tests.tiny import VOCAB, decoder

LAYERS, BATCH, SLOTS = 2, 4, 2048
CONFIG = replace(decoder().config, windows=(None,) * LAYERS, num_heads=16, num_kv_heads=8, head_dim=128)
POLICY = f"morphkv:budget={SLOTS},window=8"


def accelerators(name: str) -> list[jax.Device]:
    try:
        return target(name).devices()
    except ImportError as error:
        pytest.skip(str(error))


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
    state, steps = compiled(params, Decoding.begin(request, cache, size=64, log_probs=False), logits, np.int32(9))
    expected = kvjax.generate(decoder(8, 4), rows, policy=policy, sampler=sampler, max_new_tokens=9)
    np.testing.assert_array_equal(np.asarray(state.answers.tokens)[:, :9], expected.tokens)
    assert int(steps) == 8
    assert Loop.of(compiled.as_text()).collectives == Counter({"all-reduce": 2 + 1 + 1, "all-gather": 1})


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
def test_prompts_are_read_as_generate_would() -> None:
    params, mesh = decoder(8, 4), kvjax.make_mesh(data=2, model=4)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (4, 24)).astype(np.int32)
    policy, lengths = parse("snapkv:budget=12,window=4"), np.full(4, 24)
    sizes = {"batch": 4, "length": 24, "new_tokens": 9}
    compiled = lower_prefill(params.config, policy, mesh=mesh, dtype=jnp.float32, **sizes).compile()
    params = kvjax.shard(params, mesh)
    request = Request.of(params, tokens, policy=policy, answer=AnswerOptions(9))
    logits, cache = compiled(params, request.cache, *map(request.cache.put_rows, (tokens, lengths.astype(np.int32))))
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


class Answering(NamedTuple):
    """What `generate` runs to answer, compiled for accelerators.

    Attributes:
        keys: bytes of a layer's keys, or of their codes.
        outside: what the loop launches outside of CUDA graphs, by kind.
    """

    hlo: str
    loop: Loop
    memory: Any
    keys: int
    outside: Counter[str]


@cache
def answering(name: str, config: DecoderConfig, policy: kvjax.Policy, batch: int, model: int) -> Answering:
    """After prompts of 4096 tokens, up to 1024 more. One program for all tests that look at it."""
    mesh, sizes = kvjax.make_mesh(model=model, devices=accelerators(name)[:model]), {"length": 4096, "new_tokens": 1024}
    lowered, outside = lower_decode(config, policy, mesh=mesh, batch=batch, **sizes), Counter[str]()
    if mesh.devices.flat[0].platform == "gpu":
        compiled, launches = compile_listed(lowered)
        outside = outside_graphs(launches)
    else:
        compiled = lowered.compile()
    cache = kvjax.plan_cache(config, policy, dtype="bfloat16", batch=batch, **sizes)
    keys = max(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache.entries.stored[0]))
    hlo = compiled.as_text()
    return Answering(hlo, Loop.of(hlo), compiled.memory_analysis(), keys, outside)


FEW_ROWS = [("135m", 1, 1), ("8b", 1, 1), ("70b", 1, 1), ("8b", 2, 1), ("8b", 8, 1), ("8b", 2, 2)]


@pytest.mark.aot
@pytest.mark.parametrize(("shape", "batch", "data"), part(FEW_ROWS, [FEW_ROWS[0], FEW_ROWS[-1]]))
def test_no_product_of_a_gpu_writes_a_weight(shape: str, batch: int, data: int) -> None:
    """The projections of a step read their weights, and write nothing of a weight's size."""
    sizes = {"135m": (576, 1536, 9, 3), "8b": (4096, 14_336, 32, 8), "70b": (8192, 28_672, 64, 8)}[shape]
    names = ("hidden_size", "mlp_size", "num_heads", "num_kv_heads")
    config = replace(CONFIG, windows=(None,), **dict(zip(names, sizes, strict=True)))
    mesh = kvjax.make_mesh(data=data, devices=accelerators(f"h100:{data}"))
    lowered = lower_decode(config, parse("full"), mesh=mesh, batch=batch, length=64, new_tokens=64)
    least = config.hidden_size * config.num_kv_heads * config.head_dim
    assert Loop.of(lowered.compile().as_text()).rewrites(least) == []


KERNELS = {"h200:1": "triton", "v6e:2x2": "tpu_custom_call"}  # as a program calls them
STEP_KERNELS = [  # of a layer and step, for jax 0.10; later versions launch fewer
    ("full", 1, 14),
    ("full", 8, 14),
    ("morphkv:budget=2048,window=32", 1, 18),
    ("morphkv:budget=2048,window=32", 8, 18),
    ("snapkv:budget=2048", 1, 14),
    ("h2o:budget=2048", 1, 16),
    ("streaming_llm:budget=2048", 1, 16),
    ("kvcompose:budget=0.25", 1, 18),
    ("quantize:policy=snapkv,bits=8", 1, 19),
]


@pytest.mark.aot
@pytest.mark.parametrize(("policy", "batch", "most"), part(STEP_KERNELS, [STEP_KERNELS[0], STEP_KERNELS[3]]))
def test_kernels_of_a_step_on_a_gpu(policy: str, batch: int, most: int) -> None:
    """The difference of two layers and one. All of them are in one CUDA graph."""
    one, two = (answering("h200:1", llama(n, 4096, 14_336, 32), parse(policy), batch, 1) for n in (1, 2))
    assert not two.outside
    assert two.loop.rewrites(two.keys) == []
    assert KERNELS["h200:1"] in two.hlo
    assert 10 < two.loop.kernels - one.loop.kernels <= most  # attention, MLP and norms take 10 at least


def llama(layers: int, hidden: int, mlp: int, heads: int) -> DecoderConfig:
    """Llama 3's shapes, of 8 kv heads."""
    return replace(
        CONFIG, windows=(None,) * layers, hidden_size=hidden, mlp_size=mlp, num_heads=heads, vocab_size=128_256
    )


SIZED = {"budget=24": "budget=1024", "window=4": "window=32", "recent=8": "recent=256", "heavy=4": "heavy=128"}
SIZED |= {"window=8": "window=256", "length=5": "length=16", "chunk=8": "chunk=256", "chunk=16": "chunk=1024"}


# They normalise a partition's keys, or project all values, whenever they evict. Positions in the cache rotate anew.
REWRITING = (LagDifference, ProjectedValues)
# They read all keys to evict. A TPU's compiler may fetch these into its fast memory, where they are read twice and one
# of them is overwritten, and write them back meanwhile.
READING_KEYS = (KeyDifference, SimilarityMerge)

SNAPKV, DYNAMICKV = "snapkv,policy.budget=1024,policy.window=32", "dynamickv,policy.budget=1024"
TPU_CODES = ("v6e:2x2", SNAPKV, 4)
KVMERGER = "kvmerger:budget=24,recent=8,merge.heavy=4,merge.theta=None"


def sized(text: str) -> kvjax.Policy:
    """A preset of the tests with a budget to compile for."""
    return parse(re.sub(r"\b(budget|window|recent|heavy|length|chunk)=\d+\b", lambda part: SIZED[part[0]], text))


# A TPU's compiler takes long for wide products. The cache is as large in both.
SINGLE_LAYERS = {"h200:1": llama(1, 4096, 14_336, 32), "v6e:2x2": replace(CONFIG, windows=(None,), num_heads=32)}
# Above, larger programs of full and morphkv are compiled for the H200. The scores of keyformer take the kernels of h2o,
# which adakv has here.
H200_PRESETS = [text for text in DISTINCT if not text.startswith(("full", "morphkv", "keyformer"))]


@pytest.mark.aot
@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")  # of devices that are not here
@pytest.mark.parametrize(
    ("name", "text"),
    part(
        product(["h200:1", "v6e:2x2"], POLICIES),
        [
            *product(["h200:1"], H200_PRESETS),
            *(("v6e:2x2", text) for text in DISTINCT if "d2o" in text or "every" in text),
        ],
    ),
)
def test_presets_on_one_device(name: str, text: str) -> None:
    """The kernels attend, no layer's keys are copied, and temporaries are few: 1 % of wide arguments.

    On a GPU the whole loop is a CUDA graph.
    """
    hlo, loop, memory, keys, outside = answering(name, SINGLE_LAYERS[name], sized(text), 8, 1)
    assert not loop.collectives
    assert not outside
    anew = sized(text).positions == "in_cache" or isinstance(sized(text).score, REWRITING)
    if not anew:
        written = set(loop.rewrites(keys))
        parts = (sized(text).score, sized(text).merge)
        fetched = name.startswith("v6e") and any(isinstance(part, READING_KEYS) for part in parts)
        assert {what.split()[0] for what in written} <= ({"copy-start"} if fetched else set())
        most = 0.01 * memory.argument_size_in_bytes if name == "h200:1" else keys
        assert memory.temp_size_in_bytes < most
    assert KERNELS[name] in hlo


# All have the kv heads of Llama 3 8B. A narrow model has smaller activations, which fewer layers exceed.
NARROW, WIDE, WIDER = llama(5, 1024, 14_336, 8), llama(18, 4096, 14_336, 32), llama(24, 4096, 14_336, 32)
READ = ("full", "h2o:budget=24", "snapkv:budget=24,window=4")


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
    program = lower_prefill(config, sized(text), mesh=mesh, batch=1, length=tokens, new_tokens=64).compile()
    assert program.memory_analysis().temp_size_in_bytes < tokens * config.bytes_per_token("bfloat16")


CHUNK = 4096


@pytest.mark.aot
@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")
@pytest.mark.parametrize(("which", "text"), part(product(["first", "middle", "last"], READ), [("middle", READ[1])]))
def test_a_chunk_takes_two_layers_and_its_activations(which: Part, text: str) -> None:
    """Beside weights and cache: at most the keys and values of two layers, and what the MLP makes of 4,096 tokens."""
    mesh, length = kvjax.make_mesh(devices=accelerators("h200:1")[:1]), 65_536
    lowered = lower_prefill(
        NARROW, sized(text), mesh=mesh, batch=1, length=length, new_tokens=64, chunk=CHUNK, part=which
    )
    layer = length * NARROW.bytes_per_token("bfloat16") // NARROW.num_layers
    activations = 3 * CHUNK * NARROW.mlp_size * 2
    assert lowered.compile().memory_analysis().temp_size_in_bytes < 2 * layer + activations


@pytest.mark.aot
@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")
@pytest.mark.parametrize(
    ("name", "text", "bits"),
    part(product(KERNELS, [SNAPKV, DYNAMICKV], [8, 4]), [("h200:1", SNAPKV, 4), ("h200:1", DYNAMICKV, 8), TPU_CODES]),
)
def test_codes_are_read_as_such(name: str, text: str, bits: int) -> None:
    """No array is written in a step that could be a layer's codes, and temporaries are few: 1 % of wide arguments."""
    layers = 2 if "dynamickv" in text else 1  # whose layers compete
    config, sizes = SINGLE_LAYERS[name], {"batch": 8, "length": 4096, "new_tokens": 1024}
    config = replace(config, windows=(None,) * layers)
    policy, mesh = parse(f"quantize:policy={text},bits={bits}"), kvjax.make_mesh(devices=accelerators(name)[:1])
    compiled = lower_decode(config, policy, mesh=mesh, **sizes).compile()
    hlo, memory = compiled.as_text(), compiled.memory_analysis()
    cache = kvjax.plan_cache(config, policy, dtype="bfloat16", **sizes)
    keys = [cache.entries.stored[0]]
    codes = min(x.codes.size for x in keys)
    assert Loop.of(hlo).rewrites(codes) == []
    most = 0.01 * memory.argument_size_in_bytes if name == "h200:1" else codes
    assert memory.temp_size_in_bytes < most
    assert hlo.count(KERNELS[name]) >= layers


TWO_LAYERS, LLAMA_8B = llama(2, 4096, 14_336, 32), llama(32, 4096, 14_336, 32)
LLAMA_70B = llama(80, 8192, 28_672, 64)
MORPHKV, SNAPKV_8B = "morphkv:budget=2048,window=32", "snapkv:budget=2048,window=32"
# From jax 0.12 on, MorphKV's state goes through a TPU's fast memory, and comes back beside where it was: 1.6 %.
MOVED = 0.01 if jax.__version_info__ < (0, 12) else 0.02


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")
@pytest.mark.parametrize(
    ("name", "model", "config", "text", "temporaries"),
    [
        pytest.param("h200:1", 1, TWO_LAYERS, MORPHKV, 0.01, id="2-layers-h200:1"),
        pytest.param("h200:1", 1, LLAMA_8B, MORPHKV, 0.01, id="8B-h200:1", marks=pytest.mark.exhaustive),
        pytest.param("v6e:2x2", 1, LLAMA_8B, SNAPKV_8B, 0.01, id="8B-v6e-snapkv", marks=pytest.mark.exhaustive),
        pytest.param("v6e:2x2", 1, LLAMA_8B, MORPHKV, MOVED, id="8B-v6e", marks=pytest.mark.exhaustive),
        pytest.param("h200:8", 8, LLAMA_70B, MORPHKV, 0.01, id="70B-h200:8", marks=pytest.mark.exhaustive),
        pytest.param("v5p:2x2x2", 8, LLAMA_70B, MORPHKV, 0.02, id="70B-v5p:2x2x2", marks=pytest.mark.exhaustive),
    ],
)
def test_whole_models(name: str, model: int, config: DecoderConfig, text: str, temporaries: float) -> None:
    """All layers: they fit, and the model alone communicates, twice a layer."""
    _, loop, memory, _, _ = answering(name, config, parse(text), 8, model)
    layers = len(config.windows)
    assert loop.collectives == (Counter({"all-reduce": 2 * layers + 1, "all-gather": 1}) if model > 1 else Counter())
    assert loop.rewrites(8 * 2048 * config.head_dim * 2 * config.num_kv_heads // model) == []
    assert memory.temp_size_in_bytes < temporaries * memory.argument_size_in_bytes
    taken = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    assert taken + memory.temp_size_in_bytes < target(name).chip.memory


@pytest.mark.parametrize("lower", [lower_decode, lower_prefill])
def test_sizes_that_do_not_fit(lower) -> None:
    mesh = kvjax.make_mesh(devices=jax.devices()[:1])
    with pytest.raises(ValueError, match="new_tokens=0: expected an integer in 1"):
        lower(CONFIG, parse("full"), mesh=mesh, batch=1, length=8, new_tokens=0)
    if jax.device_count() >= 3:
        with pytest.raises(ValueError, match="model=3 does not fit"):
            lower(CONFIG, parse("full"), mesh=kvjax.make_mesh(model=3), batch=1, length=8, new_tokens=1)
