"""Decoder and loader against transformers, in both directions, on tiny random checkpoints of every family."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import kvjax
from kvjax.checkpoint import load, save_hf
from kvjax.models import FAMILIES, Decoder, config_from_hf

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers

from tests.models import reference
from tests.models.cases import CASES, DECODED, ROUNDED
from tests.models.configs import NEEDED
from tests.models.fields import FULL
from tests.models.plain import logits
from tests.models.reference import VOCAB, fix_frequencies
from tests.products import part

pytestmark = pytest.mark.parity

BATCH, LENGTH, NEW = 2, 40, 64


def skip_one_rope() -> None:
    """Skips a test where transformers gives all layers of OLMo 3 the same RoPE."""
    if FULL not in transformers.Olmo3Config().rope_parameters:
        pytest.skip("this transformers gives all layers of OLMo 3 the same RoPE")


def skip_no_mscale() -> None:
    """Skips a test where transformers leaves yarn's mscale out of the softmax of DeepSeek-V2."""
    if not hasattr(pytest.importorskip("transformers.models.deepseek_v2.modeling_deepseek_v2"), "yarn_apply_mscale"):
        pytest.skip("this transformers leaves yarn's mscale out of the softmax of DeepSeek-V2")


@pytest.fixture(scope="module", params=CASES)
def case(request):
    if request.param == "olmo3-group4-layers":
        skip_one_rope()
    if request.param == "deepseek_v2-yarn":
        skip_no_mscale()
    return CASES[request.param]


@pytest.fixture(scope="module")
def model(case):
    return reference.reference(*case)


@pytest.fixture(scope="module")
def folder(case, model, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    reference.save(model, case[0], path)
    return path


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(0, VOCAB, (BATCH, LENGTH))


def test_logits_in_float32(model, folder, tokens):
    params, _ = load(folder)
    expected = reference.logits(model, tokens)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(logits(params, tokens), expected, atol=1e-4, rtol=0)


@pytest.mark.long
@pytest.mark.slow(first=1)
@pytest.mark.parametrize("case", part(CASES, DECODED), indirect=True)
def test_greedy_tokens_in_float32(case, folder, tokens):
    """If the frequencies depend on the length, both sides use the length of the prompt."""
    params, _ = load(folder)
    expected = reference.greedy(fix_frequencies(reference.reference(*case), LENGTH), tokens, NEW)
    answer = kvjax.generate(params, tokens, max_new_tokens=NEW)
    np.testing.assert_array_equal(answer.tokens, expected)


@pytest.mark.long
@pytest.mark.parametrize("case", part(CASES, ROUNDED), indirect=True)
def test_logits_in_bfloat16(case, model, folder, tokens):
    """bfloat16 has 8 bits: the error must be small, and less than 1.5 times that of transformers."""
    params, _ = load(folder, dtype=jnp.bfloat16)
    exact = reference.logits(model, tokens)
    rounded = reference.logits(reference.reference(*case).to(torch.bfloat16), tokens)
    error, usual = (np.sqrt(np.mean((np.asarray(x) - exact) ** 2)) for x in (logits(params, tokens), rounded))
    assert error < 1.5 * usual
    # A recurrent layer divides queries, keys and outputs by their lengths, which are small here and magnify rounding.
    # Of experts with nearly equal scores, rounding chooses another. Gemma 4 does not divide the logits of attention.
    own = params.config
    rough = own.recurrence is not None or own.latent is not None or own.scale == 1
    assert error < (0.07 if rough else 0.03) * exact.std()


@pytest.mark.parametrize("model_type", sorted(FAMILIES.keys() - {"internlm2"}))
def test_defaults_are_those_of_transformers(model_type):
    """A config.json without optional fields maps to the same config as the complete one of transformers."""
    reference.skip_unknown(model_type)
    if model_type == "olmo3":
        skip_one_rope()
    complete = transformers.AutoConfig.for_model(model_type).to_dict()
    needed = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    own = {"model_type": model_type} | NEEDED.get(model_type, {})
    minimal = own | {name: complete[name] for name in needed if name in complete}
    assert config_from_hf(minimal) == config_from_hf(complete | own)


def test_shards(tmp_path, tokens):
    model = reference.reference(*CASES["llama-group4-tied"])
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    params, _ = load(tmp_path)
    np.testing.assert_allclose(logits(params, tokens), reference.logits(model, tokens), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("mistral-window", {"sliding_window": None}),
        ("qwen2-layers-tied", {"max_window_layers": 2}),
        ("ministral-layers", {"layer_types": [FULL, FULL]}),
        ("smollm3-window-bias", {"use_sliding_window": False}),
        ("gemma2-group4-layers", {"layer_types": [FULL, FULL]}),
        ("gemma3_text-group8-bias-untied", {"sliding_window": 100}),
        ("gemma4_text-group4-kinds", {"sliding_window": 100}),
        ("qwen3-layers-bias-tied", {"layer_types": [FULL, FULL]}),
        ("phi3-partial-window-tied", {"sliding_window": None}),
        ("mixtral-group4-window", {"sliding_window": None}),
        ("qwen3_moe-group1-step-window-tied", {"use_sliding_window": False}),
        ("gpt_oss-group4-layers", {"layer_types": [FULL, FULL]}),
    ],
)
def test_window_matters(name, changed, tokens):
    """The window of these cases is shorter than the prompt, so a decoder without one would fail the parity tests."""
    model_type, fields = CASES[name]
    windowed, full = (reference.reference(model_type, fields | x) for x in ({}, changed))
    difference = np.abs(reference.logits(windowed, tokens) - reference.logits(full, tokens)).max(axis=(0, 2))
    assert difference[:9].max() < 1e-5
    assert difference[9:].min() > 1e-2


@pytest.mark.long
def test_transformers_reads_back_what_it_wrote(case, model, folder, tmp_path, tokens):
    params, _ = load(folder)
    save_hf(params, tmp_path)
    if case[0] == "internlm2":  # which transformers cannot read
        written, read = (load_file(path / "model.safetensors") for path in (tmp_path, folder))
        assert written.keys() == read.keys()
        for name, tensor in written.items():
            np.testing.assert_array_equal(tensor, read[name])
        assert load(tmp_path)[0].config == params.config
    else:
        again = reference.read(tmp_path)
        assert type(again) is type(model)
        assert again.dtype == torch.float32
        np.testing.assert_array_equal(reference.logits(again, tokens), reference.logits(model, tokens))


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama-llama3", jnp.float32),
        ("llama-llama3", jnp.bfloat16),
        ("mistral-window-tied", jnp.bfloat16),
        ("qwen3-layers-bias-tied", jnp.bfloat16),
        ("qwen3_5_text-group4-layers", jnp.float32),
        ("qwen3_5_moe_text-group4", jnp.bfloat16),
        ("qwen3_next-group7-tied", jnp.float32),
        ("phi3-longrope-partial", jnp.float32),
        ("smollm3-window-bias", jnp.float32),
        ("olmo2-group4-bias-tied", jnp.bfloat16),
        ("granite-group4-tied", jnp.float32),
        ("granitemoe-group7-bias", jnp.bfloat16),
        ("olmo3-group4-layers", jnp.float32),
        ("glm4-group4-tied", jnp.bfloat16),
        ("ministral3-group7-window", jnp.float32),
        ("gemma2-group4-layers", jnp.float32),
        ("gemma3_text-group4-layers", jnp.float32),
        ("gemma4_text-group4-kinds", jnp.float32),
        ("gemma4_text-group4-readers", jnp.float32),
        ("gemma4_text-group8-experts", jnp.bfloat16),
        ("mixtral-group7-tied", jnp.bfloat16),
        ("deepseek_v3-groups", jnp.float32),
        ("glm4_moe-group4-norm", jnp.float32),
        ("qwen3_moe-group8-layers", jnp.float32),
        ("gpt_oss-group4-layers", jnp.float32),
    ],
)
def test_transformers_reads_a_decoder_of_ours(name, dtype, tmp_path, tokens):
    model_type, fields = CASES[name]
    reference.skip_unknown(model_type)
    defaults = {"vocab_size": VOCAB, "intermediate_size": 48, "num_hidden_layers": 1}
    params = Decoder(config_from_hf(defaults | fields | {"model_type": model_type}), nnx.Rngs(1), dtype)
    save_hf(params, tmp_path)
    model = reference.read(tmp_path)
    assert str(model.dtype) == f"torch.{jnp.dtype(dtype).name}"
    wide, _ = load(tmp_path, dtype=jnp.float32)
    expected = reference.logits(model.float(), tokens)
    np.testing.assert_allclose(logits(wide, tokens), expected, atol=1e-4, rtol=0)
