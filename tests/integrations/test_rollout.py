"""The rollout worker beside tunix's own: models by their names, shared arrays, tokens, log-probabilities, errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.integrations.tunix import KVJaxActor
from kvjax.integrations.tunix.names import view_of
from kvjax.models import Decoder
from tests.tiny import decoder

pytest.importorskip("tunix", reason="tunix is not installed (docs/guide/rollouts.md)")

from tunix.models.llama3 import model as llama3
from tunix.models.qwen2 import model as qwen2
from tunix.models.qwen3 import model as qwen3
from tunix.rl.rollout.base_rollout import CacheConfig, RolloutConfig
from tunix.rl.rollout.vanilla_rollout import VanillaRollout

from kvjax.integrations.tunix import KVJaxRollout

VOCAB = 512  # of the demo model's tokenizer
SIZES = {"num_layers": 2, "embed_dim": 32, "hidden_dim": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
FAMILIES = {
    "llama3": (llama3, llama3.Llama3, {"rope_theta": 500_000, "weight_tying": True}),
    "qwen2": (qwen2, qwen2.Qwen2, {"rope_theta": 500_000, "use_tied_embedding": False}),
    "qwen3": (qwen3, qwen3.Qwen3, {"rope_theta": 1_000_000, "use_tied_embedding": True}),
}
PROMPTS = ["the tall king finds the door .", "the code of anna is lamp . the river follows the old garden .", "anna"]
CONFIG = RolloutConfig(
    max_tokens_to_generate=6, max_prompt_length=24, temperature=0.8, top_p=1.0, return_logprobs=True, eos_tokens=[511]
)
SMALL = "streaming_llm:budget=6,sinks=1"


def actor(family: str, **options: Any) -> nnx.Module:
    """A small model of tunix's. All its parameters are random, norms and biases too."""
    module, kind, own = FAMILIES[family]
    config = module.ModelConfig(vocab_size=VOCAB, norm_eps=1e-6, **SIZES, **own | options)
    model = kind(config, rngs=nnx.Rngs(0))
    noise = np.random.default_rng(0)
    nnx.update(model, jax.tree.map(lambda x: x + 0.2 * noise.normal(size=x.shape).astype(x.dtype), nnx.state(model)))
    return model


@cache
def tokenizer() -> Any:
    return kvjax.load("demo")[1]


def rollout(model: nnx.Module, **options: Any) -> KVJaxRollout:
    return KVJaxRollout(model, tokenizer(), rollout_config=CONFIG, **options)


def of_decoder() -> KVJaxActor:
    return KVJaxActor(Decoder(decoder(vocab=VOCAB).config, nnx.Rngs(0)))


def pointers(module: nnx.Module) -> set[int]:
    return {array.unsafe_buffer_pointer() for array in jax.tree.leaves(nnx.state(module))}


ACTORS: dict[str, Callable[[], nnx.Module]] = {
    "llama3": lambda: actor("llama3"),
    "qwen2": lambda: actor("qwen2"),
    "qwen3": lambda: actor("qwen3"),
    "decoder": of_decoder,
}


@pytest.mark.parametrize("make", ACTORS.values(), ids=ACTORS)
def test_log_probabilities_under_the_full_cache_are_those_of_the_trainer(make: Callable[[], nnx.Module]) -> None:
    worker = rollout(make())
    out = worker.generate(PROMPTS, CONFIG)
    assert not worker.off_policy
    assert [len(row) for row in out.tokens] == [len(row) for row in out.logprobs]
    answers = np.full((len(PROMPTS), 6), worker.pad_id())
    for line, row in zip(answers, out.tokens, strict=True):
        line[: len(row)] = row
    scored = np.asarray(worker.get_per_token_logps(out.left_padded_prompt_tokens, answers))
    for found, expected in zip(out.logprobs, scored, strict=True):
        np.testing.assert_allclose(found, expected[: len(found)], atol=2e-4)
    assert out.text == [tokenizer().decode(row[row != 511]) for row in out.tokens]


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_tunix_own_rollout(family: str) -> None:
    """The most probable tokens, up to the end token, which tunix's leaves out."""
    model, config = actor(family), replace(CONFIG, temperature=0.0, top_p=None)
    theirs = VanillaRollout(
        model, tokenizer(), CacheConfig(cache_size=64, num_layers=2, num_kv_heads=2, head_dim=8)
    ).generate(PROMPTS, config)
    ours = rollout(model).generate(PROMPTS, config)
    np.testing.assert_array_equal(ours.left_padded_prompt_tokens, theirs.left_padded_prompt_tokens)
    for a, b, p, q in zip(ours.tokens, theirs.tokens, ours.logprobs, theirs.logprobs, strict=True):
        np.testing.assert_array_equal(a[: len(b)], b)
        np.testing.assert_allclose(p[: len(q)], q, atol=2e-4)


@pytest.mark.parametrize("make", ACTORS.values(), ids=ACTORS)
def test_decoding_shares_the_arrays_of_the_actor(make: Callable[[], nnx.Module]) -> None:
    """All but the biases of Qwen2, which tunix flattens: three vectors per layer."""
    model = make()
    worker = rollout(model)
    assert worker.model() is model
    copied = pointers(view_of(worker.model())()) - pointers(model)
    assert len(copied) == (6 if isinstance(model, qwen2.Qwen2) else 0)


@pytest.mark.parametrize("make", [ACTORS["qwen3"], ACTORS["decoder"]], ids=["qwen3", "decoder"])
def test_updated_parameters_change_the_answers_without_a_copy(make: Callable[[], nnx.Module]) -> None:
    model, config = make(), replace(CONFIG, temperature=0.0)
    worker = rollout(model)
    before = worker.generate(PROMPTS, config).tokens
    trained = jax.tree.map(lambda x: x[::-1], nnx.state(model, nnx.Param))
    worker.update_params(trained, (nnx.Param,))
    after = worker.generate(PROMPTS, config).tokens
    assert any(len(a) != len(b) or (a != b).any() for a, b in zip(before, after, strict=True))
    given = {array.unsafe_buffer_pointer() for array in jax.tree.leaves(trained)}
    assert pointers(view_of(worker.model())()) == given
    fresh = make()
    nnx.update(fresh, trained)
    for a, b in zip(rollout(fresh).generate(PROMPTS, config).tokens, after, strict=True):
        np.testing.assert_array_equal(a, b)


def test_samples_under_eviction_say_so_and_have_both_log_probabilities(caplog: pytest.LogCaptureFixture) -> None:
    model = of_decoder()
    worker = rollout(model, policy=SMALL)
    assert worker.off_policy
    assert "are off-policy" in caplog.text
    seeded = replace(CONFIG, seed=jax.random.key(3))
    drawn, scored = (
        each.generate(PROMPTS, seeded) for each in (worker, rollout(model, policy=SMALL, logprobs_under="full"))
    )
    apart = []
    for a, b, p, q in zip(drawn.tokens, scored.tokens, drawn.logprobs, scored.logprobs, strict=True):
        np.testing.assert_array_equal(a, b)
        apart.append(np.abs(p - q).max())
        prompt = scored.left_padded_prompt_tokens[len(apart) - 1 : len(apart)]
        np.testing.assert_allclose(q, np.asarray(worker.get_per_token_logps(prompt, b[None]))[0], atol=1e-5)
    assert apart[1] > 1e-3  # the longest prompt, of which entries were evicted
    assert apart[2] < 1e-4  # one token, of which none was


def test_arrays_are_moved_to_another_device() -> None:
    model, config = of_decoder(), replace(CONFIG, temperature=0.0)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[1:2]), ("fsdp",))
    worker = KVJaxRollout(model, tokenizer(), mesh, config)
    trained = jax.tree.map(lambda x: x[::-1], nnx.state(model, nnx.Param))
    worker.update_params(trained)
    assert {array.device for array in jax.tree.leaves(worker.model())} == {jax.devices()[1]}
    nnx.update(model, trained)
    found, expected = (each.generate(PROMPTS, config).tokens for each in (worker, rollout(model)))
    assert all((a == b).all() for a, b in zip(found, expected, strict=True))
    with pytest.raises(ValueError, match="the rollout has 2 devices: expected one"):
        KVJaxRollout(model, tokenizer(), jax.sharding.Mesh(np.array(jax.devices()[:2]), ("fsdp",)), config)


def test_seeds_determine_the_draws_and_calls_differ_without_one() -> None:
    model = of_decoder()
    worker, other = rollout(model), rollout(model)
    seeded = replace(CONFIG, seed=jax.random.PRNGKey(5))

    def tokens(each: KVJaxRollout, config: RolloutConfig) -> list[list[int]]:
        return [row.tolist() for row in each.generate(PROMPTS, config).tokens]

    assert tokens(worker, seeded) == tokens(worker, seeded) == tokens(other, seeded)
    assert (first := tokens(worker, CONFIG)) != (second := tokens(worker, CONFIG))
    assert [tokens(other, CONFIG), tokens(other, CONFIG)] == [first, second]


def test_a_padding_token_ends_an_answer_and_is_not_part_of_it() -> None:
    model = of_decoder()
    worker = rollout(model)
    first = worker.generate(PROMPTS[:1], replace(CONFIG, temperature=0.0)).tokens[0]
    tokens = tokenizer()
    pad, tokens.pad_token_id = tokens.pad_token_id, int(first[2])
    try:
        out = rollout(model).generate(PROMPTS[:1], replace(CONFIG, temperature=0.0))
    finally:
        tokens.pad_token_id = pad
    (found,) = out.tokens
    np.testing.assert_array_equal(found, first[: list(first).index(first[2])])
    assert len(out.logprobs[0]) == len(found)


def test_the_weights_may_have_another_type_than_the_actor() -> None:
    worker = KVJaxRollout(of_decoder(), tokenizer(), rollout_config=replace(CONFIG, data_type=np.dtype("bfloat16")))
    assert len(worker.generate(PROMPTS, CONFIG).tokens) == 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -1.0}, "temperature=-1.0: expected a number >= 0"),
        ({"tensor_parallel_size": 4}, "tensor_parallel_size=4: expected -1 or 1"),
        ({"rollout_mapping_config": {}}, "rollout_mapping_config={}: expected None"),
        ({"top_p": 1.5}, "top_p=1.5: expected a number in"),
        ({"max_prompt_length": 4}, "prompt 0 has 7 tokens: expected 1 to 4, as max_prompt_length has it"),
        ({"max_tokens_to_generate": 0}, "max_new_tokens=0: expected an integer in 1 .."),
    ],
)
def test_options_that_cannot_be_followed_are_refused_by_name(fields: dict, message: str) -> None:
    worker = rollout(of_decoder())
    with pytest.raises(ValueError, match=message):
        worker.generate(PROMPTS, replace(CONFIG, **fields))


def test_other_arguments_that_are_refused() -> None:
    worker = rollout(of_decoder())
    with pytest.raises(ValueError, match="images: expected prompts and a RolloutConfig alone"):
        worker.generate(PROMPTS, CONFIG, images=[])
    with pytest.raises(ValueError, match="prompts='anna': expected a list of strings"):
        worker.generate("anna", CONFIG)
    with pytest.raises(ValueError, match="prompt 0 has the padding token 0, which tunix masks"):
        worker.generate(["anna <pad> anna"], CONFIG)
    with pytest.raises(ValueError, match="logprobs_under='both': expected 'policy' or 'full'"):
        rollout(of_decoder(), logprobs_under="both")
    with pytest.raises(ValueError, match=r"Qwen3: .* expected an actor without experts and without LoRA"):
        rollout(actor("qwen3", num_experts=2, num_experts_per_tok=1))


def test_a_model_that_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen3 of tunix would rotate as its config says."""
    rope = qwen3.apply_rope
    monkeypatch.setattr(qwen3, "apply_rope", lambda *args, **options: rope(*args, **options, rope_theta=10_000))
    with pytest.raises(ValueError, match=r"of the actor Qwen3 and of kvjax's qwen3 with .* differ by .*: expected at"):
        rollout(actor("qwen3"))
