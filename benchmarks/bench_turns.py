"""Measures a conversation of many turns with a server: the time to the first token of each turn, and the memory.

    python -m benchmarks.bench_turns --out runs/turns.jsonl

The model is the demo model. Each turn asks about one of the facts that the conversation began with, and the prompt
repeats all that was said, as clients of OpenAI's API send it. The sides take turns:

| side | what the server does |
|---|---|
| full, read | reads the whole prompt into a full cache |
| full, continued | continues the conversation's full cache |
| policy, read | reads the whole prompt, and compresses it |
| policy, continued | continues the conversation's compressed cache; its rows have room for one turn's prompt |

Each turn is a line of --out. At the end the script prints the medians of every tenth part, and the milliseconds that
a row takes to the host.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openai
import uvicorn

import kvjax
from kvjax.engine.device import Device
from kvjax.engine.stored import Stored
from kvjax.serve import Model, Models, Settings, application, listen
from kvjax.serve.server import configured

FACTS = "the code of anna is lamp . the code of ben is stone . the code of carl is river . "
TURNS = ("recall what the code of anna is :", "the tall king finds the door .", "recall what the code of ben is :")
ANSWER, PATIENCE = 6, 3600


@dataclass
class Side:
    """A server, and the conversation with it.

    Attributes:
        name: of the table above.
        engine: of the server.
        client: that talks to it.
        said: all text until now.
    """

    name: str
    engine: kvjax.Engine
    client: openai.OpenAI
    said: str = FACTS

    def turn(self, text: str) -> dict[str, Any]:
        """Takes one turn, and returns what it took."""
        self.said += text + " "
        started, first, answer, usage = time.perf_counter(), 0.0, "", None
        options = {"ignore_eos": True, "skip_special_tokens": False, "stream_options": {"include_usage": True}}
        for event in self.client.completions.create(
            model="demo", prompt=self.said, max_tokens=ANSWER, temperature=0, stream=True, extra_body=options
        ):
            first = first or time.perf_counter() - started
            answer += event.choices[0].text if event.choices else ""
            usage = event.usage or usage
        assert usage is not None
        self.said += answer + " "
        row = self.engine.footprint.row
        details = usage.prompt_tokens_details
        cached = 0 if details is None else details.cached_tokens
        return {"side": self.name, "first": first, "prompt": usage.prompt_tokens, "cached": cached, "row": row}

    def copies(self, count: int) -> list[float]:
        """The milliseconds that the idle engine takes to copy a row to the host."""
        device, found = self.engine._loop._device, list[float]()
        assert isinstance(device, Device)
        for _ in range(count):
            started = time.perf_counter()
            copied = Stored(1, *device._programs.run("take", device.resident, np.int32(0)))
            copied.start()
            copied.settle()
            found.append(1000 * (time.perf_counter() - started))
        return found


@contextmanager
def served(name: str, policy: str, longest: int, *, continued: bool) -> Iterator[Side]:
    """A side, whose server runs in a thread."""
    params, tokenizer = kvjax.load("demo")
    with kvjax.Engine(
        params,
        policy,
        rows=1,
        max_prompt=longest,
        max_new_tokens=ANSWER,
        chunk=longest,
        tokenizer=tokenizer,
        conversation_memory="1GB" if continued else None,
    ) as engine:
        listener = listen("127.0.0.1", 0)
        server = uvicorn.Server(
            configured(application(Models([Model("demo", policy, engine)]), Settings()), patience=PATIENCE)
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        yield Side(name, engine, openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE))
        server.should_exit = True
        thread.join()
        listener.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--policy", default="morphkv:budget=64,window=8")
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument("--without", nargs="*", default=[], help="sides that are left out")
    args = parser.parse_args()
    longest = 32 + 16 * args.turns  # a turn has at most 9 words and ANSWER tokens
    with ExitStack() as stack, args.out.open("a") as out:
        sides = [
            stack.enter_context(served(name, policy, most, continued=continued))
            for name, policy, most, continued in (
                ("full, read", "full", longest, False),
                ("full, continued", "full", longest, True),
                ("policy, read", args.policy, longest, False),
                ("policy, continued", args.policy, 32, True),
            )
            if name not in args.without
        ]
        found: dict[str, list[float]] = {side.name: [] for side in sides}
        for turn in range(args.turns):
            for side in sides:
                line = {"turn": turn + 1} | side.turn(TURNS[turn % len(TURNS)])
                found[side.name].append(line["first"])
                out.write(json.dumps(line) + "\n")
                out.flush()
        part = max(1, args.turns // 10)
        for side in sides:
            times = found[side.name]
            medians = [1000 * statistics.median(times[i : i + part]) for i in range(0, len(times), part)]
            print(f"{side.name:20}", *(f"{ms:8.1f}" for ms in medians), "ms;", f"{side.engine.footprint.row:,} bytes")
            if side.engine.stats().conversations.nbytes:
                copies = side.copies(20)
                print(f"{'':20} a row takes {statistics.median(copies):.2f} ms to the host")


if __name__ == "__main__":
    main()
