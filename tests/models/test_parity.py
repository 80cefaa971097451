"""Decoder and loader against transformers, in both directions, on tiny random checkpoints of every family."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import kvjax
from kvjax.attend.causal import causal
from kvjax.checkpoint import load, save_hf
from kvjax.models import FAMILIES, Decoder, config_from_hf

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers

from tests.models import reference
from tests.models.reference import VOCAB, fix_frequencies
from tests.products import part

pytestmark = pytest.mark.parity

BATCH, LENGTH, NEW = 2, 40, 64
# hidden size, query heads, kv heads
GROUP1 = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4}
GROUP4 = {"hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 2}
GROUP5 = {"hidden_size": 40, "num_attention_heads": 5, "num_key_value_heads": 1}
GROUP7 = {"hidden_size": 56, "num_attention_heads": 14, "num_key_value_heads": 2}
GROUP8 = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 1}
TIED = {"tie_word_embeddings": True}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LOCAL = {"rope_type": "default", "rope_theta": 100.0}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 8.0, "original_max_position_embeddings": 32}
MSCALE = {"mscale": 2.0, "mscale_all_dim": 0.5, "beta_fast": 8.0, "beta_slow": 0.5, "truncate": False}
PARTIAL = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
SLIDING, FULL = "sliding_attention", "full_attention"
MIXED = {"layer_types": [FULL, SLIDING]}
SHORT = {"max_position_embeddings": 32}
FACTORS = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.22,
    "logits_scaling": 3.0,
}


def longrope(pairs: int, original: int, **fields) -> dict:
    """LongRoPE fields. The two lists of factors differ so much that a test with the wrong one fails."""
    factors = {"short_factor": [1 + 0.1 * i for i in range(pairs)], "long_factor": [2.0 + i for i in range(pairs)]}
    return {
        "rope_parameters": {"rope_type": "longrope", "rope_theta": 10_000.0, **factors, **fields},
        "original_max_position_embeddings": original,
    }


# The lengths are LENGTH to LENGTH + NEW: above 32 and below 128 positions.
CASES = {
    "llama-group1": ("llama", GROUP1 | {"num_hidden_layers": 2}),
    "llama-group4-tied": ("llama", GROUP4 | TIED | {"num_hidden_layers": 2}),
    "llama-group7-head_dim": ("llama", GROUP7 | {"head_dim": 10}),
    "llama-group8-bias": ("llama", GROUP8 | {"attention_bias": True, "mlp_bias": True}),
    "llama-llama3": ("llama", GROUP4 | {"head_dim": 16, "rope_parameters": LLAMA3}),
    "llama-linear": ("llama", GROUP5 | {"rope_parameters": LINEAR}),
    "llama-dynamic": ("llama", GROUP4 | {"rope_parameters": DYNAMIC, "max_position_embeddings": 32}),
    "llama-dynamic-short": ("llama", GROUP4 | {"rope_parameters": DYNAMIC, "max_position_embeddings": 128}),
    "llama-yarn": ("llama", GROUP1 | {"head_dim": 16, "rope_parameters": YARN}),
    "llama-yarn-mscale": ("llama", GROUP1 | {"head_dim": 16, "rope_parameters": YARN | MSCALE}),
    "mistral-window": ("mistral", GROUP4 | {"sliding_window": 9, "num_hidden_layers": 2}),
    "mistral-window-tied": ("mistral", GROUP7 | TIED | {"head_dim": 16, "sliding_window": 16}),
    "mistral-full": ("mistral", GROUP1 | {"sliding_window": None, "rms_norm_eps": 1e-5}),
    "qwen2-group7": ("qwen2", GROUP7 | {"rope_parameters": YARN}),
    "qwen2-layers-tied": (
        "qwen2",
        GROUP5
        | TIED
        | {"num_hidden_layers": 2, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3-head_dim": ("qwen3", GROUP4 | {"head_dim": 16, "use_sliding_window": False}),
    "qwen3-layers-bias-tied": (
        "qwen3",
        GROUP8
        | TIED
        | {"num_hidden_layers": 2, "head_dim": 10, "attention_bias": True}
        | {"use_sliding_window": True, "sliding_window": 9, "layer_types": [SLIDING, FULL]},
    ),
    "phi3-group1": ("phi3", GROUP1 | {"num_hidden_layers": 2}),
    "phi3-partial-window-tied": (
        "phi3",
        GROUP8 | TIED | {"sliding_window": 9, "rope_parameters": PARTIAL},
    ),
    "phi3-longrope": ("phi3", GROUP4 | {"hidden_size": 64} | longrope(4, 32)),
    "phi3-longrope-short": ("phi3", GROUP5 | longrope(4, 128)),
    "phi3-longrope-partial": ("phi3", GROUP4 | {"hidden_size": 64} | longrope(2, 32, partial_rotary_factor=0.5)),
    "internlm2-group1-bias": ("internlm2", GROUP1 | {"bias": True, "num_hidden_layers": 2}),
    "internlm2-group4-linear-tied": ("internlm2", GROUP4 | TIED | {"bias": False, "rope_parameters": LINEAR}),
    "internlm2-group7-dynamic": (
        "internlm2",
        GROUP7 | {"bias": False, "rope_parameters": DYNAMIC, "max_position_embeddings": 32},
    ),
    "ministral-layers": ("ministral", GROUP4 | {"num_hidden_layers": 2, "head_dim": 8, "sliding_window": 9} | MIXED),
    "ministral-window": ("ministral", GROUP1 | {"head_dim": 16, "sliding_window": 9}),
    "smollm3-layers-tied": (
        "smollm3",
        GROUP4 | TIED | {"num_hidden_layers": 2, "no_rope_layers": [1, 0]} | {"rope_parameters": DYNAMIC, **SHORT},
    ),
    "smollm3-window-bias": (
        "smollm3",
        GROUP7
        | {"num_hidden_layers": 2, "no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 9}
        | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    ),
    "gemma2-group4-layers": (
        "gemma2",
        GROUP4
        | {"num_hidden_layers": 2, "head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 9}
        | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 10.0},
    ),
    "gemma2-group1-bias-untied": (
        "gemma2",
        GROUP1
        | {"head_dim": 10, "attention_bias": True, "tie_word_embeddings": False, "layer_types": [FULL]}
        | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": None},
    ),
    "gemma3_text-group4-layers": (
        "gemma3_text",
        GROUP4
        | {"num_hidden_layers": 2, "head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 9}
        | {"rope_parameters": {FULL: LINEAR, SLIDING: LOCAL}, "layer_types": [SLIDING, FULL]},
    ),
    "gemma3_text-group8-bias-untied": (
        "gemma3_text",
        GROUP8 | {"head_dim": 10, "attention_bias": True, "tie_word_embeddings": False, "sliding_window": 9},
    ),
    "olmo2-group1": ("olmo2", GROUP1 | {"num_hidden_layers": 2}),
    "olmo2-group4-bias-tied": ("olmo2", GROUP4 | TIED | {"attention_bias": True, "rope_parameters": YARN}),
    "granite-group4-tied": ("granite", GROUP4 | TIED | FACTORS | {"num_hidden_layers": 2}),
    "granite-group7-bias": ("granite", GROUP7 | FACTORS | {"attention_bias": True, "mlp_bias": True}),
}

# One of each way to rotate and to mask the keys of earlier tokens, of every family.
DECODED = (
    "llama-group7-head_dim",
    "llama-dynamic",
    "llama-dynamic-short",
    "llama-yarn-mscale",
    "mistral-window",
    "qwen2-layers-tied",
    "qwen3-layers-bias-tied",
    "phi3-partial-window-tied",
    "phi3-longrope",
    "internlm2-group1-bias",
    "ministral-layers",
    "smollm3-layers-tied",
    "smollm3-window-bias",
    "olmo2-group4-bias-tied",
    "granite-group4-tied",
    "gemma2-group4-layers",
    "gemma3_text-group4-layers",
)
# Every family, and every term that is rounded: biases, norms of heads, tied embeddings, scaled and partial rotations.
ROUNDED = (
    "llama-group8-bias",
    "llama-yarn-mscale",
    "mistral-window-tied",
    "qwen2-group7",
    "qwen3-layers-bias-tied",
    "phi3-longrope-partial",
    "internlm2-group1-bias",
    "smollm3-window-bias",
    "olmo2-group4-bias-tied",
    "granite-group4-tied",
    "gemma2-group4-layers",
    "gemma3_text-group8-bias-untied",
)


@pytest.fixture(scope="module", params=CASES)
def case(request):
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


@jax.jit
def logits(params: Decoder, tokens: jax.Array) -> jax.Array:
    hidden, _ = params(tokens, causal(jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)))
    return params.logits(hidden)


def test_logits_in_float32(model, folder, tokens):
    params, _ = load(folder)
    expected = reference.logits(model, tokens)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(logits(params, tokens), expected, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("case", part(CASES, DECODED), indirect=True)
def test_greedy_tokens_in_float32(case, folder, tokens):
    """If the frequencies depend on the length, both sides use the length of the prompt."""
    params, _ = load(folder)
    expected = reference.greedy(fix_frequencies(reference.reference(*case), LENGTH), tokens, NEW)
    answer = kvjax.generate(params, tokens, max_new_tokens=NEW)
    np.testing.assert_array_equal(answer.tokens, expected)


@pytest.mark.parametrize("case", part(CASES, ROUNDED), indirect=True)
def test_logits_in_bfloat16(case, model, folder, tokens):
    """bfloat16 has 8 bits: the error must be small, and less than 1.5 times that of transformers."""
    params, _ = load(folder, dtype=jnp.bfloat16)
    exact = reference.logits(model, tokens)
    rounded = reference.logits(reference.reference(*case).to(torch.bfloat16), tokens)
    error, usual = (np.sqrt(np.mean((np.asarray(x) - exact) ** 2)) for x in (logits(params, tokens), rounded))
    assert error < 1.5 * usual
    assert error < 0.03 * exact.std()


@pytest.mark.parametrize("model_type", sorted(FAMILIES.keys() - {"internlm2"}))
def test_defaults_are_those_of_transformers(model_type):
    """A config.json without optional fields maps to the same config as the complete one of transformers."""
    complete = transformers.AutoConfig.for_model(model_type).to_dict()
    needed = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    minimal = {"model_type": model_type} | {name: complete[name] for name in needed}
    assert config_from_hf(minimal) == config_from_hf(complete)


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
        ("qwen3-layers-bias-tied", {"layer_types": [FULL, FULL]}),
        ("phi3-partial-window-tied", {"sliding_window": None}),
    ],
)
def test_window_matters(name, changed, tokens):
    """The window of these cases is shorter than the prompt, so a decoder without one would fail the parity tests."""
    model_type, fields = CASES[name]
    windowed, full = (reference.reference(model_type, fields | x) for x in ({}, changed))
    difference = np.abs(reference.logits(windowed, tokens) - reference.logits(full, tokens)).max(axis=(0, 2))
    assert difference[:9].max() < 1e-5
    assert difference[9:].min() > 1e-2


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
        again = type(model).from_pretrained(tmp_path)
        assert again.dtype == torch.float32
        np.testing.assert_array_equal(reference.logits(again, tokens), reference.logits(model, tokens))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama-llama3", jnp.float32),
        ("llama-llama3", jnp.bfloat16),
        ("mistral-window-tied", jnp.bfloat16),
        ("qwen3-layers-bias-tied", jnp.bfloat16),
        ("phi3-longrope-partial", jnp.float32),
        ("smollm3-window-bias", jnp.float32),
        ("olmo2-group4-bias-tied", jnp.bfloat16),
        ("granite-group4-tied", jnp.float32),
        ("gemma2-group4-layers", jnp.float32),
        ("gemma3_text-group4-layers", jnp.float32),
    ],
)
def test_transformers_reads_a_decoder_of_ours(name, dtype, tmp_path, tokens):
    model_type, fields = CASES[name]
    defaults = {"vocab_size": VOCAB, "intermediate_size": 48, "num_hidden_layers": 1}
    params = Decoder(config_from_hf(defaults | fields | {"model_type": model_type}), nnx.Rngs(1), dtype)
    save_hf(params, tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert str(model.dtype) == f"torch.{jnp.dtype(dtype).name}"
    wide, _ = load(tmp_path, dtype=jnp.float32)
    expected = reference.logits(model.float(), tokens)
    np.testing.assert_allclose(logits(wide, tokens), expected, atol=1e-4, rtol=0)
