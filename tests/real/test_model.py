"""A published model in GGUF against transformers' reading of the same file, its tokenizer, and presets on it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvjax
from tests.models.test_parity import logits
from tests.policy.presets import SPECS
from tests.products import part
from tests.real.conftest import Real
from tests.real.layers import first_layers

pytestmark = [pytest.mark.real, pytest.mark.slow]


@pytest.fixture(scope="session")
def theirs(real: Real) -> Any:
    torch = pytest.importorskip("torch")
    pytest.importorskip("accelerate")
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(real.file.parent, gguf_file=real.file.name, dtype=torch.float32)


@pytest.mark.parity
def test_logits_are_those_of_transformers(real: Real, theirs: Any) -> None:
    import torch

    tokens = np.array([real.essay[:512]])
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens)).logits.numpy()
    assert np.ptp(expected) > 30
    np.testing.assert_allclose(logits(real.params, tokens), expected, atol=1e-3, rtol=0)


@pytest.mark.parity
def test_64_greedy_tokens_are_those_of_transformers(real: Real, theirs: Any) -> None:
    import torch

    chat = [{"role": "user", "content": "Write a short story about a lighthouse."}]
    prompt = real.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    tokens = torch.tensor([prompt])
    with torch.no_grad():  # without a mask, transformers masks the end tokens of the turns, which also pad
        expected = theirs.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=64, do_sample=False, eos_token_id=None
        )
    answer = kvjax.generate(real.params, [prompt], max_new_tokens=64, eos=())
    np.testing.assert_array_equal(answer.tokens[0], expected[0, len(prompt) :].numpy())


def test_the_tokenizer_has_the_models_own_tokens_and_template(real: Real) -> None:
    words = real.tokenizer
    assert (words.eos_token, words.bos_token, words.unk_token) == ("<|im_end|>", "<|im_start|>", "<|endoftext|>")
    chat = [{"role": "user", "content": "Who wrote Emma?"}]
    assert words.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWho wrote Emma?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert words.tokenize("In 1998, I'd\n\n  hid <|im_end|>") == [
        *("In", "Ġ", "1", "9", "9", "8", ",", "ĠI", "'d", "ĊĊ", "Ġ", "Ġhid", "Ġ", "<|im_end|>")
    ]
    text = "héllo 世界\t1.5e3\n  def f(x):"
    assert words.decode(words.encode(text)) == text


def test_it_answers_and_stops(real: Real) -> None:
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    out = kvjax.generate(real.params, chat, max_new_tokens=24, tokenizer=real.tokenizer)
    assert out.text == "The capital of France is Paris."


# One of each way to store entries, or to read a prompt; `--all` tries the other presets too.
CHOSEN = ("snapkv", "morphkv", "d2o", "kvcompose", "quantize")


@pytest.mark.parametrize("name", part(SPECS, CHOSEN))
def test_every_preset_runs(real: Real, name: str) -> None:
    """On the first two layers: 3 kv heads of 64 channels, groups of 3 query heads, keys of real text."""
    params = first_layers(real.params, 2)
    spec: kvjax.Policy | str = f"{name}:{SPECS[name][0]}".rstrip(":")
    if name == "duo_attention":  # gates belong to one model
        spec = kvjax.policies.duo_attention(((0.1, 0.9, 0.4), (0.8, 0.2, 0.3)), sinks=2, recent=10)
    prompts = [real.essay[:64], real.essay[100:150]]
    out = kvjax.generate(params, prompts, policy=spec, max_new_tokens=3, eos=(), log_probs=True)
    assert out.tokens.shape == (2, 3)
    assert np.isfinite(out.log_probs).all()
