"""Generation on a mesh of 8 devices gives the tokens of one device."""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import kvjax
from kvjax.cache import Segments
from kvjax.models import Decoder, Mixture, Rope
from kvjax.models.rope import DynamicScaling
from kvjax.policies import parse
from tests.attend.meshes import HEADS, NEW, QUANTIZED, ROWS, assert_equal, layers_for, mesh, policy_for, sharded
from tests.conftest import POLICIES
from tests.products import part
from tests.tiny import decoder

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")


@cache
def expected(text: str, kv_heads: int) -> kvjax.Generation:
    """An answer on one device."""
    params = decoder(HEADS, kv_heads, (None,) * layers_for(text))
    return kvjax.generate(params, ROWS, policy=policy_for(text, kv_heads), max_new_tokens=NEW, log_probs=True)


MORPHKV = "morphkv:budget=24,window=4"
CHOSEN = {
    (2, 4, 2, "tova:budget=24"),
    (2, 4, 2, MORPHKV),
    (2, 4, 2, "d2o:budget=24,layer_budgets=False"),
    (2, 4, 2, "kvcrush:base=snapkv,base.budget=24,base.window=4,share=0.5"),
    (4, 2, 2, "full"),
    (2, 4, 2, "kvcompose:budget=24"),
    (2, 4, 2, "compactor:budget=24,chunk=16,sketch=6"),
    (1, 8, 4, "h2o:budget=24,group=max"),
    (1, 8, 4, "keyformer:budget=24,recent=8"),
    (1, 8, 4, "lazyeviction:budget=24,window=4,alpha=0.04"),
    (8, 1, 2, "tova:budget=24"),
}
GROWING = ("full", "kvcompose:budget=24")  # slots and a pool
ON_SHARED_HEADS = (
    "h2o:budget=24,group=max",
    "morphkv:budget=24,window=4,block=2",
    "lazyeviction:budget=24,window=4,alpha=0.04",
)
SIZES = [(8, 1, 2), (4, 2, 2), (2, 4, 2), (1, 8, 4)]  # data, model, kv heads; the last two share each kv head


@pytest.mark.long
@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    ("data", "model", "kv_heads", "text"),
    part([(*size, text) for size in SIZES for text in (*POLICIES, *(ON_SHARED_HEADS * (size == SIZES[-1])))], CHOSEN),
)
def test_tokens_are_those_of_one_device(data: int, model: int, kv_heads: int, text: str) -> None:
    params = sharded(data, model, kv_heads, layers_for(text))
    answer = kvjax.generate(params, ROWS, policy=policy_for(text, kv_heads), max_new_tokens=NEW, log_probs=True)
    one_device = expected(text, kv_heads)
    assert_equal(answer, one_device)
    pairs = ((params, answer.cache), (decoder(HEADS, kv_heads, (None,) * layers_for(text)), one_device.cache))
    if text == MORPHKV:
        options = {"max_new_tokens": NEW, "log_probs": True}
        assert_equal(*(kvjax.generate(model, None, cache=cache, **options) for model, cache in pairs))
    if text in GROWING:
        ours, theirs = (
            kvjax.extend(model, kvjax.with_room(cache, 4 * NEW), one_device.tokens[:, -1:]) for model, cache in pairs
        )
        np.testing.assert_allclose(ours[0], theirs[0], atol=1e-5, rtol=0)
        assert ours[1].nbytes == theirs[1].nbytes > answer.cache.nbytes
    assert answer.cache.nbytes == one_device.cache.nbytes
    stored = answer.cache.entries
    for entries in [stored] if isinstance(stored, Segments) else stored:  # a pool has lanes of heads for heads
        B, H, S, D = entries.keys.shape
        for array, rest in ((entries.keys, (S, D)), (entries.values, (S, D)), (entries.positions, (S,))):
            shares = {shard.data.shape for shard in array.addressable_shards}
            assert shares == {(B // data, max(1, H // model), *rest)}
    copies = 0
    for array in jax.tree.leaves(answer.cache.entries):
        seen: dict[str, np.ndarray] = {}
        for shard in array.addressable_shards:  # devices that share a head hold the same bits of it
            other = seen.setdefault(str(shard.index), np.asarray(shard.data))
            np.testing.assert_array_equal(shard.data, other)
        copies += 8 - len(seen)
    assert (copies > 0) == (model > kv_heads)


@pytest.mark.slow
@pytest.mark.parametrize("text", [QUANTIZED, pytest.param("quantize:bits=4,group=4", marks=pytest.mark.exhaustive)])
def test_quantized_caches(text: str) -> None:
    """Codes and scales lie where keys and values would. A few codes are rounded the other way."""
    params = sharded(2, 4, 2)
    answer = kvjax.generate(params, ROWS, policy=parse(text), max_new_tokens=NEW, log_probs=True)
    assert_equal(answer, expected(text, 2), atol=5e-3)
    for array in jax.tree.leaves([(entries.keys, entries.values) for entries in answer.cache.entries]):
        assert {shard.data.shape[:2] for shard in array.addressable_shards} == {(4, 1)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    ["h2o:budget=24,group=max", pytest.param("morphkv:budget=24,window=4,every=4", marks=pytest.mark.exhaustive)],
)
def test_a_prompt_in_chunks(text: str) -> None:
    answer = kvjax.generate(sharded(1, 8, 4), ROWS, policy=parse(text), max_new_tokens=NEW, log_probs=True, chunk=24)
    assert_equal(answer, expected(text, 4))


@pytest.mark.slow
@pytest.mark.parametrize(
    "facts",
    [
        {"qkv_bias": True, "output_bias": True, "mlp_bias": True, "qk_norm": True},
        {"qk_norm": True, "joint_qk_norm": True, "pre_norm": False, "post_norm": True}
        | {"attention_scale": 0.5, "embedding_scale": 2.0, "residual_scale": 0.5, "logit_divisor": 3.0}
        | {"attention_softcap": 0.5, "logit_softcap": 2.0, "activation": "gelu_tanh"},
        {"mixture": Mixture(experts=8, per_token=3, size=20, biased=True, limit=1.0), "attention_sinks": True},
    ],
    ids=["biases", "norms, factors and caps", "experts and sinks"],
)
def test_windows_and_frequencies_by_row_with(facts: dict[str, Any]) -> None:
    """Everything that a family may add to a layer, with RoPE that depends on each row's length."""
    config = replace(decoder(HEADS, 2).config, windows=(16,), rope=Rope(1e4, DynamicScaling(2.0, 16)), **facts)
    noise = np.random.default_rng(6)  # or biases would be zero
    params = jax.tree.map(
        lambda x: jnp.asarray(np.asarray(x) + 0.1 * noise.normal(size=x.shape).astype(x.dtype)),
        Decoder(config, nnx.Rngs(0)),
    )
    options = {"policy": parse("h2o:budget=24"), "max_new_tokens": NEW, "log_probs": True}
    one_device = kvjax.generate(params, ROWS, **options)
    answer = kvjax.generate(kvjax.shard(params, mesh(2, 4)), ROWS, **options)
    assert_equal(answer, one_device)
    assert answer.cache.rope.sharding.spec[0] == "data"
    assert answer.cache.entries[0].slots == 16


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "adakv:base=h2o,base.budget=24,groups=2",
        "kvzip:budget=24,score.chunk=16,score.instruction='',score.starting='',score.suffix='',groups=2",
        pytest.param("morphkv:budget=24,window=4,block=2", marks=pytest.mark.exhaustive),
        pytest.param("keyformer:budget=24,recent=8", marks=pytest.mark.exhaustive),
        pytest.param("kvcompose:budget=24", marks=pytest.mark.exhaustive),
    ],
)
def test_sinks_on_shared_heads(text: str) -> None:
    """Devices that share a kv head have the sinks of their own query heads, and scores look at the whole group."""
    layers = layers_for(text)
    config = replace(decoder(HEADS, 4, (None,) * layers).config, attention_sinks=True)
    params = Decoder(config, nnx.Rngs(0))
    for layer in params.layers:
        sinks = layer.attention.sinks
        assert sinks is not None
        sinks[...] = jnp.linspace(-1.0, 3.0, HEADS)
    options = {"policy": policy_for(text, 4), "max_new_tokens": NEW, "log_probs": True}
    one_device = kvjax.generate(params, ROWS, **options)
    assert_equal(kvjax.generate(kvjax.shard(params, mesh(1, 8)), ROWS, **options), one_device)


@pytest.mark.slow
def test_stream_and_sampler(compiled: list[str]) -> None:
    """Draws, penalties and ends of rows are those of one device, and later steps compile nothing."""
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


@pytest.mark.slow
def test_a_question_to_a_document() -> None:
    """`prefill` and a turn of several tokens on the mesh; `extend` from outside."""
    policy, question = parse(MORPHKV), [row[:3] for row in ROWS]
    answers, extended = [], []
    for params in (decoder(HEADS, 2), sharded(2, 4, 2)):
        document = kvjax.prefill(params, ROWS, policy=policy)
        answers.append(kvjax.generate(params, question, cache=document, max_new_tokens=NEW, log_probs=True))
        extended.append(kvjax.extend(params, document, np.array(question)[:, :1]))
    assert_equal(answers[1], answers[0])
    (theirs, their_cache), (ours, our_cache) = extended
    np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=0)
    np.testing.assert_array_equal(our_cache.entries[0].positions, their_cache.entries[0].positions)


@pytest.mark.slow
def test_a_second_answer_compiles_nothing(compiled: list[str]) -> None:
    params, policy = sharded(2, 4, 2), parse("tova:budget=24")
    kvjax.generate(params, ROWS, policy=policy, max_new_tokens=NEW, log_probs=True)
    compiled.clear()
    kvjax.generate(params, ROWS, policy=policy, max_new_tokens=NEW, log_probs=True)
    assert compiled == []


def test_what_does_not_fit() -> None:
    params, one_device = sharded(2, 4, 2), decoder(HEADS, 2)
    with pytest.raises(ValueError, match="a batch of 3 rows on a mesh of data=2: expected multiples of 2 rows"):
        kvjax.generate(params, ROWS[:3])
    policy = "tova:budget=24"
    document = kvjax.prefill(one_device, ROWS, policy=policy)
    for act in (
        lambda: kvjax.generate(params, ROWS, cache=document),
        lambda: kvjax.extend(params, document, np.zeros((8, 3), int)),
        lambda: kvjax.generate(one_device, ROWS, cache=kvjax.prefill(params, ROWS, policy=policy)),
    ):
        with pytest.raises(ValueError, match=r"the cache lies on .*, the parameters on .*: expected the same for both"):
            act()
    first, second = (jax.device_put(one_device, device) for device in jax.devices()[:2])
    with pytest.raises(
        ValueError, match=r"the cache lies on the device cpu:0, the parameters on the device cpu:1: exp"
    ):
        kvjax.generate(second, ROWS, cache=jax.device_put(document, jax.devices()[0]))
    kvjax.extend(first, document, np.zeros((8, 1), int))  # which is committed to no device
    elsewhere = NamedSharding(jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,)), PartitionSpec())
    with pytest.raises(ValueError, match=r"'x': 8.*: expected a mesh of kvjax.make_mesh"):
        kvjax.generate(jax.device_put(one_device, elsewhere), ROWS)
    with pytest.raises(ValueError, match="model=3 does not fit"):
        kvjax.shard(one_device, mesh(1, 3))
