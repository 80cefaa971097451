"""Every preset with options for small prompts, and what tests of all of them run."""

from __future__ import annotations

import importlib
import importlib.util
import re
from typing import Any

import numpy as np
import pytest

from kvjax import policies
from kvjax.kv_cache import KVCache
from kvjax.models import Decoder
from kvjax.parts import FittedEntries
from kvjax.policy import PLAIN, Policy
from tests import tiny
from tests.products import part

SIZE, BUDGET, ROOM, STEPS = 24, 12, 8, 6

SPECS = {
    "full": ("",),
    "streaming_llm": (
        "budget=12,sinks=2",
        "budget=12,positions=in_cache,every=3",
        "budget=0.5,sinks=1,every=None",
    ),
    "h2o": ("budget=12", "budget=12,recent=3,every=3,sinks=1", "budget=0.5,recent=0.25,group=max"),
    "tova": ("budget=12", "budget=12,every=3", "budget=0.4,recent=2,every=None"),
    "snapkv": ("budget=12,window=4,kernel=3", "budget=0.5,window=3,pool=avg,kernel=5,group=max"),
    "morphkv": (
        "budget=12,window=4",
        "budget=12,window=4,fusion=max,every=3,dense_layers=1",
        "budget=12,window=3,normalise=distant,group=logits",
        "budget=0.5,window=3,normalise=distant,group=max",
    ),
    "cam": ("budget=12,sinks=2,tokens=4,form=expected", "budget=12,tokens=3,every=3"),
    "d2o": (
        "budget=12,recent=0.25,layer_budgets=False",
        "budget=12,recent=2,layer_budgets=False,merge.weights=code,every=3",
    ),
    "kvmerger": (
        "budget=12,recent=4,merge.heavy=2,merge.theta=None",
        "budget=0.5,merge.theta=0.2,merge.rule=chain,merge.straddle=True,merge.count_bias=True",
        "budget=12,recent=4,merge.heavy=2,merge.theta=0.3,every=2",
    ),
    "pyramidkv": ("budget=12,window=4,kernel=3,beta=2", "budget=0.5,window=3,kernel=3,beta=2,formula=code"),
    "expected_attention": ("budget=12,sinks=2,future=8,epsilon=0.01", "budget=0.5,sinks=0,value_norm=False"),
    "finch": ("budget=0.5,window=3,chunk=6",),
    "knorm": ("budget=12,sinks=1,recent=2",),
    "keydiff": ("budget=12,every=1",),
    "lagkv": ("budget=12,sinks=1,lag=3,every=2",),
    "random": ("budget=0.5,recent=2", "budget=12,seed=3,every=2"),
    "keyformer": ("budget=12,recent=4",),
    "scissorhands": ("budget=12,window=8,recent=4,drop=0.25",),
    "dynamickv": ("budget=12,window=4,kernel=3,interval=1", "budget=0.5,window=3,kernel=3,code_rounding=True"),
    "kvcompose": (
        "budget=12",
        "budget=0.5,score.source=self,score.rows=mean,structured=False,min_tokens=1,score.value_norm=vo",
    ),
    "kvcrush": (
        "base=snapkv,base.budget=12,base.window=4,base.kernel=3,share=0.5",
        "base=h2o,base.budget=12,base.recent=3,pick=kmeans,anchor=alternate",
        "base=h2o,base.budget=12,base.recent=2,share=0.5,granularity=page,page=3",
        "base=h2o,base.budget=12,base.recent=3,share=0.5,bits=query",
    ),
    "chunkkv": ("base=snapkv,base.budget=12,base.window=4,base.kernel=3,length=5",),
    "adakv": (
        "base=snapkv,base.budget=12,base.window=4,base.kernel=3",
        "base=h2o,base.budget=12,base.recent=3,alpha=0.5,formula=kvpress",
    ),
    "kvzip": (
        "budget=0.5,sinks=2,score.chunk=10,score.instruction='',score.starting='',score.suffix=''",
        "budget=12,score.chunk=10,score.instruction=(7,),score.starting='',score.suffix='',score.normalise=True",
    ),
    "duo_attention": ("gates=((1.0,0.1),(0.3,0.9)),sinks=2,recent=10,groups=2",),
    "criticalkv": ("base=h2o,base.budget=12,base.recent=3,first=0.4",),
    "quantize": (
        "policy=morphkv,policy.budget=12,policy.window=4",
        "policy=cam,policy.budget=12,policy.tokens=4,policy.form=expected,bits=4,group=4",
    ),
}


def of_its_test(preset: str, name: str, default: Any) -> Any:
    """What tests/methods/test_PRESET.py defines under a name; a default if it does not, or there is no such file."""
    path = f"tests.methods.test_{preset}"
    return getattr(importlib.import_module(path), name, default) if importlib.util.find_spec(path) else default


# A method states its options in its own test. Those above are of methods that share a file. A preset whose test defines
# none fails tests/policy/test_new_methods.py.
SPECS |= {name: of_its_test(name, "OPTIONS", ()) for name in policies.PRESETS if name not in SPECS}
ALL = [f"{name}:{options}".rstrip(":") for name, specs in SPECS.items() for options in specs]

# One of each way to read, write, merge and evict entries; the others of `ALL` rank entries by other numbers.
DISTINCT = (
    "streaming_llm:budget=12,positions=in_cache,every=3",
    "h2o:budget=12,recent=3,every=3,sinks=1",
    "tova:budget=12,every=3",
    "morphkv:budget=12,window=4,fusion=max,every=3,dense_layers=1",
    "morphkv:budget=12,window=3,normalise=distant,group=logits",
    "cam:budget=12,tokens=3,every=3",
    "d2o:budget=12,recent=2,layer_budgets=False,merge.weights=code,every=3",
    "kvmerger:budget=0.5,merge.theta=0.2,merge.rule=chain,merge.straddle=True,merge.count_bias=True",
    "kvmerger:budget=12,recent=4,merge.heavy=2,merge.theta=0.3,every=2",
    "lagkv:budget=12,sinks=1,lag=3,every=2",
    "random:budget=12,seed=3,every=2",
    "keyformer:budget=12,recent=4",
    "scissorhands:budget=12,window=8,recent=4,drop=0.25",
    "kvcompose:budget=0.5,score.source=self,score.rows=mean,structured=False,min_tokens=1,score.value_norm=vo",
    "kvcrush:base=h2o,base.budget=12,base.recent=2,share=0.5,granularity=page,page=3",
    "adakv:base=h2o,base.budget=12,base.recent=3,alpha=0.5,formula=kvpress",
    "kvzip:budget=0.5,sinks=2,score.chunk=10,score.instruction='',score.starting='',score.suffix=''",
    "duo_attention:gates=((1.0,0.1),(0.3,0.9)),sinks=2,recent=10,groups=2",
    "quantize:policy=morphkv,policy.budget=12,policy.window=4",
    "rkv:budget=12,window=4,kernel=3,every=3",
    "think:base=snapkv,base.budget=12,base.window=4,base.kernel=3,ratio=0.5,window=4,recent=3",
    "zipcache:base=snapkv,base.budget=12,base.window=4,base.kernel=3,window=4,queries=3",
)

# Those whose layers have budgets of their own, or none; `tests/methods/test_dynamickv.py` has layers that compete.
# `test_composition.py` has every score with every budget, selection and merge.
BUDGETED = (
    "full",
    "pyramidkv:budget=0.5,window=3,kernel=3,beta=2,formula=code",
    "per_layer:base=snapkv,base.budget=0.5,base.window=3,base.kernel=3,shares=(1.3,1.0)",
)

# `tests/test_kv_cache.py` asks in company and alone under policies of the other kinds. The scores of h2o, tova and
# morphkv do not look at how entries lie beside each other.
ALONE = (
    "kvmerger:budget=0.5,merge.theta=0.2,merge.rule=chain,merge.straddle=True,merge.count_bias=True",
    "lagkv:budget=12,sinks=1,lag=3,every=2",
    "random:budget=12,seed=3,every=2",
    "kvcompose:budget=0.5,score.source=self,score.rows=mean,structured=False,min_tokens=1,score.value_norm=vo",
    "kvcrush:base=h2o,base.budget=12,base.recent=2,share=0.5,granularity=page,page=3",
    "rkv:budget=12,window=4,kernel=3,every=3",
)

# The tests of one policy run together, and so share its compiled programs.
every_policy = pytest.mark.parametrize("spec", ALL, scope="session")
each_kind_of_policy = pytest.mark.parametrize("spec", part(ALL, DISTINCT), scope="session")
one_of_each_budget = pytest.mark.parametrize("spec", part(ALL, (*DISTINCT, *BUDGETED)), scope="session")
some_alone = pytest.mark.parametrize("spec", part(ALL, ALONE), scope="session")


def layers_of(spec: str, default: int) -> int:
    """The number of layers that a policy's text has numbers for; the default if it has none."""
    if re.search(r"\bheadkv\b", spec):
        return 4  # of the importance that kvjax contains
    return 2 if re.search(r"\b(duo_attention|lukv|per_layer)\b", spec) else default


def decoder(spec: str) -> Decoder:
    """Four query heads for each of two kv heads. One layer suffices for policies that treat all layers alike."""
    policy = policies.parse(spec)
    layers_differ = policy.allocates or any(x in spec for x in ("dense_layers", "pyramid", "lacache"))
    return tiny.decoder(
        8,
        windows=(None,) * layers_of(spec, 2 if layers_differ else 1),
        gates=bool(policy.learned or policy.score.needs.gates or policy.score.needs.statistics),
    )


def draw(seed: int, lengths: tuple[int, ...], steps: int = STEPS) -> tuple[list[np.ndarray], np.ndarray]:
    """The rows of a prompt, and the tokens [steps, B] to decode after it."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, tiny.VOCAB, n) for n in lengths], rng.integers(0, tiny.VOCAB, (steps, len(lengths)))


def decode(params: Decoder, cache: KVCache, tokens: np.ndarray) -> list[tuple[np.ndarray, KVCache]]:
    """Logits and cache after each of the tokens [steps, B]."""
    steps = []
    for token in tokens:
        logits, cache = tiny.step(params, cache, token, np.ones(len(token), bool))
        steps.append((np.asarray(logits), cache))
    return steps


def run(
    params: Decoder, spec: Policy | str, rows: list[np.ndarray], tokens: np.ndarray, size: int = SIZE
) -> list[tuple[np.ndarray, KVCache]]:
    """Logits and cache after the prompt and after each decoded token."""
    logits, cache = tiny.prefill(params, spec, rows, size, room=ROOM)
    return [(np.asarray(logits), cache), *decode(params, cache, tokens)]


def tolerance(policy: Policy) -> float:
    """The accuracy of float32, or of its least-squares solutions, or of codes of which a few are rounded otherwise."""
    if isinstance(policy.merge, FittedEntries):
        return 2e-3
    return 2e-5 if policy.storage == PLAIN else 5e-3


def assert_same_rows(mine, others, row: int = 0, other: int = 0) -> None:
    """Asserts that two runs have the same logits up to rounding, and the same entries, at every step."""
    for (logits, cache), (other_logits, other_cache) in zip(mine, others, strict=True):
        np.testing.assert_allclose(logits[row], other_logits[other], atol=tolerance(cache.policy))
        assert tiny.held(cache, row) == tiny.held(other_cache, other)
