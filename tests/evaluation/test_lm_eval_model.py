"""The model class for lm-evaluation-harness: its scores against logits of whole texts, and a task of the harness."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import kvjax
from kvjax.checkpoint.folder import DEMO
from kvjax.evaluation.tasks import registry
from kvjax.evaluation.tasks.task import Source
from tests.tiny import full_logits

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed (the extra `lm-eval`)")

from kvjax.engine.refill import STOP_STEPS, Refill
from kvjax.evaluation import lm_eval_model
from kvjax.evaluation.lm_eval_model import KVJaxLM
from kvjax.models import Decoder


@pytest.fixture(scope="module")
def full() -> KVJaxLM:
    return KVJaxLM("demo", batch_size=4, dtype="float32")


def requests(*arguments: tuple) -> list[SimpleNamespace]:
    return [SimpleNamespace(args=one) for one in arguments]


def expected(lm: KVJaxLM, context: list[int], said: list[int]) -> tuple[float, bool]:
    """The expected score, from the logits of the whole text without a cache."""
    (logits,) = full_logits(lm.params, [np.array(context + said)], 32)
    logits = logits[len(context) - 1 : -1]
    log_probs = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    return float(log_probs[np.arange(len(said)), said].sum()), bool((logits.argmax(1) == said).all())


CONTEXT = "the code of anna is kettle . the river follows the old garden . recall what the code of anna is :"


@pytest.mark.slow
def test_continuations_are_scored_as_the_whole_text_is(full: KVJaxLM) -> None:
    pairs = [
        (CONTEXT, " anna is kettle"),
        (CONTEXT, " anna is ladder"),
        ("anna", " equals kettle . the"),  # a context of one token cannot be compressed
        (CONTEXT, " ladder"),
        ("", "the river"),  # follows the end of another text
        ("anna", " is"),
        ("anna", ""),
        (CONTEXT, ""),
        (CONTEXT, " kettle"),
    ]
    found = full.loglikelihood(requests(*pairs), disable_tqdm=True)
    encode = full.tok_encode
    for (context, said), (total, greedy) in zip(pairs, found, strict=True):
        if not said:
            assert (total, greedy) == (0, True)
            continue
        want = expected(full, encode(context) if context else [full.prefix_token_id], encode(said))
        assert total == pytest.approx(want[0], abs=1e-4)
        assert greedy == want[1]
    assert full.loglikelihood([], disable_tqdm=True) == []
    assert found[0][1]  # the model knows the answer
    assert not found[1][1]


@pytest.mark.slow
def test_whole_texts_are_scored_from_their_beginning(full: KVJaxLM) -> None:
    texts = ["the code of anna is kettle .", "the river"]
    found = full.loglikelihood_rolling(requests(*((text,) for text in texts)), disable_tqdm=True)
    for text, total in zip(texts, found, strict=True):
        assert total == pytest.approx(expected(full, [full.prefix_token_id], full.tok_encode(text))[0], abs=1e-4)


@pytest.mark.slow
def test_answers_are_those_of_generate(full: KVJaxLM) -> None:
    wanted = {"until": ["."], "max_gen_toks": 16, "do_sample": False, "temperature": 0.0}
    contexts = [CONTEXT, "the code of anna is kettle . recall what the code of anna is :", "anna"]
    texts = full.generate_until(requests(*((context, wanted) for context in contexts)), disable_tqdm=True)
    out = kvjax.generate(full.params, contexts, max_new_tokens=16, tokenizer=full.tokenizer)
    assert out.text is not None
    assert texts == [text.split(".")[0] for text in out.text]
    (cut,) = full.generate_until(requests((CONTEXT, wanted | {"until": [" is"]})), disable_tqdm=True)
    assert cut == "anna"


@pytest.mark.long
def test_answers_end_at_the_tokens_of_the_checkpoint(full: KVJaxLM, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder)
    (end,) = full.tokenizer.encode("is", add_special_tokens=False)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [full.eot_token_id, end]}))
    asked = requests((CONTEXT, {"until": [], "max_gen_toks": 16}))
    (whole,) = full.generate_until(asked, disable_tqdm=True)
    (cut,) = KVJaxLM(str(folder), batch_size=4, dtype="float32").generate_until(asked, disable_tqdm=True)
    assert whole.startswith("anna is kettle")
    assert cut == "anna is"


@pytest.mark.slow
def test_rows_are_refilled_and_little_is_written_behind_a_stop_string(
    full: KVJaxLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = []

    class Counted(Refill):
        def __init__(self, params: Decoder):
            super().__init__(params)
            rows.append(self)

    monkeypatch.setattr(lm_eval_model, "Refill", Counted)
    stops = [" kettle", "no such text", " is"] * 3  # the others end at their end token
    given = [(CONTEXT, {"until": [stop], "max_gen_toks": 256}) for stop in stops]
    texts = full.generate_until(requests(*given), disable_tqdm=True)
    whole = kvjax.generate(full.params, CONTEXT, max_new_tokens=256, tokenizer=full.tokenizer).text
    assert isinstance(whole, str)
    assert texts == [whole.split(stop)[0] for stop in stops]
    assert texts[0] == "anna is"
    assert sum(one.steps for one in rows) <= 3 * STOP_STEPS
    again = full.generate_until(requests(*[(CONTEXT, {"until": [" is"], "max_gen_toks": 256})] * 9), disable_tqdm=True)
    assert again == ["anna"] * 9
    assert rows[-1].steps <= 3 * STOP_STEPS


@pytest.mark.slow
def test_the_first_answer_token_depends_on_what_was_kept(full: KVJaxLM) -> None:
    small = KVJaxLM("demo", policy="streaming_llm:budget=8;sinks=1", batch_size=4, dtype="float32")
    pair = (CONTEXT, " anna")
    assert small.policy == kvjax.policies.streaming_llm(budget=8, sinks=1)
    (kept,), (all_,) = (lm.loglikelihood(requests(pair), disable_tqdm=True) for lm in (small, full))
    assert abs(kept[0] - all_[0]) > 1e-3


@pytest.mark.long
def test_prompts_that_are_too_long_lose_their_beginning(full: KVJaxLM, caplog: pytest.LogCaptureFixture) -> None:
    short = KVJaxLM("demo", batch_size=4, dtype="float32", max_length=16)
    with caplog.at_level(logging.WARNING, "kvjax.evaluation.lm_eval_model"):
        (found,) = short.loglikelihood(requests((CONTEXT, " anna is")), disable_tqdm=True)
    assert "1 of 1 prompts are too long for the model and lost their beginning" in caplog.text
    ids = full.tok_encode(CONTEXT)
    assert found[0] == pytest.approx(expected(full, ids[-15:], full.tok_encode("anna is"))[0], abs=1e-4)
    with pytest.raises(ValueError, match="max_gen_toks=16: expected less than max_length=16"):
        short.generate_until(requests((CONTEXT, {"max_gen_toks": 16})), disable_tqdm=True)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"batch_size": "auto"}, "batch_size='auto': expected an integer >= 1"),
        ({"max_batch_size": 8}, "max_batch_size=8: expected None"),
        ({"policy": "snapkw"}, "snapkw"),
    ],
)
def test_arguments_that_are_not_accepted(arguments: dict[str, object], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        KVJaxLM("demo", **arguments)


def test_generation_arguments_that_are_not_known(full: KVJaxLM) -> None:
    with pytest.raises(ValueError, match=r"generation arguments \['num_beams'\]: expected only temperature, "):
        full.generate_until(requests((CONTEXT, {"num_beams": 4})), disable_tqdm=True)


@pytest.mark.slow
def test_a_task_of_the_harness(tmp_path: Path) -> None:
    import lm_eval
    from lm_eval.tasks import TaskManager

    (task,) = registry.find("demo/needle")
    rows = [
        {"q": one.context + one.questions[0].text, "a": one.questions[0].answers[0]}
        for one in task.examples(Source(length=256, count=6))
    ]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    stub = {
        "task": "stub",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}, "cache_dir": str(tmp_path)},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{q}}",
        "doc_to_target": "{{a}}",
        "generation_kwargs": {"until": ["."], "max_gen_toks": 16},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    results = lm_eval.simple_evaluate(
        model="kvjax",
        model_args="pretrained=demo,policy=snapkv:budget=128;window=16",
        tasks=[stub],
        batch_size=2,
        task_manager=TaskManager(include_defaults=False),  # reading the harness's thousands of tasks takes long
    )
    found = [
        sample["filtered_resps"][0] == row["a"] for sample, row in zip(results["samples"]["stub"], rows, strict=True)
    ]
    assert results["results"]["stub"]["exact_match,none"] == pytest.approx(np.mean(found))
    assert np.mean(found) > 0.5
