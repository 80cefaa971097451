"""Policies against kvpress, on the models and prompts of tests/golden. The README there describes the arrays."""

import functools
import json
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.attend.causal import causal
from kvjax.models import Decoder
from tests.methods.goldens import GOLDEN, MODELS, check_made_again, needs_kvpress
from tests.products import part
from tests.tiny import held

ONE = "llama_group4"
DISTINCT = ("snapkv_w16_k5_r75", "kvcompose_r45", "adakv_snapkv_r50")  # the scores whose sums a group's heads share
PRESSES = (
    "snapkv_w8_k5_r50",
    "snapkv_w16_k5_r75",
    "snapkv_w16_k7_r50",
    "snapkv_w32_k7_r75",
    "tova_r50",
    "tova_r75",
    "streaming_llm_r50",
    "streaming_llm_r75",
    "knorm_r50",
    "keydiff_r50",
    "pyramidkv_w8_k5_b4_r75",
    "pyramidkv_w8_k5_b20_r40",
    "pyramidkv_w8_k5_b20_r75",
    "expected_attention_r75",
    "expected_attention_e01_f64_r40",
    "lagkv_l26_r75",
    "lagkv_l32_r45",
    "chunkkv_knorm_l20_r50",
    "chunkkv_snapkv_l16_r50",
    "criticalkv_snapkv_r50",
    "criticalkv_expected_r75",
    "finch_w16_r50",
    "finch_w24_r75",
    "kvcompose_r45",
    "kvcompose_r85",
    "kvcompose_mean_r25",
    "kvcompose_heads_r75",
    "adakv_snapkv_r50",
    "adakv_expected_a50_r75",
    "kvzip_c64_r50",
    "kvzip_layerwise_r75",
    "duo_attention_r50",
    "observed_attention_r50",
    "non_causal_attention_c40_r50",
    "compactor_c37_r75",
    "cur_r50",
    "cur_mean_r75",
    "capkv_r50",
    "capkv_t2_f64_r75",
    "finch_consecutive_w16_r75",
    "key_rerotation_snapkv_r50",
    "blockwise_keydiff_b32_r50",
    "kvzip_plus_c64_r50",
    "kvgrad_c64_r50",
    "kvgrad_layerwise_r75",
    "per_layer_snapkv",
    "entropy_gated_chunkkv_knorm_r50",
    "entropy_gated_chunkkv_knorm_l16_r75",
    "merging_snapkv_w8_k5_r50",
    "merging_knorm_t10_f75_r50",
    "lukv_expected_r50",
    "lukv_snapkv_s2_r75",
)
# One of each way to store what is retained: slots, keys at their own or consecutive positions, segments of layers and
# of heads, heads that grow.
ANSWERED = (
    "snapkv_w16_k5_r75",
    "streaming_llm_r50",
    "finch_w16_r50",
    "finch_consecutive_w16_r75",
    "key_rerotation_snapkv_r50",
    "kvcompose_r45",
    "kvzip_c64_r50",
    "duo_attention_r50",
    "merging_snapkv_w8_k5_r50",
    "merging_knorm_t10_f75_r50",
)
# Budgets that depend on the number of layers, or on scores of all of them. The others treat all layers alike.
OVER_LAYERS = ("pyramidkv", "kvcompose", "kvzip_c64", "kvzip_plus", "kvgrad", "duo_attention", "per_layer", "lukv")
# The scores and rules of other presses, with other numbers, or as ANSWERED has them.
ALIKE = (
    "snapkv_w8_k5_r50",
    "snapkv_w16_k7_r50",
    "snapkv_w32_k7_r75",
    "tova_r75",
    "streaming_llm_r75",
    "pyramidkv_w8_k5_b20_r75",
    "expected_attention_e01_f64_r40",
    "lagkv_l32_r45",
    "chunkkv_snapkv_l16_r50",
    "kvcompose_r85",
    "kvcompose_mean_r25",
    "capkv_r50",
    "finch_consecutive_w16_r75",
    "key_rerotation_snapkv_r50",
)
# One of each score, and of each rule by which layers, heads and chunks divide the budget.
COMPARED = [press for press in PRESSES if press not in ALIKE]


COMPACTOR = ("chunk_size", "sketch_dimension", "sink_size_start", "sink_size_end")


@dataclass(frozen=True)
class DrawnLeverage(kvjax.parts.LeverageScore):
    """Leverage through matrices that are given, one of each layer for all its heads, float32."""

    drawn: tuple[bytes, ...] = ()

    def gaussian(self, entries: Any, moment: Any) -> jax.Array:
        heads, dim = entries.keys.shape[1], entries.keys.shape[3]
        drawn = np.stack([np.frombuffer(own, np.float32).reshape(heads, dim, self.sketch) for own in self.drawn])
        return jnp.asarray(drawn)[moment.layer.index]


class Golden(NamedTuple):
    params: Decoder
    arrays: dict[str, np.ndarray]
    meta: dict[str, Any]

    @property
    def prompt(self) -> np.ndarray:
        return self.arrays["prompt"]

    def policy(self, press: str) -> kvjax.Policy:
        """The policy of a press, which compresses the prompt and evicts nothing while decoding."""
        if f"{press}/gates" in self.arrays:
            gates = tuple(map(tuple, self.arrays[f"{press}/gates"].tolist()))
            sparsity = self.meta["presses"][press]["kwargs"]["head_compression_ratio"]
            return kvjax.policies.duo_attention(gates, sparsity, sinks=4, recent=28, every=None)
        if f"{press}/curve" in self.arrays:
            with TemporaryDirectory() as folder:
                np.save(f"{folder}/curve.npy", self.arrays[f"{press}/curve"])
                kwargs = self.meta["presses"][press]["kwargs"]
                budget, base = 1 - kwargs["compression_ratio"], self.described(kwargs["press"])
                return kvjax.policies.lukv(base, f"{folder}/curve.npy", budget, kwargs["sink"], kwargs["window"])
        return self.described(self.meta["presses"][press])

    def described(self, press: dict[str, Any]) -> kvjax.Policy:
        kwargs = press["kwargs"]
        if "press" in kwargs:
            base = self.described(kwargs["press"])
            match press["press"]:
                case "ChunkKVPress":
                    return kvjax.policies.chunkkv(base, kwargs["chunk_length"])
                case "CriticalKVPress":
                    return kvjax.policies.criticalkv(base, kwargs["first_stage_ratio"], kwargs["epsilon"])
                case "KeyRerotationPress":
                    return kvjax.policies.key_rerotation(base)
                case "PerLayerCompressionPress":
                    ratios = kwargs["compression_ratios"][: self.params.config.num_layers]
                    return kvjax.policies.per_layer(base, tuple(round(1 - ratio, 6) for ratio in ratios))
                case "EntropyGatedChunkKVPress":
                    few = kwargs["low_entropy_chunk_length"]
                    return kvjax.policies.entropy_gated_chunkkv(base, kwargs["chunk_length"], few)
                case "MergingPress":
                    return kvjax.policies.merging(base, kwargs["similarity_threshold"], kwargs["merge_fraction"])
                case "BlockPress":
                    return kvjax.policies.blockwise(base, kwargs["block_size"])
                case "AdaKVPress":
                    return kvjax.policies.adakv(base, kwargs["alpha_safeguard"], normalise=False, formula="kvpress")
        budget = int(len(self.prompt) * (1 - kwargs["compression_ratio"]))
        match press["press"]:
            case "SnapKVPress":
                window, kernel = kwargs["window_size"], kwargs["kernel_size"]
                return kvjax.policies.snapkv(budget, window=window, kernel=kernel, pool="avg")
            case "TOVAPress":
                return kvjax.policies.tova(budget, recent=1, every=None)
            case "StreamingLLMPress":
                return kvjax.policies.streaming_llm(budget, sinks=kwargs["n_sink"], every=None)
            case "KnormPress":
                return kvjax.policies.knorm(budget)
            case "KeyDiffPress":
                return kvjax.policies.keydiff(budget)
            case "ExpectedAttentionPress":
                sinks, future, epsilon = (kwargs[name] for name in ("n_sink", "n_future_positions", "epsilon"))
                covariance, value_norm = kwargs["use_covariance"], kwargs["use_vnorm"]
                return kvjax.policies.expected_attention(budget, sinks, future, covariance, value_norm, epsilon)
            case "LagKVPress":
                return kvjax.policies.lagkv(budget, kwargs["n_sink"], kwargs["lag_size"], kwargs["cross_scoring"])
            case "FinchPress":
                window, chunk = kwargs["window_size"], kwargs["chunk_length"]
                positions = "in_cache" if kwargs["rerotate_keys"] else "original"
                return kvjax.policies.finch(budget, window, chunk, kwargs["normalize_scores"], positions)
            case "KVComposePress":
                rows, structured = kwargs["agg_task"], kwargs["structured"]
                score = kvjax.parts.TaskAttention(rows=rows)
                return kvjax.policies.kvcompose(budget, structured=structured, first_layer=structured, score=score)
            case "KVzipPress":
                level, chunk = "layer" if kwargs["layerwise"] else "global", kwargs["chunk_size"]
                score = kvjax.parts.Reconstruction()
                instructions = (tuple(map(ord, text)) for text in (score.instruction, score.starting, score.suffix))
                plus = kwargs["kvzip_plus_normalization"]
                score = kvjax.parts.Reconstruction(kwargs["n_sink"], chunk, *instructions, normalise=plus)
                return kvjax.policies.kvzip(budget, kwargs["n_sink"], level, score=score)
            case "KVgradPress":
                level, chunk = "layer" if kwargs["layerwise"] else "global", kwargs["chunk_size"]
                score = kvjax.parts.Attribution()
                instructions = (tuple(map(ord, text)) for text in (score.instruction, score.starting, score.suffix))
                score = kvjax.parts.Attribution(kwargs["n_sink"], chunk, *instructions)
                return kvjax.policies.kvgrad(budget, kwargs["n_sink"], level, score=score)
            case "ObservedAttentionPress":
                return kvjax.policies.observed_attention(budget)
            case "NonCausalAttnPress":
                return kvjax.policies.non_causal_attention(budget, kwargs["chunk_size"])
            case "DrawnSketches":
                chunk, sketch, sinks, recent = (kwargs[name] for name in COMPACTOR)
                policy = kvjax.policies.compactor(budget, chunk, sketch, kwargs["compression_ratio"], 0, sinks, recent)
                gaussian = tuple(map(bytes, self.arrays["compactor_c37_r75/gaussian"].astype(np.float32)))
                leverage = DrawnLeverage(sketch, 0, gaussian)
                return replace(policy, score=replace(policy.score, leverage=leverage))
            case "CURPress":
                kind = {"kv_product": "product", "kv_avg": "mean"}[kwargs["leverage_type"]]
                window = kwargs["local_window_size"] if kwargs["use_local_approximation"] else None
                return kvjax.policies.cur(budget, kind, window, kwargs["num_sinks"])
            case "CapPress":
                sinks, future = kwargs["n_sink"], kwargs["n_future_positions"]
                return kvjax.policies.capkv(budget, kwargs["tau"], sinks, future, kwargs["epsilon"])
            case "PyramidKVPress":
                window, kernel, beta = kwargs["window_size"], kwargs["kernel_size"], kwargs["beta"]
                return kvjax.policies.pyramidkv(budget, window, kernel, "avg", beta=beta, formula="kvpress")
        raise AssertionError(press["press"])


@functools.cache
def golden(model: str) -> Golden:
    params, tokenizer = kvjax.load(GOLDEN / model)
    assert tokenizer is None
    with np.load(GOLDEN / f"{model}.npz") as archive:
        arrays = dict(archive)
    return Golden(params, arrays, json.loads(str(arrays["meta"])))


@functools.cache
def first_layer(model: str) -> Decoder:
    """The model without the layers behind the first one, whose keys and scores they do not change."""
    params = nnx.clone(golden(model).params)
    params.layers = nnx.List(params.layers[:1])
    params.config = replace(params.config, windows=params.config.windows[:1])
    return params


@jax.jit
def replay(params: Decoder, cache: kvjax.KVCache, tokens: jax.Array) -> jax.Array:
    """Logits [N, V] of decoding the tokens one by one."""

    def step(cache: kvjax.KVCache, token: jax.Array) -> tuple[kvjax.KVCache, jax.Array]:
        logits, cache = kvjax.extend(params, cache, token[None, None])
        return cache, logits[0]

    return jax.lax.scan(step, cache, tokens)[1]


def check_answer(case: Golden, cache: kvjax.KVCache, label: str) -> None:
    """Compares the logits of each greedy step after the prompt, and the tokens."""
    tokens, expected = case.arrays[f"{label}/tokens"], case.arrays[f"{label}/step_logits"]
    logits = replay(case.params, kvjax.with_room(cache, len(expected)), jnp.asarray(tokens[:-1]))
    np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=0)
    np.testing.assert_array_equal(np.argmax(logits, axis=-1), tokens[1:])


def needs_all_layers(press: str) -> bool:
    return press.startswith(OVER_LAYERS)


def compared(model: str, press: str) -> tuple[str, str, bool]:
    """The case of a default run. It has all layers where a budget needs them, or answers are compared too."""
    return model, press, needs_all_layers(press) or (model == ONE and press in ANSWERED)


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "press", "all_layers"),
    part(
        [case for case in product(MODELS, PRESSES, (False, True)) if case[2] or not needs_all_layers(case[1])],
        [compared(ONE, press) for press in COMPARED]
        + [compared("llama_group7", press) for press in DISTINCT]
        + [compared("mistral", DISTINCT[0])],
    ),
)
def test_policy_retains_what_kvpress_does(model: str, press: str, all_layers: bool) -> None:
    case = golden(model)
    params = case.params if all_layers else first_layer(model)
    cache = kvjax.prefill(params, case.prompt, policy=case.policy(press))
    expected = [[head[head >= 0].tolist() for head in layer] for layer in case.arrays[f"{press}/pos"]]
    assert held(cache, 0) == expected[: params.config.num_layers]


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(("model", "press"), part(product(MODELS, PRESSES), product([ONE], ANSWERED)))
def test_policy_answers_as_kvpress(model: str, press: str) -> None:
    case = golden(model)
    check_answer(case, kvjax.prefill(case.params, case.prompt, policy=case.policy(press)), press)


@pytest.mark.slow
@pytest.mark.parametrize("press", part(["snapkv_w16_k5_r75", "tova_r50", "streaming_llm_r75"], ["tova_r50"]))
def test_generate_answers_as_kvpress(press: str) -> None:
    case = golden(ONE)
    expected = case.arrays[f"{press}/tokens"]
    answer = kvjax.generate(case.params, case.prompt, policy=case.policy(press), max_new_tokens=len(expected))
    np.testing.assert_array_equal(answer.tokens[0], expected)


@pytest.mark.slow
@pytest.mark.parametrize("model", part(MODELS, [ONE, "mistral"]))
def test_uncompressed_answers_as_transformers(model: str) -> None:
    case = golden(model)
    positions = jnp.arange(len(case.prompt))[None]
    hidden, _ = jax.jit(lambda params, tokens: params(tokens, causal(positions)))(case.params, case.prompt[None])
    np.testing.assert_allclose(case.params.logits(hidden)[0], case.arrays["logits"], atol=1e-4, rtol=0)
    cache = kvjax.prefill(case.params, case.prompt)
    check_answer(case, cache, "full")


def test_goldens_are_all_compared() -> None:
    for model in MODELS:
        assert set(golden(model).meta["presses"]) == set(PRESSES)


@pytest.mark.parity
@needs_kvpress
def test_goldens_can_be_made_again(tmp_path: Path) -> None:
    check_made_again("make_goldens", "", golden("llama_group7").arrays, tmp_path)
    weights = "llama_group7/model.safetensors"
    assert (tmp_path / weights).read_bytes() == (GOLDEN / weights).read_bytes()
