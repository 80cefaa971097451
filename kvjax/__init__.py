"""kvjax keeps the key-value cache of a decoder small, while it reads long prompts and writes long answers."""

from kvjax import policies
from kvjax.cache import KVCache
from kvjax.cache_io import restore_cache, save_cache
from kvjax.checkpoint import load, restore, save, save_hf
from kvjax.extend import extend, with_room
from kvjax.generate import Generation, Stats, generate, prefill
from kvjax.plan import plan_cache
from kvjax.policy import Policy
from kvjax.sampling import Greedy, Sampler
from kvjax.sharding import make_mesh, shard
from kvjax.stream import Piece, stream
from kvjax.sweep import prefill_each

__all__ = [
    "Generation",
    "Greedy",
    "KVCache",
    "Piece",
    "Policy",
    "Sampler",
    "Stats",
    "extend",
    "generate",
    "load",
    "make_mesh",
    "plan_cache",
    "policies",
    "prefill",
    "prefill_each",
    "restore",
    "restore_cache",
    "save",
    "save_cache",
    "save_hf",
    "shard",
    "stream",
    "with_room",
]
