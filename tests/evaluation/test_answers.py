"""Answers are marked by exact match, and the accuracies are drawn as a picture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.evaluation.answers import answer
from kvjax.evaluation.picture import accuracy_by_budget
from kvjax.evaluation.tasks.demo import DemoExample
from kvjax.models import Decoder, DecoderConfig, Rope


@pytest.mark.long
def test_an_answer_is_right_if_it_is_whole_and_ends() -> None:
    config = DecoderConfig("llama", 64, 16, 16, 2, 1, 8, (None,), Rope(1e4), 128)
    params = Decoder(config, nnx.Rngs(1))
    prompt = np.random.default_rng(0).integers(0, 64, 20)
    written = kvjax.generate(params, prompt, max_new_tokens=16).tokens[0]
    firsts = [i for i in range(1, 16) if written[i] not in written[:i]]
    assert firsts, "the model repeats one token; another seed is needed"
    length = firsts[-1]  # the answer ends at the first occurrence of this token
    right = DemoExample(prompt[:-1], prompt[-1:], written[:length])
    wrong = replace(right, answer=np.where(np.arange(length) == 0, -1, written[:length]))
    short, long = replace(right, answer=written[: length - 1]), replace(right, answer=written[: length + 1])
    examples, end = [right, wrong, short, long], int(written[length])
    out = answer(params, examples, kvjax.policies.full(), end_token=end, new_tokens=20)
    assert out.correct.tolist() == [True, False, False, False]
    assert out.accuracy == 0.25
    assert all(np.array_equal(ids, written[:length]) for ids in out.answers)
    assert out.stats.decoded_tokens == 4 * 19
    never = next(i for i in range(64) if i not in written)
    assert not answer(params, [right], kvjax.policies.full(), end_token=never, new_tokens=16).correct.any()
    with pytest.raises(ValueError, match=f"new_tokens=3: expected an integer >= {length + 2}"):
        answer(params, examples, kvjax.policies.full(), end_token=end, new_tokens=3)


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib (the extra `plot`)")
    accuracy_by_budget(
        tmp_path / "a.png", {"snapkv": [(128, 0.5), (64, 0.2)], "tova": [(64, 0.1)]}, full=0.9, title="two curves"
    )
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
