"""Generation on a mesh of 8 devices: the tokens of one device, and no communication beyond what is declared."""

import math
import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache, partial

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import kvjax
from kvjax.decode import Decoding, decode
from kvjax.extend import read, step
from kvjax.models import Decoder, Rope
from kvjax.models.rope import DynamicScaling
from kvjax.policies import parse
from kvjax.session import Session
from kvjax.sharing import pool_rows, share_out
from tests.conftest import POLICIES, POLICY_PARAMS
from tests.tiny import VOCAB, decoder

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")

RNG = np.random.default_rng(5)
# Longer and shorter than the budget; of distinct tokens, since the keys of equal ones have equal norms and would tie.
ROWS = [RNG.permutation(VOCAB)[:n].tolist() for n in (44, 33, 5, 20, 17, 9, 40, 3)]
NEW = 24
HEADS = 8
QUANTIZED = "quantize:policy=morphkv,policy.budget=24,policy.window=4"


@cache
def mesh(data: int, model: int) -> Mesh:
    return kvjax.make_mesh(data, model)


@cache
def sharded(data: int, model: int, kv_heads: int, layers: int = 1) -> Decoder:
    return kvjax.shard(decoder(HEADS, kv_heads, (None,) * layers), mesh(data, model))


def layers_for(text: str) -> int:
    """One layer does for what treats all alike."""
    return 2 if parse(text).shares else 1


def policy_for(text: str, kv_heads: int) -> kvjax.Policy:
    """Heads that compete do so in groups that fit a mesh of any size: of one head, but in all layers."""
    return parse(text.replace("groups=2", f"groups={kv_heads}"))


@cache
def expected(text: str, kv_heads: int) -> tuple[kvjax.Generation, kvjax.Generation]:
    """On one device: an answer, and how it goes on."""
    params = decoder(HEADS, kv_heads, (None,) * layers_for(text))
    answer = kvjax.generate(params, ROWS, policy=policy_for(text, kv_heads), max_new_tokens=NEW, log_probs=True)
    return answer, kvjax.generate(params, None, cache=answer.cache, max_new_tokens=NEW, log_probs=True)


def assert_equal(ours: kvjax.Generation, theirs: kvjax.Generation, atol: float = 1e-5) -> None:
    np.testing.assert_array_equal(ours.tokens, theirs.tokens)
    np.testing.assert_array_equal(ours.lengths, theirs.lengths)
    assert ours.log_probs is not None
    assert theirs.log_probs is not None
    np.testing.assert_allclose(ours.log_probs, theirs.log_probs, atol=atol, rtol=0)
    assert len({row.tobytes() for row in ours.tokens}) > len(ROWS) // 2  # or equality would say little


FAST = {
    (2, 4, 2, "tova:budget=24"),
    (2, 4, 2, "morphkv:budget=24,window=4"),
    (2, 4, 2, "d2o:budget=24,layer_budgets=False"),
    (2, 4, 2, "kvcrush:base=snapkv,base.budget=24,base.window=4,share=0.5"),
    (4, 2, 2, "full"),
    (2, 4, 2, "kvcompose:budget=24"),
}
ON_SHARED_HEADS = ("h2o:budget=24,group=max", "morphkv:budget=24,window=4,block=2")
SIZES = [(8, 1, 2), (4, 2, 2), (2, 4, 2), (1, 8, 4)]  # data, model, kv heads; the last two share each kv head


@pytest.mark.parametrize(
    ("data", "model", "kv_heads", "text"),
    [
        pytest.param(*size, text, marks=[] if (*size, text) in FAST else pytest.mark.slow)
        for size in SIZES
        for text in (*POLICIES, *(ON_SHARED_HEADS if size == SIZES[-1] else ()))
    ],
)
def test_tokens_are_those_of_one_device(data: int, model: int, kv_heads: int, text: str) -> None:
    params = sharded(data, model, kv_heads, layers_for(text))
    answer = kvjax.generate(params, ROWS, policy=policy_for(text, kv_heads), max_new_tokens=NEW, log_probs=True)
    one_device, going_on = expected(text, kv_heads)
    assert_equal(answer, one_device)
    assert_equal(kvjax.generate(params, None, cache=answer.cache, max_new_tokens=NEW, log_probs=True), going_on)
    assert answer.cache.nbytes == one_device.cache.nbytes
    pool = answer.cache.pool
    for entries in answer.cache.layers if pool is None else [pool]:  # a pool has lanes of heads for heads
        B, H, S, D = entries.keys.shape
        for array, rest in ((entries.keys, (S, D)), (entries.values, (S, D)), (entries.positions, (S,))):
            shares = {shard.data.shape for shard in array.addressable_shards}
            assert shares == {(B // data, max(1, H // model), *rest)}
    copies = 0
    for array in jax.tree.leaves(answer.cache.entries):
        held: dict[str, np.ndarray] = {}
        for shard in array.addressable_shards:  # devices that share a head keep the same of it, bit by bit
            other = held.setdefault(str(shard.index), np.asarray(shard.data))
            np.testing.assert_array_equal(shard.data, other)
        copies += 8 - len(held)
    assert (copies > 0) == (model > kv_heads)


@pytest.mark.parametrize("text", [QUANTIZED, pytest.param("quantize:bits=4,group=4", marks=pytest.mark.slow)])
def test_quantized_caches(text: str) -> None:
    """Codes and scales are spread as keys and values are; a few that round the other way move the probabilities."""
    params = sharded(2, 4, 2)
    answer = kvjax.generate(params, ROWS, policy=parse(text), max_new_tokens=NEW, log_probs=True)
    assert_equal(answer, expected(text, 2)[0], atol=5e-3)
    for array in jax.tree.leaves([(entries.keys, entries.values) for entries in answer.cache.layers]):
        assert {shard.data.shape[:2] for shard in array.addressable_shards} == {(4, 1)}


@pytest.mark.parametrize(
    "text", ["h2o:budget=24", pytest.param("morphkv:budget=24,window=4,every=4", marks=pytest.mark.slow)]
)
def test_a_prompt_in_chunks(text: str) -> None:
    answer = kvjax.generate(sharded(2, 4, 2), ROWS, policy=parse(text), max_new_tokens=NEW, log_probs=True, chunk=20)
    assert_equal(answer, expected(text, 2)[0])


def test_windows_biases_and_frequencies_by_row() -> None:
    """All that a family may add to a layer, with RoPE that depends on each row's length."""
    config = replace(decoder(HEADS, 2).config, windows=(None, 16), rope=Rope(1e4, DynamicScaling(2.0, 16)))
    config = replace(config, qkv_bias=True, output_bias=True, mlp_bias=True, qk_norm=True)
    noise = np.random.default_rng(6)  # or biases would be zero
    params = jax.tree.map(lambda x: x + 0.1 * noise.normal(size=x.shape).astype(x.dtype), Decoder(config, nnx.Rngs(0)))
    options = {"policy": parse("h2o:budget=24"), "max_new_tokens": NEW, "log_probs": True}
    one_device = kvjax.generate(params, ROWS, **options)
    answer = kvjax.generate(kvjax.shard(params, mesh(2, 4)), ROWS, **options)
    assert_equal(answer, one_device)
    assert answer.cache.rope.sharding.spec[0] == "data"
    assert answer.cache.layers[1].slots == 16


def test_stream_and_sampler(compiled: list[str]) -> None:
    """Draws by row and position, the penalty's memory of tokens, and ends of rows; and steps compile nothing anew."""
    options = {
        "policy": parse("tova:budget=24"),
        "sampler": kvjax.Sampler(temperature=0.8, top_p=0.95, repetition_penalty=1.2),
        "eos": [list(range(i)) for i in range(8)],
        "seed": 3,
        "max_new_tokens": NEW,
    }
    one_device = kvjax.generate(decoder(HEADS, 2), ROWS, **options)
    assert len(set(one_device.lengths.tolist())) > 1
    pieces = []
    for piece in kvjax.stream(sharded(2, 4, 2), ROWS, **options):
        pieces.append(piece)
        if len(pieces) == 3:
            compiled.clear()
    assert compiled == []
    np.testing.assert_array_equal(np.stack([piece.tokens for piece in pieces], axis=1), one_device.tokens)


def test_a_question_to_a_document() -> None:
    """`prefill` and a turn of several tokens on the mesh; `extend` and `with_room` from outside."""
    policy, question = parse("snapkv:budget=24,window=4"), [row[:3] for row in ROWS]
    answers, extended = [], []
    for params in (decoder(HEADS, 2), sharded(2, 4, 2)):
        document = kvjax.prefill(params, ROWS, policy=policy)
        answers.append(kvjax.generate(params, question, cache=document, max_new_tokens=NEW, log_probs=True))
        extended.append(kvjax.extend(params, kvjax.with_room(document, 1), np.array(question)[:, :1]))
    assert_equal(answers[1], answers[0])
    (theirs, their_cache), (ours, our_cache) = extended
    np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=0)
    np.testing.assert_array_equal(our_cache.layers[0].positions, their_cache.layers[0].positions)


def test_a_second_answer_compiles_nothing(compiled: list[str]) -> None:
    params, policy = sharded(2, 4, 2), parse("tova:budget=24")
    kvjax.generate(params, ROWS, policy=policy, max_new_tokens=NEW, log_probs=True)
    compiled.clear()
    kvjax.generate(params, ROWS, policy=policy, max_new_tokens=NEW, log_probs=True)
    assert compiled == []


@dataclass(frozen=True)
class Communication:
    """The collectives of a program: how many arrays each kind moves, and the most numbers in one of them."""

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
    "kvmerger:budget=24,recent=8,heavy=4,theta=None": (0, 0),
    "keyformer:budget=24,recent=8": (0, 1),  # the group's queries
    "scissorhands:budget=24,window=8,drop=0.25": (0, 1),
    QUANTIZED: (0, 2),  # as morphkv
    "pyramidkv:budget=24,window=4,beta=2": (0, 0),  # as snapkv
    "finch:budget=24,window=4,chunk=8": (0, 0),
    "expected_attention:budget=24,future=16": (0, 0),  # the statistics of queries only while a prompt is read
    "knorm:budget=24": (0, 0),
    "keydiff:budget=24,every=1": (0, 0),
    "random:budget=24,every=1": (0, 0),
    "lagkv:budget=24,sinks=2,lag=4,every=4": (0, 0),
    "chunkkv:base=h2o,base.budget=24,length=5": (0, 1),  # as h2o
    "criticalkv:base=h2o,base.budget=24": (0, 2),  # as h2o; the norms of projected values
    "dynamickv:budget=24,window=4": (0, 0),  # nothing once the budget is shared out
    "kvcompose:budget=24": (0, 0),
    "adakv:base=h2o,base.budget=24,groups=2": (0, 1),  # as h2o
    "kvzip:budget=24,chunk=16,instruction='',starting='',suffix='',groups=2": (0, 0),
}


@pytest.mark.parametrize("text", [*POLICY_PARAMS, QUANTIZED])
@pytest.mark.parametrize(("data", "model", "kv_heads"), [(2, 4, 4), pytest.param(2, 4, 2, marks=pytest.mark.slow)])
def test_a_step_communicates_what_is_declared(text: str, data: int, model: int, kv_heads: int) -> None:
    layers = 2
    params = sharded(data, model, kv_heads, layers)
    shape = {"batch": len(ROWS), "length": 64, "new_tokens": NEW, "dtype": np.float32}
    filled = kvjax.plan_cache(params.config, policy_for(text, kv_heads), **shape, mesh=mesh(data, model))
    active = jax.ShapeDtypeStruct((len(ROWS),), bool, sharding=filled.length.sharding)
    hlo = jax.jit(step, donate_argnums=1).lower(params, filled, filled.pending, active).compile().as_text()
    found = Communication.of(hlo)
    reduces, gathers = DECLARED[text]
    gathers = gathers if model > kv_heads else 0
    # Once a step: the embedding is summed over the devices that hold the vocabulary, and logits are gathered from them.
    assert found.counts == Counter({"all-reduce": layers * (2 + reduces) + 1, "all-gather": layers * gathers + 1})
    assert found.largest <= len(ROWS) // data * VOCAB
    keys = jax.tree.leaves(filled.layers[0].keys if filled.pool is None else filled.pool.keys)[0].size
    assert found.largest < keys // (1 if filled.pool is None else layers) // (data * min(model, kv_heads))


def test_full_heads_communicate_nothing() -> None:
    """Each device has one kv head, which is full in one of the two layers."""
    params = sharded(2, 4, 4, layers=2)
    policy = kvjax.policies.duo_attention(((0.9, 0.1, 0.8, 0.2), (0.1, 0.7, 0.2, 0.6)), 0.5, 2, 10, groups=4)
    one_device = kvjax.generate(decoder(HEADS, 4, (None, None)), ROWS, policy=policy, max_new_tokens=NEW)
    answer = kvjax.generate(params, ROWS, policy=policy, max_new_tokens=NEW)
    np.testing.assert_array_equal(answer.tokens, one_device.tokens)
    active = answer.cache.put_rows(np.ones(len(ROWS), bool))
    arguments = params, answer.cache, answer.cache.pending, active
    assert Communication.of(jax.jit(step).lower(*arguments).compile().as_text()).counts == Counter(
        {"all-reduce": 2 * 2 + 1, "all-gather": 1}
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kvcompose:budget=24", {"all-reduce": 2 + 1}),  # the mean score of each layer's heads; composites
        ("kvcompose:budget=24,structured=False,groups=4,head_mean=False", {}),
        ("dynamickv:budget=24,window=4", {"all-gather": 1}),  # all scores
        (
            "d2o:budget=24,dense_first=0,dense_last=0",
            {"all-gather": 1, "all-reduce": 2},
        ),  # variances; each layer's merge
    ],
)
def test_a_budget_is_shared_out_with_the_communication_declared(text: str, expected: dict[str, int]) -> None:
    params = sharded(2, 4, 4, layers=2)
    policy = parse(text)
    cache = kvjax.prefill(params, ROWS, policy=policy, compress="never")
    rows = pool_rows(policy, cache.kept, 4, room=0)
    hlo = jax.jit(share_out, static_argnames=("rows", "room")).lower(params, cache, rows=rows, room=0)
    assert Communication.of(hlo.compile().as_text()).counts == Counter(expected)


# While a prompt is read and compressed, per layer and beyond what "full" does: (all-reduces, all-gathers over kv heads,
# all-gathers where devices share one).
READING = {
    "snapkv:budget=24,window=4": (0, 0, 2),  # the window's queries and their log-sum-exp
    "kvcrush:base=snapkv,base.budget=24,base.window=4,share=0.5": (1, 2, 2),  # the anchor; ranks and positions
    "chunkkv:base=snapkv,base.budget=24,base.window=4": (0, 2, 2),  # scores and positions
    "criticalkv:base=snapkv,base.budget=24,base.window=4": (0, 0, 3),  # the norms of projected values
    "d2o:budget=24,layer_budgets=False": (1, 0, 2),  # the mean over heads of a merge; the group's queries and lse
    "expected_attention:budget=24,future=16": (0, 0, 3),  # number, mean and scatter of the group's queries
}


@pytest.mark.parametrize(
    ("text", "kv_heads"),
    [
        pytest.param(text, kv_heads, marks=[] if gathers and kv_heads == 4 else pytest.mark.slow)
        for text, (_, gathers, _) in READING.items()
        for kv_heads in (4, 2)
    ],
)
def test_a_prompt_communicates_what_is_declared(text: str, kv_heads: int) -> None:
    params = sharded(2, 4, kv_heads)
    lengths, tokens = np.full(len(ROWS), 40), np.zeros((len(ROWS), 40), int)

    def found(text: str) -> Counter:
        empty = kvjax.KVCache.empty(params.config, parse(text), lengths, 40, np.float32, mesh(2, 4))
        options = {"slots": (40 if text == "full" else 24,), "compress": True, "final": True}
        reading = jax.jit(partial(read, **options))
        rows = map(empty.put_rows, (tokens, lengths))
        return Communication.of(reading.lower(params, empty, *rows).compile().as_text()).counts

    reduces, gathers, shared = READING[text]
    gathers += shared if kv_heads < 4 else 0
    assert found(text) - found("full") == +Counter({"all-reduce": reduces, "all-gather": gathers})


def test_the_loop_communicates_one_bit_more() -> None:
    """Sampling and the answers' arrays move nothing; whether any row goes on is asked of all devices once a step."""
    params = sharded(2, 4, 2)
    session = Session.open(params, ROWS, policy=parse("tova:budget=24"), max_new_tokens=NEW)
    batch = map(session.cache.put_rows, (session.batch.tokens, session.batch.lengths))
    logits, filled = kvjax.extend(params, session.cache, *batch)
    state = Decoding.begin(session, filled, size=64, log_probs=True)
    limit, sampler = np.int32(NEW), kvjax.Sampler(temperature=0.7, top_p=0.9)
    found = Communication.of(decode.lower(params, state, logits, limit, sampler=sampler).compile().as_text())
    assert found.counts == Counter({"all-reduce": 3 + 1 + 1, "all-gather": 1 + 1})


def test_rows_alone_communicate_nothing() -> None:
    params = sharded(8, 1, 2)
    cache = kvjax.prefill(params, ROWS, policy=parse("tova:budget=24"))
    active = cache.put_rows(np.ones(len(ROWS), bool))
    assert not Communication.of(jax.jit(step).lower(params, cache, cache.pending, active).compile().as_text()).counts


def test_one_device_pays_nothing() -> None:
    cache = kvjax.prefill(decoder(HEADS, 2), ROWS, policy=parse("tova:budget=24"))
    program = str(jax.make_jaxpr(step)(decoder(HEADS, 2), cache, cache.pending, np.ones(len(ROWS), bool)))
    assert not re.search("shard_map|sharding_constraint|psum|all_gather|axis_index", program)


def test_what_does_not_fit() -> None:
    params, one_device = sharded(2, 4, 2), decoder(HEADS, 2)
    with pytest.raises(ValueError, match="a batch of 3 rows on a mesh of data=2; accepted are multiples of 2 rows"):
        kvjax.generate(params, ROWS[:3])
    document = kvjax.prefill(one_device, ROWS)
    for act in (
        lambda: kvjax.generate(params, ROWS, cache=document),
        lambda: kvjax.extend(params, document, np.zeros((8, 3), int)),
        lambda: kvjax.generate(one_device, ROWS, cache=kvjax.prefill(params, ROWS)),
    ):
        with pytest.raises(
            ValueError, match=r"the cache lies on .*, the parameters on .*; accepted is the same for both"
        ):
            act()
    elsewhere = NamedSharding(jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,)), PartitionSpec())
    with pytest.raises(ValueError, match=r"'x': 8.*; accepted is a mesh of kvjax.make_mesh"):
        kvjax.generate(jax.device_put(one_device, elsewhere), ROWS)
    with pytest.raises(ValueError, match="model=3 does not fit"):
        kvjax.shard(one_device, mesh(1, 3))
