"""Our decoder and loader against transformers', in both directions, on tiny random checkpoints."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.attention import causal
from kvjax.checkpoint import load, save_hf
from kvjax.models import Decoder, config_from_hf

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.parity

BATCH, LENGTH, NEW = 2, 40, 64
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# width, query heads, kv heads: groups of 1, 4 and 7
GROUP1 = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4}
GROUP4 = {"hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 2}
GROUP7 = {"hidden_size": 56, "num_attention_heads": 14, "num_key_value_heads": 2}
CASES = {
    "llama-group1": ("llama", GROUP1),
    "llama-group4-tied": ("llama", GROUP4 | {"tie_word_embeddings": True}),
    "llama-group7-head_dim": ("llama", GROUP7 | {"head_dim": 10}),
    "llama-llama3": ("llama", GROUP4 | {"head_dim": 16, "rope_parameters": LLAMA3}),
    "mistral-window": ("mistral", GROUP4 | {"sliding_window": 9}),
    "mistral-window-tied": (
        "mistral",
        GROUP7 | {"head_dim": 16, "sliding_window": 16, "tie_word_embeddings": True},
    ),
    "mistral-full": ("mistral", GROUP1 | {"sliding_window": None, "rms_norm_eps": 1e-5}),
}


def reference(model_type: str, fields: dict) -> Any:
    """A random model whose logits spread over several units: at the usual 0.02 all would be near zero, and alike."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        model_type,
        vocab_size=100,
        intermediate_size=48,
        num_hidden_layers=2,
        max_position_embeddings=256,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=None,
        **fields,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):  # ones at first, which would hide a norm that is left out or swapped
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


@pytest.fixture(scope="module", params=CASES)
def model(request):
    return reference(*CASES[request.param])


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 100, (BATCH, LENGTH))


@jax.jit
def logits(params: Decoder, tokens: jax.Array) -> jax.Array:
    hidden, _ = params(tokens, causal(jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)))
    return params.logits(hidden)


def theirs(model, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(tokens)).logits.float().numpy()


def test_logits_in_float32(model, folder, tokens):
    params, _ = load(folder)
    expected = theirs(model, tokens)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(logits(params, tokens), expected, atol=1e-4, rtol=0)


def test_greedy_tokens_in_float32(model, folder, tokens):
    params, _ = load(folder)
    with torch.no_grad():
        expected = model.generate(torch.from_numpy(tokens), max_new_tokens=NEW, do_sample=False).numpy()
    assert expected.shape == (BATCH, LENGTH + NEW)
    answer = kvjax.generate(params, tokens, max_new_tokens=NEW)
    np.testing.assert_array_equal(answer.tokens, expected[:, LENGTH:])


def test_logits_in_bfloat16(model, folder, tokens):
    """bfloat16 keeps 8 bits: the error must be of its size, and no larger than transformers' own by much."""
    params, _ = load(folder, dtype=jnp.bfloat16)
    exact = theirs(model, tokens)
    rounded = theirs(type(model).from_pretrained(folder, dtype=torch.bfloat16), tokens)
    error, usual = (np.sqrt(np.mean((np.asarray(x) - exact) ** 2)) for x in (logits(params, tokens), rounded))
    assert error < 1.5 * usual
    assert error < 0.03 * exact.std()


def test_shards(tmp_path, tokens):
    model = reference(*CASES["llama-group4-tied"])
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    params, _ = load(tmp_path)
    np.testing.assert_allclose(logits(params, tokens), theirs(model, tokens), atol=1e-4, rtol=0)


def test_window_matters(tokens):
    """The window of these cases is shorter than the sequence, so that a decoder without one would not pass."""
    windowed, full = (reference("mistral", GROUP4 | {"sliding_window": window}) for window in (9, None))
    difference = np.abs(theirs(windowed, tokens) - theirs(full, tokens)).max(axis=(0, 2))
    assert difference[:9].max() < 1e-5
    assert difference[9:].min() > 1e-2


def test_transformers_reads_back_what_it_wrote(model, folder, tmp_path, tokens):
    params, _ = load(folder)
    save_hf(params, tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert again.dtype == torch.float32
    np.testing.assert_array_equal(theirs(again, tokens), theirs(model, tokens))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("case", ["llama-llama3", "mistral-window-tied"])
def test_transformers_reads_a_decoder_of_ours(case, dtype, tmp_path, tokens):
    model_type, fields = CASES[case]
    hf = fields | {"model_type": model_type, "vocab_size": 100, "intermediate_size": 48, "num_hidden_layers": 1}
    params = Decoder(config_from_hf(hf), nnx.Rngs(1), dtype)
    save_hf(params, tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert str(model.dtype) == f"torch.{jnp.dtype(dtype).name}"
    wide, _ = load(tmp_path, dtype=jnp.float32)
    np.testing.assert_allclose(logits(wide, tokens), theirs(model.float(), tokens), atol=1e-4, rtol=0)
