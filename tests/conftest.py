"""What all tests share: JAX on 8 CPU devices unless the environment says otherwise, hypothesis, a tiny decoder."""

import gc
import math
import os
import string
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from zlib import crc32

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before anything imports jax
# Without these, three quarters of a run's CPU time compile CPU programs. XLA's fusion emitters set up MLIR for every
# fusion; the older emitter, which jaxlib 0.10 still has, writes LLVM code directly and takes 40 % of the time. One
# module per program saves another fifth. The flags touch the CPU only: programs for GPUs and TPUs compile as they do
# for users. Flags of the caller come last and win.
os.environ["XLA_FLAGS"] = " ".join(
    [
        # XLA ends the process at a flag that it does not know.
        "--xla_cpu_use_fusion_emitters=false" if version("jaxlib").startswith("0.10.") else "",
        "--xla_cpu_parallel_codegen_split_count=1",
        os.environ.get("XLA_FLAGS", ""),
    ]
)

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import kvjax
from kvjax.evaluation import programs
from kvjax.evaluation.programs import maps_taken, return_freed
from kvjax.models import Decoder, linear
from kvjax.parts import AdaptiveShares, Everything, Fixed
from kvjax.runtime.gpu_flags import set_gpu_flags
from tests.products import part
from tests.tiny import decoder

set_gpu_flags()  # programs for GPUs are compiled as the command line compiles them
programs.keep(2**31 - 1)  # the fixture `memory` forgets programs, between tests
jax.config.update("jax_num_cpu_devices", 8)  # for the tests of many devices; the others use the first
if "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ:
    jax.config.update("jax_disable_most_optimizations", True)  # each program runs a few times, on a few numbers
gc.set_threshold(100_000, 50, 100)  # tracing makes many objects; collecting them as they come takes 5 % of the time

# Compiling inside an example has no bounded time, so there is no deadline. `ci` draws the same examples in every run;
# HYPOTHESIS_PROFILE=explore draws new ones, and more.
settings.register_profile("ci", deadline=None, derandomize=True, database=None, print_blob=True)
settings.register_profile("explore", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

normals = partial(jax.jit, static_argnums=1)(jax.random.normal)


def normal(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """The numbers of `jax.random.normal`: the first ones of a longer array, so that weights of many shapes share it."""
    if isinstance(key, jax.core.Tracer):
        return jax.random.normal(key, shape, dtype)
    size = math.prod(shape)
    drawn = normals(key, (1 << max(14, (size - 1).bit_length()),))
    return jnp.asarray(np.asarray(drawn)[:size].reshape(shape), dtype)


linear.normal = normal  # type: ignore[assignment]

# Policies with room for a few tokens, so that prompts of the tests below are compressed and answers evict. Those of
# the first tuple differ in what a cache carries from step to step; the others carry the same with other scores.
DISTINCT = (
    "morphkv:budget=24,window=4,every=4",  # the one of tests marked slow(first=1)
    "full",
    "streaming_llm:budget=24,positions=in_cache",
    "d2o:budget=24,layer_budgets=False",
    "keyformer:budget=24,recent=8",
    "adakv:base=h2o,base.budget=24,groups=2",
    "kvzip:budget=24,score.chunk=16,score.instruction='',score.starting='',score.suffix='',groups=2",
    "epikv:budget=24,window=4,recent=4",
)
ALIKE = (
    "streaming_llm:budget=24",
    "h2o:budget=24",
    "tova:budget=24",
    "snapkv:budget=24,window=4",
    "morphkv:budget=24,window=4",
    "kvcrush:base=snapkv,base.budget=24,base.window=4,share=0.5",
    "cam:budget=24,tokens=4",
    "kvmerger:budget=24,recent=8,merge.heavy=4,merge.theta=None",
    "scissorhands:budget=24,window=8,drop=0.25",
    "dynamickv:budget=24,window=4",
    "kvcompose:budget=24",
    "pyramidkv:budget=24,window=4,beta=2",
    "restkv:budget=24,window=4,reach=4",
    "finch:budget=24,window=4,chunk=8",
    "expected_attention:budget=24,future=16",
    "knorm:budget=24",
    "keydiff:budget=24,every=1",
    "random:budget=24,every=1",
    "lagkv:budget=24,sinks=2,lag=4,every=4",
    "chunkkv:base=h2o,base.budget=24,length=5",
    "criticalkv:base=h2o,base.budget=24",
    "compactor:budget=24,chunk=16,sketch=6",
    "kvgrad:budget=24,score.chunk=16,score.instruction='',score.starting='',score.suffix='',groups=2",
)
POLICIES = (*DISTINCT, *ALIKE)
POLICY_PARAMS = part(POLICIES, DISTINCT)


@pytest.hookimpl(tryfirst=True)  # before pytest looks at marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The first n cases of a test marked `slow(first=n)` are not slow, and those of `long(first=n)` not long.

    EXHAUSTIVE=k/n leaves out all tests marked exhaustive but the k-th part of n. SLOW=k/n and LONG=k/n do so of theirs.
    """
    left: dict[tuple[str, str], int] = {}
    for item in items:
        for mark in [mark for mark in item.own_markers if mark.name in ("long", "slow")]:
            name = mark.name, item.nodeid.partition("[")[0]
            left.setdefault(name, mark.kwargs.get("first", 0))
            if left[name] and not item.get_closest_marker("exhaustive"):
                left[name] -= 1
                item.own_markers.remove(mark)
    parts = [
        (name, *map(int, os.environ.get(name.upper(), "0/1").split("/"))) for name in ("exhaustive", "slow", "long")
    ]

    def is_of_another_part(item: pytest.Item) -> bool:
        number = crc32(item.nodeid.encode())
        return any(item.get_closest_marker(name) and number % n != k for name, k, n in parts)

    left_out = set(filter(is_of_another_part, items))
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


MAPS = 30_000 / 65_530  # the share of the memory maps that a process may take
PAGE = os.sysconf("SC_PAGE_SIZE")
LEAST = 3 << 29  # bytes; a smaller process forgets nothing, so that two workers take 4 GB
GROWTH = 1 << 29  # bytes that a process may take after it has forgotten its programs


class Memory:
    """Forgets compiled programs when a process grows by GROWTH beyond what it needs without them, or has too many maps.

    A small program holds some 8 MB and 60 maps. Tests that need a forgotten program trace it again; the cache on disk
    serves the compiled code. The C library keeps freed memory until malloc_trim returns it to the system. What is still
    resident then, such as compilers for accelerators, is not of programs, so the next limit lies beyond it.
    """

    limit = LEAST

    def check(self) -> None:
        if not Path("/proc/self").exists():
            return
        if self.resident() < self.limit and maps_taken() < MAPS:
            return
        jax.clear_caches()
        gc.collect()
        return_freed()
        self.limit = max(LEAST, self.resident() + GROWTH)

    def resident(self) -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


@pytest.fixture(scope="session")
def memory() -> Memory:
    return Memory()


@pytest.fixture(autouse=True)
def room_for_programs(memory: Memory) -> Iterator[None]:
    yield
    memory.check()


@pytest.fixture(params=POLICY_PARAMS, scope="session")  # tests of one policy run together, and share its programs
def policy(request: pytest.FixtureRequest) -> kvjax.Policy:
    return kvjax.policies.parse(request.param)


@pytest.fixture(scope="session")
def tiny() -> Decoder:
    """A decoder of two layers and 101 tokens. One for all tests, which so share what is compiled for it."""
    return decoder(windows=(None, None), vocab=101)


@pytest.fixture(scope="session")
def shallow() -> Decoder:
    """The same with one layer, for what does not depend on the number of layers."""
    return decoder(vocab=101)


@pytest.fixture(scope="session")
def subject(policy: kvjax.Policy, tiny: Decoder, shallow: Decoder) -> Decoder:
    """The decoder that tests of a policy run: of one layer where each layer has the same budget for itself."""
    return shallow if isinstance(policy.budget, Everything | Fixed | AdaptiveShares) else tiny


@pytest.fixture
def optimized() -> Iterator[None]:
    """Compiles as users do, for tests of what the compiler makes of a program."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(autouse=True)
def optimized_ahead(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("aot"):
        request.getfixturevalue("optimized")


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """Names of the programs that XLA compiles, or finds in a cache on disk, from here on."""
    names: list[str] = []

    def listen(event: str, _: float, **facts: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(str(facts.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Tokens of the tiny decoder are syllables, which prompts separate by spaces and answers do not."""
    syllables = [consonant + vowel for consonant in string.ascii_lowercase for vowel in "aeiou"]
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate([*syllables[:99], "<s>", "</s>"])}))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.Fuse()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 99)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="session")
def talker(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The tokenizer with a chat template."""
    copied = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, bos_token="<s>", eos_token="</s>")
    copied.chat_template = (
        "{% for m in messages %}{{ m.content + ' ' }}"
        "{{ raise_exception('cannot read ' + m.content) if 'fail' in m.content }}{% endfor %}"
        "{{ 'ba ' if twice or reasoning_effort }}{{ 'be' if add_generation_prompt }}"
    )
    return copied
