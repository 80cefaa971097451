"""Prompts that go on: after decode steps, and in rows that begin in different chunks."""

from __future__ import annotations

import numpy as np

from kvjax.extend import extend
from kvjax.reading.prompt import Batch, read_prompt
from tests import tiny
from tests.test_extend import ROWS, SIZE, STEPS, decode


def test_a_prompt_may_go_on_after_steps_in_a_sliding_window():
    """Steps write into the slots that the window has left, in no order. SnapKV's scores pool neighbours in the text."""
    params, spec = tiny.decoder(windows=(12,)), "snapkv:budget=6,window=2,kernel=5,pool=avg"
    more = np.random.default_rng(4).integers(0, tiny.VOCAB, (3, 8))
    _, whole = tiny.prefill(params, spec, [np.append(row, own) for row, own in zip(ROWS, more, strict=True)], 32)
    _, cache = tiny.prefill(params, spec, ROWS, SIZE, compress="never")
    _, cache = decode(params, cache, more[:, :4].T)
    assert (np.diff(cache.entries[0].positions) < 0).any()
    _, cache = extend(params, cache, more[:, 4:])
    assert [tiny.held(cache, row) for row in range(3)] == [tiny.held(whole, row) for row in range(3)]


def test_rows_without_tokens_are_not_compressed():
    """What scored a prompt is forgotten, and nothing has come since. Rows of a turn begin in different chunks."""
    params = tiny.decoder()
    _, cache = tiny.prefill(params, "snapkv:budget=12,window=4,kernel=3", ROWS, SIZE)
    _, cache = extend(params, cache, STEPS.T)
    _, turn = extend(params, cache, STEPS.T, np.array([0, 4, 4]), compress="end")
    assert tiny.held(turn, 0) == tiny.held(cache, 0)
    assert [len(head) for heads in tiny.held(turn, 2) for head in heads] == [12] * 2
    ragged, alike = (
        read_prompt(params, cache, Batch.of(rows, len(rows[0])), chunk=4, compress="chunk")
        for rows in ([ROWS[0][:8], ROWS[0][:5], STEPS[:, 2]], [STEPS[:, 2]] * 3)
    )
    np.testing.assert_allclose(ragged[0][2], alike[0][2], atol=2e-5)
    assert tiny.held(ragged[1], 2) == tiny.held(alike[1], 2)
