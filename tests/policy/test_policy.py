"""What a policy hands to its parts, and the numbers that follow from it without a model."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import UNLIMITED, Slots
from kvjax.models import AttentionLayer, Rope
from kvjax.pallas_kernels import Reduction
from kvjax.parts import (
    AdaptiveShares,
    CompositeShares,
    DenseLayers,
    Fixed,
    FoldedWindow,
    Fraction,
    GlobalShares,
    HeadShares,
    JointImportance,
    LeveragedAttention,
    LookaheadAttention,
    Pooling,
    SeenShare,
    StochasticAttention,
    ThresholdShares,
    UniformShares,
    VarianceShares,
    WindowAttention,
)
from kvjax.policies import PRESETS, h2o, parse
from kvjax.policy import Effects, Limits, Merge, Moment, Needs, Protect, Received, Together, most_entries
from tests.policy.small import small


@dataclass(frozen=True)
class Noting(Merge):
    """Drops entries, and notes the scores with which it is shown them."""

    seen: list = field(default_factory=list, hash=False)

    @property
    def effects(self) -> Effects:
        return Effects(at_steps=True)

    def absorb(self, entries, moment, scores, lost, count):
        self.seen.append((np.asarray(scores), np.asarray(moment.protected)))
        return super().absorb(entries, moment, scores, lost, count)


@pytest.mark.parametrize("name", ["score", "budget", "select", "merge", "protect", "storage", "learned"])
def test_a_policy_refuses_what_is_no_part(name):
    with pytest.raises(ValueError, match=f"^{name}=5: expected a "):
        replace(h2o(4), **{name: 5})


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: WindowAttention(4, "mean"), "reduction='mean': expected a Reduction"),
        (lambda: WindowAttention(4, Reduction(), "max"), "pooling='max': expected a Pooling"),
        (lambda: JointImportance(4, "max", 0.1, 0.5), "pooling='max': expected a Pooling"),
        (lambda: StochasticAttention(4, "avg", 0.1, 2, 0), "pooling='avg': expected a Pooling"),
        (lambda: LookaheadAttention(pooling="max"), "pooling='max': expected a Pooling"),
        (lambda: LeveragedAttention(5), "attention=5: expected a NonCausalAttention"),
    ],
)
def test_a_part_refuses_what_is_no_part_of_it(make, says):
    with pytest.raises(ValueError, match=f"^{says}$"):
        make()


def test_a_merge_while_decoding_sees_the_scores_of_protected_entries():
    """CaM, say, compares scores with the mean of those after them, which are the recent ones."""
    merge = Noting()
    policy = replace(h2o(4), merge=merge, protect=Protect(sinks=1, recent=2))
    keys, weights = jnp.ones((1, 1, 6, 8)), jnp.arange(1.0, 7.0)[None, None]
    positions = jnp.array([[[0, 3, 1, 4, 2, -1]]])
    entries = Slots(keys, keys, positions, jnp.array([[5]]), per_slot=weights)
    moment = Moment(jnp.array([5]), AttentionLayer(0, Rope(1e4), None, 1.0, None))
    left = policy.release(entries, moment, jnp.arange(6) == jnp.full((1, 1, 1), 2), 1)
    ((scores, protected),) = merge.seen
    np.testing.assert_array_equal(scores, [[[1, 2, 3, 4, 5, -np.inf]]])
    np.testing.assert_array_equal(protected, [[[True, True, False, True, False, False]]])
    np.testing.assert_array_equal(left.positions, [[[0, 3, -1, 4, 2, -1]]])


@pytest.mark.parametrize("sinks", [0, 1, 3])
@pytest.mark.parametrize("recent", [0, 2, 0.0, 0.1, 0.25, 0.5, 0.9])
def test_the_minimum_is_the_least_capacity_that_leaves_room(sinks, recent):
    """Beside a share of it that is not rounded down yet."""
    protect = Protect(sinks, recent)
    for room in (1, 2, 5):
        for capacity in range(1, 100):
            own = capacity * recent if isinstance(recent, float) else recent
            assert (capacity >= protect.minimum(room)) == (capacity - own - sinks >= room - 1e-6)


@pytest.mark.parametrize(
    ("protect", "stay"),
    [
        (Protect(), []),
        (Protect(sinks=1), [0]),
        (Protect(sinks=2), [0, 1]),
        (Protect(recent=1), [7]),
        (Protect(1, 3), [0, 5, 6, 7]),
        (Protect(recent=0.25), [6, 7]),  # of 8 entries
        (Protect(recent=0.3), [6, 7]),
        (Protect(recent=0.375), [5, 6, 7]),
    ],
)
def test_protected_entries(protect, stay):
    """The next token is the ninth. One head holds position 6 alone, the other one all of the others."""
    positions = np.array([[[7, -1, 5, 0, 3, 1], [-1, -1, 6, -1, -1, -1]]])
    mask = np.asarray(protect.mask(positions, np.array([8]), np.array([[8, 8]])))
    assert sorted(positions[mask].tolist()) == stay


LIMITS = {
    "full": ([False] * 5, [False] * 5),
    "snapkv": ([True] * 5, [False] * 5),
    "h2o": ([True] * 5, [True] * 5),
    "morphkv:dense_layers=2": ([False, False, True, True, True], [False, False, True, True, True]),
    "morphkv:dense_layers=2,every=None": ([False, False, True, True, True], [False] * 5),
    "d2o": ([True] * 5, [False, False, True, True, False]),
    "duo_attention": ([True] * 5, [True] * 5),
}


@pytest.mark.parametrize("text", LIMITS)
def test_which_layers_have_a_budget_and_which_evict(text):
    limits = parse(text).limits(5)
    assert limits == Limits(*map(tuple, LIMITS[text]))
    assert limits.of_layers(1, 3) == Limits(limits.limited[1:4], limits.evicts[1:4])


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("share", [0.5, 0.4, 1.0, 0.07])
def test_slots_that_rise_with_the_answer(share, every):
    """`longest` inverts the budget, and `rise` is enough wherever an answer begins, also after an eviction."""
    policy = parse(f"rising:share={share},every={every}")
    budget = np.asarray(policy.budget.capacity(0, np.arange(401), 1))
    for slots in range(1, int(budget[-1])):
        assert policy.longest(slots) == np.flatnonzero(budget <= slots)[-1]
    for tokens in (1, 2, 7, 30):
        risen = (budget[tokens:] - budget[:-tokens]).max()
        assert policy.rise(tokens) == risen + every - 1
    assert h2o(9).rise(5) == 0
    assert h2o(9).longest(5) == UNLIMITED


def test_capacities_and_slots():
    """A row has at least what is protected and what a step evicts, and a layer the slots of its longest prompt."""
    policy = parse("streaming_llm:budget=0.5,sinks=3,every=2")
    for use in (np, jnp):
        assert policy.capacity(1, use.array([1, 10, 11, 13]), 2).tolist() == [5, 5, 5, 6]
        assert parse("full").capacity(1, use.array([1, 10]), 2).tolist() == [UNLIMITED] * 2
    assert [policy.slots(0, size, 1) for size in (4, 11, 12)] == [5, 5, 6]
    assert [most_entries(Fraction(1.0), 0, size, 1) for size in (1, 2**20, 2**20 + 1, 2**22)] == [
        *(1, 2**20),
        *(2**20 + 1, 2**22),
    ]
    assert most_entries(Fixed(7), 0, 2**21 + 5, 1) == 7


def test_calls_in_which_a_score_is_shown_attention():
    wish = Received(Reduction(), calls="prompts", slots=4)
    assert [wish.shown(call) for call in ("steps", "prompts", "replays")] == [False, True, False]
    assert [wish.shown("prompts", slots) for slots in (4, 5)] == [True, False]
    assert all(Received(Reduction()).shown(call, 10**6) for call in ("steps", "prompts", "replays"))
    last = Received(Reduction(), last=3)
    assert Needs(received=wish, also_received=(last,)).wishes == (wish, last)
    assert Needs(also_received=(last,)).wishes == (last,)
    assert [needs.asks_the_end for needs in (Needs(), Needs(received=wish), Needs(received=last))] == [
        False,
        False,
        True,
    ]
    assert Needs(keeps_queries=True).asks_the_end


def test_what_scores_need_that_observe_together():
    received, keeps, hidden, replays = (parse(name).score for name in ("h2o", "snapkv", "kvzap", "kvcompose"))
    both = Together((received, keeps, hidden)).needs
    assert both == Needs(also_received=received.needs.wishes, keeps_queries=True, hidden="normed")
    assert Together((received, replays)).needs == Needs(
        also_received=(*received.needs.wishes, *replays.needs.wishes), whole_prompt=True
    )


FACTS = {  # the presets of which a fact is true
    "asks_the_end": (
        *("adakv", "attention_matching", "blockwise", "chunkkv", "compactor", "criticalkv", "defensivekv", "dms"),
        *("dynamickv", "entropy_gated_chunkkv", "finch", "gkv", "headkv", "key_rerotation", "kvcrush", "lukv"),
        *("merging", "morphkv", "non_causal_attention", "per_layer", "pyramidkv", "quantize", "restkv", "restorekv"),
        *("rkv", "simlayerkv", "snapkv", "think", "tova", "vase", "zipcache"),
    ),
    "piecewise": (
        *("adakv", "attention_matching", "chunkkv", "dms", "duo_attention", "dynamickv", "entropy_gated_chunkkv"),
        *("epikv", "fastkvzip", "finch", "full", "h2o", "headkv", "key_rerotation", "knorm", "kvcrush", "kvzap"),
        *("lazyeviction", "lukv", "merging", "morphkv", "observed_attention", "per_layer", "pyramidkv", "qfilter"),
        *("quantize", "random", "restorekv", "rising", "snapkv", "streaming_llm", "think", "zipcache"),
    ),
    "changes_entries": ("attention_matching", "cam", "d2o", "kvmerger", "merging", "think", "zipcache"),
    "allocates": (
        *("adakv", "d2o", "defensivekv", "dms", "duo_attention", "dynamickv", "fastgen", "fastkvzip", "headkv"),
        *("kvcompose", "kvgrad", "kvzap", "kvzip", "lookaheadkv", "lukv", "restorekv", "simlayerkv"),
    ),
}


@pytest.mark.parametrize("fact", FACTS)
def test_facts_of_presets(fact):
    """Core code reads them. Those built on another policy have its facts; here it is SnapKV or H2O."""
    assert [name for name in PRESETS if getattr(small(name), fact)] == list(FACTS[fact])


def test_presets_that_retain_the_same_where_there_is_more_room():
    """All but those that compare more than scores or merge the entries of a prompt."""
    assert [name for name in PRESETS if not small(name).ignores_size] == [
        *("attention_matching", "cam", "chunkkv", "d2o", "entropy_gated_chunkkv", "finch", "kvcrush", "kvmerger"),
        "merging",
    ]


ALONE = {"alpha": 0.0, "normalise": False}  # what makes AdaKV the best entries of a layer's heads
BUILDS = {  # what a preset makes of its options, beside their values
    **{
        f"{preset}:budget=40{more},level={level}": budget
        for preset, more in (("kvzip", ""), ("kvgrad", ""), ("kvzap", ",recent=4"), ("fastkvzip", ",recent=4"))
        for level, budget in {
            "global,groups=2": GlobalShares(Fixed(40), 2),
            "layer,groups=2": AdaptiveShares(Fixed(40), groups=2, **ALONE),
            "head": UniformShares(Fixed(40)) if preset in ("kvzip", "kvgrad") else Fixed(40),
        }.items()
    },
    "kvzip:budget=40,strict=True": GlobalShares(Fixed(40), strict=True),
    "defensivekv:budget=40,groups=2": AdaptiveShares(Fixed(40), groups=2, **ALONE),
    "defensivekv:budget=40,level=global,groups=2": GlobalShares(Fixed(40), 2),
    "kvcompose:budget=40,heads=max,first_layer=True,min_tokens=3": CompositeShares(Fixed(40), 3, True, "max"),
    "kvcompose:budget=40,structured=False,groups=2,min_tokens=3": GlobalShares(Fixed(40), 2, 3),
    "d2o:budget=40,dense_first=3,dense_last=2": VarianceShares(Fixed(40), 3, 2),
    "d2o:budget=40,layer_budgets=False": Fixed(40),
    "morphkv:budget=40,dense_layers=2": DenseLayers(Fixed(40), 2),
    "morphkv:budget=40": Fixed(40),
    "lookaheadkv:budget=40": UniformShares(Fixed(40)),
    "restorekv:base=knorm,base.budget=40": UniformShares(Fixed(40)),
    "restorekv:base=kvzip,base.budget=40": GlobalShares(Fixed(40)),
    "dms:budget=200,threshold=0.5,groups=2": ThresholdShares(Fixed(200), 0.5, 2),
    "lukv:budget=40,curve=((0.5,0.1),),groups=2": HeadShares(Fixed(40), ((0.5, 0.1),), 2),
    "rising:base=h2o,share=0.25": SeenShare(0.25),
}


@pytest.mark.parametrize("text", BUILDS)
def test_budgets_that_options_make(text):
    assert parse(text).budget == BUILDS[text]


def test_scores_that_options_make():
    assert parse("snapkv:pool=none").score.pooling is None
    assert parse("snapkv:pool=avg,kernel=3").score.pooling == Pooling("avg", 3)
    assert parse("lookaheadkv").score.pooling is None
    assert parse("lookaheadkv:kernel=3").score.pooling == Pooling("max", 3)
    assert isinstance(parse("morphkv").score, FoldedWindow)
    for fusion, group in (("sum", "max"), ("max", "logits")):
        rows = Reduction(rows=fusion, group="max" if group == "max" else "sum", first="group")
        score = parse(f"morphkv:normalise=distant,fusion={fusion},group={group}").score
        assert score == WindowAttention(32, rows, normalise="distant", sum_logits=group == "logits")
    protects = {
        "lukv:curve=((0.5,),)": Protect(4, 1),
        "lukv:base=snapkv,curve=((0.5,),),sinks=2": Protect(2, 32),
        "lukv:base=h2o,curve=((0.5,),),sinks=2": Protect(2, 0.5),
        "dms": Protect(0, 128),
        "dms:base=h2o,window=7": Protect(0, 7),
        "dms:base=snapkv,window=7": Protect(0, 32),
        "simlayerkv:sinks=3,recent=7": Protect(3, 7),
    }
    assert {text: parse(text).protect for text in protects} == protects
    assert parse("kvcrush:base=knorm,base.budget=100,granularity=page,page=29,share=0.29").select.page == 29
    evicted = {"scissorhands:budget=100,drop=0.29": 29, "scissorhands:budget=12,recent=1,drop=0.05": 1}
    assert {text: parse(text).every for text in evicted} == evicted
