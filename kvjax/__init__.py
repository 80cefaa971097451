"""kvjax keeps the key-value cache of a decoder small, while it reads long prompts and writes long answers."""

from kvjax import policies
from kvjax.cache import KVCache
from kvjax.checkpoint import load, save_hf
from kvjax.extend import extend, with_room
from kvjax.generate import Generation, Stats, generate, prefill
from kvjax.policy import Policy
from kvjax.sampling import Greedy, Sampler

__all__ = [
    "Generation",
    "Greedy",
    "KVCache",
    "Policy",
    "Sampler",
    "Stats",
    "extend",
    "generate",
    "load",
    "policies",
    "prefill",
    "save_hf",
    "with_room",
]
