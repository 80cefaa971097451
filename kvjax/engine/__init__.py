"""Requests that come and go: `Engine` answers them in the rows of one resident cache.

    engine = kvjax.Engine(params, policy, rows=8, max_prompt=4096, max_new_tokens=1024, tokenizer=tokenizer)
    handle = engine.submit(prompt, max_new_tokens=100, sampler=kvjax.Sampler(temperature=0.7), seed=1, stop=["\\n"])
    for token in handle.tokens(): ...       # Token(id, text, log_prob), as they come; from any thread
    answer = handle.result()                # Answer(tokens, text, log_probs, finish, prompt_tokens)
    async for token in handle: ...          # the same in a coroutine
    answer = await handle
    handle.cancel()                         # the row is free before the next program
    engine.stats()                          # Stats: rows, queue, tokens, histograms of times, bytes
    engine.close()                          # refuses new requests, finishes the others; drain=False cancels them
    engine.follow()                         # on several hosts, on all processes after process 0: runs what it runs

`submit` raises ValueError for a bad request (TooLongError for too many tokens), QueueFullError if too many wait, and
EngineClosedError after `close`.
"""

from kvjax.decoding.grammars import Grammar, GrammarError

from .engine import Engine
from .engines import Engines
from .errors import EngineClosedError, QueueFullError, TooLongError
from .guide import Guide
from .handle import Answer, Finish, Handle, Token
from .memory import Footprint
from .stats import Histogram, Stats

__all__ = [
    "Answer",
    "Engine",
    "EngineClosedError",
    "Engines",
    "Finish",
    "Footprint",
    "Grammar",
    "GrammarError",
    "Guide",
    "Handle",
    "Histogram",
    "QueueFullError",
    "Stats",
    "Token",
    "TooLongError",
]
