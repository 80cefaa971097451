"""What an engine accepts, what it refuses, and how much memory it takes."""

from __future__ import annotations

import asyncio
import gc
import json
import threading

import jax
import numpy as np
import pytest

import kvjax
from kvjax.decoding.sampling import SamplingMethod
from kvjax.engine import Answer, EngineClosedError, QueueFullError, Token
from kvjax.engine.memory import bytes_of
from kvjax.engine.sizes import Sizes
from kvjax.engine.ticket import Options, Ticket
from kvjax.models import Decoder
from tests.cli.commands import kv
from tests.cli.conftest import saved
from tests.patience import PATIENCE
from tests.serve.serving import POLICY, SIZES


class Last(SamplingMethod):
    def __call__(self, logits, keys=None, seen=None):
        return logits.argmin(-1)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([1] * 17, {}, "the prompt has 17 tokens: expected at most max_prompt=16"),
        ([[1], [2]], {}, "the prompt has 2 rows: expected one prompt per request"),
        ([[1]], {}, "the prompt has 1 row: expected one prompt per request"),
        ([101], {}, r"^the prompt contains the id 101: expected ids in 0 \.\. 100"),
        (7, {}, "the prompt is of type int"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens=0: expected an integer"),
        ([1], {"max_new_tokens": 513}, "max_new_tokens=513: expected at most the engine's 512"),
        ([1], {"sampler": "greedy"}, "sampler='greedy': expected kvjax.Greedy"),
        ([1], {"sampler": Last()}, "expected kvjax.Greedy or kvjax.Sampler"),
        ([1], {"seed": 0.5}, "seed=0.5: expected an integer of 64 bits"),
        ([1], {"seed": [1]}, "expected an integer of 64 bits"),
        ([1], {"seed": 2**63}, "expected an integer of 64 bits"),
        ([1], {"eos": "x"}, "eos='x': expected a token id"),
        ([1], {"eos": list(range(25))}, "eos has 25 tokens: expected at most 24"),
        ([1], {"stop": ""}, "stop='': expected strings"),
        ([1], {"prefix": [2]}, r"prefix=\[2\]: expected an engine with prefix_memory="),
        ([1], {"log_probs": "yes"}, "log_probs='yes': expected True or False"),
    ],
)
def test_bad_requests_are_refused_at_once(engine: kvjax.Engine, prompt, options, message) -> None:
    before = engine.stats().requests
    with pytest.raises(ValueError, match=message):
        engine.submit(prompt, **{"max_new_tokens": 4, **options})
    assert engine.stats().requests == before


def test_a_bad_prefix_is_called_by_its_name() -> None:
    sizes = Sizes.of(1, 16, 4)
    with pytest.raises(ValueError, match=r"^the prefix contains the id 8: expected ids in 0 \.\. 7"):
        Ticket.of([1], Options(prefix=[8]), sizes, None, 8)
    with pytest.raises(ValueError, match=r"^the prefix is empty"):
        Ticket.of([1], Options(prefix=[]), sizes, None, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 0}, "rows=0: expected an integer"),
        ({"max_prompt": 0}, "max_prompt=0: expected an integer"),
        ({"max_new_tokens": True}, "max_new_tokens=True: expected an integer"),
        ({"chunk": 0}, "chunk=0: expected an integer"),
        ({"steps_at_once": 0}, "steps_at_once=0: expected an integer"),
        ({"max_queue": 0}, "max_queue=0: expected an integer"),
        ({"policy": 3}, "policy=3: expected a Policy"),
        ({"policy": "pyramidkv:budget=2"}, "budget"),
        ({"tokenizer": 3}, "tokenizer is of type int"),
        ({"memory": "80 cows"}, "memory='80 cows': expected a number and one of B, kB"),
        ({"memory": "8kB"}, r"rows=3 take .* bytes per device: .* expected at most memory=8,000, into which 0 rows"),
    ],
)
def test_bad_engines_are_refused_before_anything_is_compiled(
    shallow: Decoder, options, message, compiled: list[str]
) -> None:
    with pytest.raises(ValueError, match=message):
        kvjax.Engine(shallow, **{"policy": POLICY, **SIZES, **options})
    assert "jit(advance)" not in compiled


@pytest.mark.parametrize(
    ("text", "count"), [(7, 7), ("80GB", 80 * 10**9), (" 1.5 GiB ", 3 << 29), ("12kB", 12_000), ("3B", 3)]
)
def test_sizes_of_memory_are_read(text: int | str, count: int) -> None:
    assert bytes_of(text) == count


@pytest.mark.parametrize(
    "text", ["", "GB", "1", "-1GB", "1gb", "0B", 0, -1, 1.5, None, True, "1e3GB", "9" * 400 + "GB"]
)
def test_other_sizes_of_memory_are_refused(text: object) -> None:
    with pytest.raises(ValueError, match=r"expected (an integer of bytes, or a text of )?a number and one of B, kB"):
        bytes_of(text)


def test_a_full_queue_refuses_and_a_cancelled_request_frees_its_row(engine: kvjax.Engine) -> None:
    long = {"max_new_tokens": 512, "eos": ()}
    running = [engine.submit([1, 2], **long) for _ in range(3)]
    for handle in running:
        next(handle.tokens())
    waiting = [engine.submit([3], **long) for _ in range(3)]
    with pytest.raises(QueueFullError, match="6 requests run and wait already: expected at most 6"):
        waiting.extend(engine.submit([4], **long) for _ in range(50))  # some of the running ones may end meanwhile
    for handle in (*running, *waiting):
        handle.cancel()
    answers = [handle.result(timeout=PATIENCE) for handle in (*running, *waiting)]
    assert "cancelled" in {answer.finish for answer in answers}
    assert all(len(answer.tokens) < 512 for answer in answers if answer.finish == "cancelled")
    assert engine.submit([5], max_new_tokens=2, seed=np.int32(-7)).result(timeout=PATIENCE).finish == "length"
    assert engine.stats().rows_busy == engine.stats().queue == 0


def test_text_and_stop_strings_are_those_of_stream(engine: kvjax.Engine, shallow: Decoder, tokenizer) -> None:
    whole = engine.submit("ba be bi", max_new_tokens=20, eos=()).result(timeout=PATIENCE)
    assert whole.text is not None
    stop = whole.text[7:10]
    handle = engine.submit("ba be bi", max_new_tokens=20, eos=(), stop=[stop, "zzz"])
    answer = handle.result(timeout=PATIENCE)
    pieces = list(
        kvjax.stream(shallow, "ba be bi", policy=POLICY, max_new_tokens=20, eos=(), stop=[stop], tokenizer=tokenizer)
    )
    assert answer.finish == "stop"
    assert answer.tokens.tolist() == [int(piece.tokens[0]) for piece in pieces]
    assert answer.text == "".join(piece.text[0] for piece in pieces if piece.text) == whole.text.split(stop)[0]
    assert [token.text for token in handle.tokens()] == [piece.text[0] for piece in pieces if piece.text]
    assert answer.prompt_tokens == 4  # the tokenizer's <s> is one of them


def test_coroutines_wait_without_blocking(engine: kvjax.Engine) -> None:
    async def ask(prompt: list[int]) -> tuple[list[Token], Answer]:
        handle = engine.submit(prompt, max_new_tokens=12, eos=(), log_probs=True)
        return [token async for token in handle], await handle

    async def both() -> list[tuple[list[Token], Answer]]:
        return list(await asyncio.gather(ask([1]), ask([2, 3]), ask([4])))

    for tokens, answer in asyncio.run(both()):
        assert [token.id for token in tokens] == answer.tokens.tolist()
        assert len(tokens) == 12
        assert answer.log_probs is not None
        assert [token.log_prob for token in tokens] == pytest.approx(answer.log_probs.tolist())


def test_after_close_nothing_is_accepted(shallow: Decoder) -> None:
    threads = threading.active_count()
    engine = kvjax.Engine(shallow, POLICY, **SIZES)
    handles = [engine.submit([i], max_new_tokens=5) for i in range(6)]
    engine.close()
    engine.close()
    assert threading.active_count() == threads
    assert [len(handle.result().tokens) for handle in handles] == [5] * 6
    with pytest.raises(EngineClosedError, match="the engine is closed"):
        engine.submit([1])


def test_a_handle_keeps_its_engine(shallow: Decoder) -> None:
    handle = kvjax.Engine(shallow, POLICY, **SIZES).submit([5, 6, 7], max_new_tokens=40, eos=())
    gc.collect()
    assert len(handle.result(timeout=PATIENCE).tokens) == 40


def test_bytes_are_those_of_the_plan(shallow: Decoder, engine: kvjax.Engine) -> None:
    """The closed form against the arrays."""
    resident = engine._loop._device.resident
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(resident)) == engine.footprint.row * 3
    planned = kvjax.plan_cache(
        shallow.config, kvjax.policies.parse(POLICY), batch=3, length=16, new_tokens=512, dtype="float32"
    )
    assert engine.stats().cache_bytes == planned.nbytes
    assert engine.footprint.workspace > 0
    most = engine.footprint.total(5)
    assert engine.footprint.rows_within(most) == 5
    assert engine.footprint.rows_within(most - 1) == 4


def test_rows_are_changed_in_place(engine: kvjax.Engine) -> None:
    """Every array of the resident rows is donated and returned, and admission takes little beside them."""
    device = engine._loop._device
    for name in ("admit 1", "advance"):
        analysis = device._programs._compiled[name].memory_analysis()
        assert analysis.alias_size_in_bytes >= engine.footprint.row * 3
    admit = device._programs._compiled["admit 1"].memory_analysis()
    assert admit.temp_size_in_bytes < 8 * engine.footprint.row


def test_plan_says_how_many_rows_fit(tmp_path) -> None:
    model = saved(tmp_path, layers=1)
    options = ("--policy", "full", "--policy", "h2o:budget=16", "--max-prompt", 90, "--max-new-tokens", 30)
    status, stdout, _ = kv("plan", model, "--memory", "1MB", *options, "--chunk", 32, "--json")
    assert status == 0
    full, h2o = json.loads(stdout)["plans"]
    of_each = json.loads(stdout)["rows_of_each"]
    prompts, rows = full["prompt"] + h2o["prompt"], full["bytes_per_row"] + h2o["bytes_per_row"]
    assert of_each == (10**6 - full["weights"] - prompts) // rows
    params, _ = kvjax.load(model)
    for plan, policy in ((full, "full"), (h2o, "h2o:budget=16")):
        cache = kvjax.plan_cache(
            params.config, kvjax.policies.parse(policy), batch=1, length=90, new_tokens=30, dtype="float32"
        )
        assert cache.nbytes < plan["bytes_per_row"] < cache.nbytes + 1000
        assert plan["weights"] == sum(leaf.nbytes for leaf in jax.tree.leaves(params))
        assert plan["rows"] == (10**6 - plan["weights"] - plan["prompt"]) // plan["bytes_per_row"]
    assert h2o["rows"] > full["rows"] > 0
    status, stdout, _ = kv("plan", model, "--memory", "1MB", *options, "--chunk", 32)
    assert status == 0
    assert f"{h2o['rows']}" in stdout
    assert f"{of_each} rows under each of these policies" in stdout
    assert kv("plan", model, "--memory", "much")[0] == 2
