"""kvjax keeps the key-value cache of a decoder small, while it reads long prompts and writes long answers."""

from kvjax import parts, policies
from kvjax.checkpoint import CheckpointError, load, restore, save, save_hf
from kvjax.decoding.sampling import Greedy, Sampler, SamplingMethod
from kvjax.engine import Engine
from kvjax.extend import extend
from kvjax.files.saved_caches import restore_cache, save_cache
from kvjax.gates.attach import with_gates
from kvjax.generate import Generation, Stats, generate, prefill
from kvjax.kv_cache import KVCache, empty_cache
from kvjax.mesh.sharding import make_mesh, shard
from kvjax.plan import plan_cache
from kvjax.policy import AllocatedBudget, Budget, Merge, Policy, Protect, Score, Select, Storage
from kvjax.prefill_each import begin_each, prefill_each
from kvjax.reading.room import with_room
from kvjax.statistics.attach import with_statistics
from kvjax.stream import Piece, Stream, stream

__version__ = "0.1.0"

__all__ = [
    "AllocatedBudget",
    "Budget",
    "CheckpointError",
    "Engine",
    "Generation",
    "Greedy",
    "KVCache",
    "Merge",
    "Piece",
    "Policy",
    "Protect",
    "Sampler",
    "SamplingMethod",
    "Score",
    "Select",
    "Stats",
    "Storage",
    "Stream",
    "__version__",
    "begin_each",
    "empty_cache",
    "extend",
    "generate",
    "load",
    "make_mesh",
    "parts",
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
    "with_gates",
    "with_room",
    "with_statistics",
]
