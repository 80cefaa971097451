"""The model that ships: it loads in transformers and here, computes the same in both, and answers its tasks."""

from __future__ import annotations

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers import AutoTokenizer

import kvjax
from kvjax.attend.causal import causal
from kvjax.checkpoint import load
from kvjax.checkpoint.folder import DEMO
from kvjax.evaluation.tasks.demo import TASKS, example
from kvjax.evaluation.tasks.vocabulary import IDS, STOP, decode, tokenizer
from kvjax.gates.files import read_gates
from kvjax.statistics.files import read_statistics
from kvjax.statistics.measure import measured

LENGTH = 256  # of prompts


@pytest.fixture(scope="module")
def decoder():
    return load(DEMO)[0]


@jax.jit
def logits(decoder, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return decoder.logits(decoder(tokens, causal(positions))[0])


def draw(task: str, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Prompts with the answer and padding behind them [B, LENGTH + 8], and the answers with their end [B, A]."""
    rng = np.random.default_rng([99, list(TASKS).index(task)])
    examples = [example(task, LENGTH, rng) for _ in range(count)]
    answers = np.stack([np.append(each.answer, IDS[STOP]) for each in examples])
    tokens = np.concatenate([np.stack([each.prompt for each in examples]), answers], axis=1)
    return np.pad(tokens, ((0, 0), (0, LENGTH + 8 - tokens.shape[1]))), answers


def test_the_weights_are_small_and_the_config_says_where_an_answer_ends():
    assert (DEMO / "model.safetensors").stat().st_size <= 8e6
    config = json.loads((DEMO / "config.json").read_text())
    assert config["vocab_size"] == len(IDS)
    assert config["eos_token_id"] == IDS[STOP]


def test_transformers_loads_the_tokenizer_and_it_is_the_vocabularys():
    loaded = AutoTokenizer.from_pretrained(DEMO)
    assert loaded.get_vocab() == IDS
    assert loaded.backend_tokenizer.to_str() == tokenizer().backend_tokenizer.to_str()
    prompt = example("variables", 128, np.random.default_rng(0)).prompt
    assert loaded(decode(prompt))["input_ids"] == prompt.tolist()
    assert loaded.decode(prompt) == decode(prompt)
    assert loaded.eos_token_id == IDS[STOP]
    assert loaded.chat_template == tokenizer().chat_template


def test_a_chat_is_a_text_in_which_answers_end():
    messages = [("system", "the sea"), ("user", "recall"), ("assistant", "adam is lamp"), ("user", "recall")]
    given = [{"role": role, "content": content} for role, content in messages]
    text = AutoTokenizer.from_pretrained(DEMO).apply_chat_template(given, tokenize=False, add_generation_prompt=True)
    assert text == "the sea recall adam is lamp . recall"


@pytest.mark.long
@pytest.mark.slow(first=1)
@pytest.mark.parametrize("task", TASKS)
def test_it_answers_from_a_full_cache_and_ends_its_answers(decoder, task):
    """Teacher forcing, which for exact matches is greedy decoding. The card has the full table."""
    tokens, answers = draw(task, 20)
    first = LENGTH - 1
    guesses = np.asarray(logits(decoder, tokens))[:, first : first + answers.shape[1]].argmax(-1)
    assert (guesses == answers).all(axis=1).mean() >= 0.9


def test_nothing_can_be_answered_without_the_text(decoder):
    tokens, answers = draw("keys", 20)
    question = tokens[:, LENGTH - 8 : LENGTH + 2]  # "recall what the code of NAME is : NAME is"
    guesses = np.asarray(logits(decoder, question))[:, -1].argmax(-1)
    assert (guesses == answers[:, 2]).mean() <= 0.1


@pytest.mark.slow
@pytest.mark.parity
def test_transformers_computes_the_same_logits_and_answers(decoder):
    torch = pytest.importorskip("torch", reason="comparing with transformers needs torch (the extra `parity`)")
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    tokens, answers = draw("copying", 2)
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens).long()).logits.numpy()
        prompt = torch.from_numpy(tokens[:, :LENGTH]).long()
        written = theirs.generate(prompt, max_new_tokens=10, attention_mask=torch.ones_like(prompt)).numpy()
    np.testing.assert_allclose(np.asarray(logits(decoder, tokens)), expected, atol=1e-3, rtol=1e-4)
    np.testing.assert_array_equal(written[:, LENGTH : LENGTH + answers.shape[1]], answers)


@pytest.mark.slow
def test_the_statistics_are_those_of_its_queries(decoder):
    """Other texts have nearly the same; a policy that reads them answers from half of a text."""
    given = read_statistics(DEMO / "statistics")
    texts = [draw(task, 2)[0][:, :LENGTH] for task in TASKS]
    found = measured(decoder, texts, sinks=4)
    assert given.keys() == found.keys()
    for name in ("query_mean", "query_cov", "query_norms"):
        assert np.linalg.norm(given[name] - found[name]) < 0.1 * np.linalg.norm(given[name]), name
    params = kvjax.with_statistics(decoder, given)
    tokens, answers = draw("needle", 10)
    prompts = tokens[:, :LENGTH]
    policy = "triattention:budget=0.5,recent=16,every=None"
    out = kvjax.generate(params, prompts, policy=policy, max_new_tokens=answers.shape[1])
    assert np.sum((np.asarray(out.tokens) == answers).all(axis=1)) >= 9


@pytest.mark.slow
@pytest.mark.parametrize("method", ["kvzap", "fastkvzip"])
def test_with_the_gates_it_answers_from_a_quarter(decoder, method):
    """Without a second reading, in every task; random gates answer from no quarter."""
    gates = read_gates(DEMO / "gates" / method)
    rng = np.random.default_rng(0)
    layers = tuple({name: rng.normal(size=x.shape) * 0.1 for name, x in layer.items()} for layer in gates.layers)
    drawn = {task: draw(task, 5) for task in TASKS}

    def right(params) -> int:
        count = 0
        for tokens, answers in drawn.values():
            prompts = tokens[:, :LENGTH]
            policy = f"{method}:budget=0.25,recent=16"
            out = kvjax.generate(params, prompts, policy=policy, max_new_tokens=answers.shape[1])
            count += np.sum((np.asarray(out.tokens) == answers).all(axis=1))
        return count

    assert right(kvjax.with_gates(decoder, gates)) >= 0.95 * 5 * len(TASKS)
    assert right(kvjax.with_gates(decoder, replace(gates, layers=layers))) < 0.5 * 5 * len(TASKS)
