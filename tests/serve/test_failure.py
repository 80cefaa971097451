"""A server whose engine has failed says so to clients, to what watches it, and in its log."""

from __future__ import annotations

import math
from typing import Any

import pytest

import kvjax
from kvjax.models import Decoder
from kvjax.serve import Settings
from tests.serve.serving import GOOD, KEY, POLICY, SIZES, only, send, served


@pytest.mark.long
def test_an_engine_that_has_failed(
    shallow: Decoder, talker: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise ValueError("secret of the device")

    with kvjax.Engine(shallow, POLICY, **SIZES, tokenizer=talker) as engine:
        for serving in served(only(engine), Settings(api_key=KEY, timeout=math.inf)):
            assert send(serving, "/v1/completions", GOOD)[0] == 200
            monkeypatch.setattr(engine._loop._device, "advance", broken)
            for _ in range(2):  # the request that runs, and a later one
                status, answer = send(serving, "/v1/completions", GOOD)
                assert (status, answer["error"]["code"]) == (500, "internal_error")
                assert "the engine has failed" in answer["error"]["message"]
                assert "secret" not in answer["error"]["message"]
            assert send(serving, "/health") == (503, {"status": "failed"})
            stats = send(serving, "/stats")[1]
            assert (stats["failed"], stats["rows_busy"], stats["finished"]) == (True, 0, {"length": 1, "failed": 1})
    (record,) = [record for record in caplog.records if record.name.startswith("kvjax")]
    assert "secret of the device" in str(record.exc_info)
