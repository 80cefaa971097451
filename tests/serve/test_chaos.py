"""Many clients at once, a third of which go away, stall or send nonsense."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import openai
import pytest

import kvjax
from kvjax.models import Decoder
from tests.patience import wait_for
from tests.serve.serving import KEY, POLICY, Serving

pytestmark = pytest.mark.slow
PROMPTS = ("ba", "ba ce di fo gu", "di di di di ce ce ba", "gu fo di ce ba " * 4)
KINDS = 12  # of requests, so that few answers have to be made alone
NONSENSE = (b"GET", b"\0" * 100, b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n", b"{}", b"A" * 70_000)


def request(kind: int) -> dict[str, Any]:
    return {
        "prompt": PROMPTS[kind % len(PROMPTS)],
        "max_tokens": (2, 17, 60)[kind % 3],
        "temperature": 0.0 if kind % 2 else 1.3,
        "seed": kind,
    }


async def good(serving: Serving, client: openai.AsyncOpenAI, kind: int, expected: list[str]) -> str:
    """Asks until the queue has a place. Returns "answered", after the answer has been compared."""
    while True:
        try:
            if kind % 2:
                out = await client.completions.create(model="tiny", **request(kind))
                text = out.choices[0].text
            else:
                text = ""
                async for event in await client.completions.create(model="tiny", stream=True, **request(kind)):
                    text += event.choices[0].text
        except openai.RateLimitError:
            await asyncio.sleep(0.05)
            continue
        assert text == expected[kind]
        return "answered"


async def bad(serving: Serving, rng: random.Random, manner: str) -> str:
    """A client that misbehaves on a connection of its own."""
    _, writer = await asyncio.open_connection("127.0.0.1", serving.port)
    body = json.dumps({"model": "tiny", "stream": rng.random() < 0.5, **request(rng.randrange(KINDS))}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()
    try:
        if manner == "nonsense":
            writer.write(rng.choice(NONSENSE))
        elif manner == "stalls":  # in the middle of what it sends, or before it reads
            writer.write((head + body)[: rng.choice([10, len(head), len(head) + 5, len(head + body)])])
            await asyncio.sleep(rng.random())
        else:
            writer.write(head + body)
            await asyncio.sleep(0.1 * rng.random())
        await writer.drain()
    except ConnectionError:
        pass
    writer.close()
    return manner


async def chaos(serving: Serving, clients: int, turns: int, expected: list[str]) -> dict[str, int]:
    """Each client comes some times, at random moments. Returns the number of each manner."""
    rng, counts = random.Random(0), dict.fromkeys(("answered", "leaves", "stalls", "nonsense"), 0)

    async def client(own: random.Random, openai_client: openai.AsyncOpenAI) -> None:
        for _ in range(turns):
            await asyncio.sleep(own.random() * 0.3)
            manner = own.choice(["answered"] * 6 + ["leaves", "stalls", "nonsense"])
            if manner == "answered":
                manner = await good(serving, openai_client, own.randrange(KINDS), expected)
            else:
                manner = await bad(serving, own, manner)
            counts[manner] += 1

    async with serving.asynchronous as openai_client:
        await asyncio.gather(*(client(random.Random(rng.random()), openai_client) for _ in range(clients)))
    return counts


def resident() -> int:
    """The resident memory of this process in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.parametrize(("clients", "turns"), [(20, 6), pytest.param(200, 40, marks=pytest.mark.exhaustive)])
def test_chaos(
    clients: int, turns: int, serving: Serving, shallow: Decoder, talker: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Every answer is that of `generate`, no row stays busy, every request ends once, and memory does not grow."""
    samplers = [kvjax.Greedy() if kind % 2 else kvjax.Sampler(temperature=1.3) for kind in range(KINDS)]
    expected = [
        kvjax.generate(
            shallow,
            request(kind)["prompt"],
            policy=POLICY,
            tokenizer=talker,
            max_new_tokens=request(kind)["max_tokens"],
            sampler=samplers[kind],
            seed=kind,
        ).text
        for kind in range(KINDS)
    ]
    asyncio.run(chaos(serving, clients, 1, expected))
    before = resident()
    counts = asyncio.run(chaos(serving, clients, turns, expected))
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    assert min(counts.values()) > 0, counts
    engine = serving.engine
    wait_for(lambda: not engine.stats().rows_busy and not engine.stats().queue, lambda: f"still busy: {engine.stats()}")
    stats = engine.stats()
    assert sum(stats.finished.values()) == stats.requests
    assert resident() < before + 100e6
