"""A published model in GGUF against transformers' reading of the same file, its tokenizer, and presets on it."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import kvjax
from kvjax.statistics.measure import measured
from tests import tiny
from tests.methods.test_kvpress import GOLDEN
from tests.models.plain import logits
from tests.policy.presets import SPECS
from tests.products import part
from tests.real.conftest import Real
from tests.real.layers import first_layers

pytestmark = [pytest.mark.real, pytest.mark.slow]


@functools.cache
def golden() -> dict[str, np.ndarray]:
    """What transformers computes, from its own reading of the same file."""
    with np.load(GOLDEN / "smollm2_logits.npz") as archive:
        return {name: array.astype(np.float32 if name == "logits" else np.int32) for name, array in archive.items()}


def test_logits_are_those_of_transformers(real: Real) -> None:
    stored = golden()
    assert stored["essay"].tolist() == real.essay[:512]
    assert np.ptp(stored["logits"]) > 30
    found = np.asarray(logits(real.params, stored["essay"][None]))[0, :, ::1024]
    np.testing.assert_allclose(found, stored["logits"], atol=1e-3, rtol=0)


def test_64_greedy_tokens_are_those_of_transformers(real: Real) -> None:
    chat = [{"role": "user", "content": "Write a short story about a lighthouse."}]
    prompt = real.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert prompt == golden()["prompt"].tolist()
    answer = kvjax.generate(real.params, [prompt], max_new_tokens=64, eos=())
    np.testing.assert_array_equal(answer.tokens[0], golden()["answer"])


def test_the_tokenizer_has_the_models_own_tokens_and_template(real: Real) -> None:
    words = real.tokenizer
    assert (words.eos_token, words.bos_token, words.unk_token) == ("<|im_end|>", "<|im_start|>", "<|endoftext|>")
    chat = [{"role": "user", "content": "Who wrote Emma?"}]
    assert words.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWho wrote Emma?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert words.tokenize("In 1998, I'd\n\n  hid <|im_end|>") == [
        *("In", "Ġ", "1", "9", "9", "8", ",", "ĠI", "'d", "ĊĊĠ", "Ġhid", "Ġ", "<|im_end|>")
    ]
    text = "héllo 世界\t1.5e3\n  def f(x):"
    assert words.decode(words.encode(text)) == text


# One of each way to store entries, or to read a prompt; `--all` tries the other presets too.
CHOSEN = ("snapkv", "morphkv", "kvcompose")


@pytest.mark.parametrize("name", part(SPECS, CHOSEN))
def test_every_preset_runs(real: Real, name: str) -> None:
    """On the first two layers: 3 kv heads of 64 channels, groups of 3 query heads, keys of real text."""
    params = first_layers(real.params, 2)
    if name in ("qfilter", "expected_attention_stats", "triattention"):
        params = kvjax.with_statistics(params, measured(params, [np.array([real.essay[200:264]])], 4))
    config = params.config
    for gates in tiny.random_gates(2, config.num_kv_heads, 3, config.hidden_size):
        params = kvjax.with_gates(params, gates) if gates.method == name else params
    spec: kvjax.Policy | str = f"{name}:{SPECS[name][0]}".rstrip(":").replace("groups=2", "groups=3")
    if name == "duo_attention":  # gates belong to one model
        spec = kvjax.policies.duo_attention(((0.1, 0.9, 0.4), (0.8, 0.2, 0.3)), sinks=2, recent=10)
    if name == "headkv":
        spec = kvjax.policies.headkv(12, ((0.1, 0.9, 0.4), (0.8, 0.2, 0.3)), window=4)
    if name == "lukv":
        spec = kvjax.policies.lukv(kvjax.policies.snapkv(window=4), ((0.1, 0.9, 0.4), (0.8, 0.2, 0.3)), 12, sinks=2)
    prompts = [real.essay[:64], real.essay[100:150]]
    out = kvjax.generate(params, prompts, policy=spec, max_new_tokens=3, eos=(), log_probs=True)
    assert out.tokens.shape == (2, 3)
    assert np.isfinite(out.log_probs).all()
