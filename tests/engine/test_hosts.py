"""An engine on two processes, each with devices of its own, answers as `kvjax.generate` on one device.

Its followers do what the leader does, in the same order.
"""

from __future__ import annotations

import json
import sys
from collections import deque

import pytest

import kvjax
from kvjax.engine import EngineClosedError
from kvjax.engine.hosts import Leader, follow
from kvjax.engine.loop import Loop
from kvjax.evaluation.tasks.vocabulary import WORDS, tokenizer
from tests.engine.test_loop import SIZES, Notes, ticket
from tests.engine.two_hosts import requests
from tests.processes import free_port, last_lines
from tests.products import part
from tests.tiny import decoder


class Messages(deque):
    """A channel within one process."""

    send, receive = deque.append, deque.popleft


@pytest.mark.parametrize("fails", [False, True])
def test_followers_do_what_the_leader_does(fails: bool) -> None:
    """Also after a prompt that was not read to its end, with two that are read together, and until the leader fails."""
    notes, others, messages = Notes(), Notes(), Messages()
    notes.most = 2
    leader = Leader(notes, messages)
    loop = Loop(leader, SIZES.rows, 8, at_once=4, keeps=True)
    unread, *requests = ticket(64), ticket(40, limit=3), ticket(2, limit=5)
    loop.submit([unread])
    loop.turn()
    loop.cancel(unread)
    for one in requests:
        loop.submit([one])
    if fails:
        while not any("admit" in what for what in notes.done):
            loop.turn()
        notes.fails = True
    else:
        loop.close(drain=True)
    leader.lead(loop)
    if fails:
        with pytest.raises(EngineClosedError, match="on process 0, the engine has failed with FloatingPointError"):
            follow(others, messages, ticket(1).start)
    else:
        follow(others, messages, ticket(1).start)
        assert loop.counters.finished == {"cancelled": 1, "length": 2}
    assert others.done[: len(notes.done)] == notes.done
    assert "chunk of 2" in notes.done
    assert not messages


CASES = [
    (2, 2, "h2o:budget=12"),  # each process its own rows
    (1, 4, "adakv:base=h2o,base.budget=12,groups=2"),  # each process its own kv head, shared by its two devices
]


@pytest.mark.slow
@pytest.mark.parametrize(("data", "model", "policy"), part(CASES, CASES[:1]))
def test_two_processes_answer_as_one(data: int, model: int, policy: str) -> None:
    command, port = [sys.executable, "-m", "tests.engine.two_hosts"], str(free_port())
    lines = last_lines([[*command, str(index), port, str(data), str(model), policy] for index in range(2)])
    found = json.loads(lines[0])

    params = decoder(vocab=len(WORDS))
    alone = [kvjax.generate(params, policy=policy, tokenizer=tokenizer(), **request) for request in requests()]
    assert found["devices"] == [2, 4]
    assert found["tokens"] == [one.tokens[0].tolist() for one in alone]
    read = kvjax.prefill(params, [8] * 20, policy=policy)
    assert found["prefixed"] == [kvjax.generate(params, [3, 4], cache=read, max_new_tokens=5).tokens[0].tolist()] * 3
    begun = kvjax.generate(params, [3, 1, 4], policy=policy, max_new_tokens=6, eos=())
    later = kvjax.generate(params, [5], cache=begun.cache, max_new_tokens=6, eos=())
    assert found["later"] == [8, later.tokens[0].tolist()]
    assert found["cancelled"] == "cancelled"
    finish, text, whole = found["stopped"]
    assert finish == "stop"
    assert whole.startswith(text)
    assert len(text) < len(whole)
    assert found["finished"] == {"length": 11, "stop": 1, "cancelled": 1}
