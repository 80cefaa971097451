"""RoPE that depends on a text's length: the length of a row's prompt fixes the frequencies of its cache.

The reference is transformers with the frequencies of one length, whatever the length of the text becomes.
"""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

import kvjax
from kvjax.attend.causal import causal
from kvjax.checkpoint import load
from kvjax.models import Decoder

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.models import reference

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore:positions up to")]

NEW = 16
LENGTHS = (24, 40)  # on both sides of the 32 positions of the original
WIDTH = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.2],
    "long_factor": [2.0, 3.0],
}
MODELS = {
    "dynamic": ("llama", WIDTH | {"rope_parameters": DYNAMIC, "max_position_embeddings": 32}),
    "longrope": ("phi3", WIDTH | {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32}),
}


@pytest.fixture(scope="module", params=MODELS)
def case(request) -> tuple[str, dict]:
    return MODELS[request.param]


@pytest.fixture(scope="module")
def params(case, tmp_path_factory) -> Decoder:
    path = tmp_path_factory.mktemp("model")
    reference.save(reference.reference(*case), case[0], path)
    return load(path)[0]


@pytest.fixture(scope="module")
def rows() -> list[np.ndarray]:
    return [np.random.default_rng(n).integers(0, reference.VOCAB, n) for n in LENGTHS]


@pytest.fixture(scope="module")
def answer(params, rows) -> kvjax.Generation:
    """The answer to both rows; the first one passes the original length while it is decoded."""
    return kvjax.generate(params, rows, max_new_tokens=NEW)


def expected(case, row: np.ndarray, length: int, new: int = NEW) -> np.ndarray:
    model = reference.fix_frequencies(reference.reference(*case), length)
    return reference.greedy(model, row[None], new)[0]


@pytest.mark.slow
def test_rows_have_the_frequencies_of_their_own_prompts(case, answer, rows):
    for tokens, row in zip(answer.tokens, rows, strict=True):
        np.testing.assert_array_equal(tokens, expected(case, row, len(row)))


@pytest.mark.slow
def test_they_stay_in_later_turns(case, params, answer, rows):
    question = np.arange(5)
    later = kvjax.generate(params, [question, question], cache=answer.cache, max_new_tokens=NEW)
    np.testing.assert_array_equal(later.cache.rope, answer.cache.rope)
    for tokens, row, first in zip(later.tokens, rows, answer.tokens, strict=True):
        text = np.concatenate([row, first, question])
        np.testing.assert_array_equal(tokens, expected(case, text, len(row)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"chunk": 16}, {"policy": kvjax.policies.streaming_llm(budget=64, positions="in_cache")}],
    ids=["in chunks", "rotated in the cache"],
)
def test_however_a_prompt_is_read(params, answer, rows, options):
    again = kvjax.generate(params, rows, max_new_tokens=NEW, **options)
    np.testing.assert_array_equal(again.tokens, answer.tokens)
    np.testing.assert_array_equal(again.cache.rope, answer.cache.rope)


@pytest.mark.long
def test_they_are_saved_with_a_cache_and_planned(params, answer, tmp_path: Path):
    kvjax.save_cache(tmp_path / "cache", answer.cache, params)
    restored = kvjax.restore_cache(tmp_path / "cache", params)
    assert jax.tree.structure(restored) == jax.tree.structure(answer.cache)
    np.testing.assert_array_equal(restored.rope, answer.cache.rope)
    planned = kvjax.plan_cache(
        params.config, kvjax.policies.full(), batch=2, length=LENGTHS[1], new_tokens=NEW, dtype=np.float32
    )
    assert jax.tree.map(np.shape, planned) == jax.tree.map(np.shape, answer.cache)


def test_a_cache_of_another_rotation(params, answer, tmp_path: Path):
    model = reference.reference("llama", WIDTH)
    model.save_pretrained(tmp_path)
    other = load(tmp_path)[0]
    with pytest.raises(ValueError, match="another RoPE: this model's is base 10,000"):
        kvjax.generate(other, None, cache=answer.cache)


@pytest.mark.slow
def test_training_takes_each_sequences_own_length(case, params, rows):
    """Two rows have the same number of tokens, and their last positions differ."""
    positions = np.stack([np.arange(24), np.arange(16, 40)])
    read = jax.jit(lambda params, tokens: params.logits(params(tokens, causal(positions))[0]))
    logits = np.asarray(read(params, np.stack([rows[0], rows[1][16:]])))
    short = reference.fix_frequencies(reference.reference(*case), 24)
    np.testing.assert_allclose(logits[0], reference.logits(short, rows[0][None])[0], atol=1e-4)
    long = reference.fix_frequencies(reference.reference(*case), 40)
    np.testing.assert_allclose(logits[1], reference.logits(long, rows[1][None, 16:])[0], atol=1e-4)
