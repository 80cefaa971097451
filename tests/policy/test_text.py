"""Policies as text and back, and errors that name the value that was given and what is accepted."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax import policies
from kvjax.parts import Fixed, GaussianMerge, Reconstruction, SimilarityMerge, TaskAttention
from kvjax.policies import (
    PRESETS,
    adakv,
    d2o,
    h2o,
    headkv,
    kvcompose,
    kvcrush,
    kvmerger,
    kvzip,
    morphkv,
    parse,
    snapkv,
    streaming_llm,
    tova,
)
from kvjax.policy import Policy, Protect
from tests.policy.presets import ALL


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_by_name_is_its_defaults(name):
    assert parse(name) == parse(f" {name}: ") == PRESETS[name]()


@pytest.mark.parametrize("spec", ALL)
def test_a_repr_is_the_policy_again(spec):
    policy = parse(spec)
    assert parse(repr(policy)) == policy
    assert hash(parse(repr(policy))) == hash(policy)


@given(
    budget=st.one_of(st.integers(70, 10**6), st.floats(0.01, 1)),
    window=st.integers(1, 60),
    fusion=st.sampled_from(["sum", "max"]),
    every=st.integers(1, 10),
)
def test_text_means_what_the_call_means(budget, window, fusion, every):
    policy = morphkv(budget=budget, window=window, fusion=fusion, every=every)
    assert parse(f"morphkv:budget={budget!r}, window={window},fusion={fusion},every={every}") == policy
    assert parse(repr(policy)) == policy


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("tova:budget=9,every=None", tova(budget=9, every=None)),
        ("streaming_llm:positions=in_cache", streaming_llm(positions="in_cache")),
        ("snapkv:pool='none'", snapkv(pool="none")),
        ("adakv:base=snapkv,normalise=None", adakv(snapkv())),
        ("h2o:recent=0.25,group=max", h2o(recent=0.25, group="max")),
        ("headkv:importance=((1.0, 0.5),(0.2,0.1)),budget=64", headkv(64, ((1.0, 0.5), (0.2, 0.1)))),
        (
            "kvzip:score.instruction=(7,60),score.suffix=(2,)",
            kvzip(score=Reconstruction(4, 2048, (7, 60), suffix=(2,))),
        ),
    ],
)
def test_words_numbers_tuples_and_none(text, policy):
    assert parse(text) == policy


def doubled(base: Policy = snapkv(64), times: int = 2, recent: bool = False) -> Policy:  # noqa: B008
    """Another policy with a multiple of its budget."""
    protect = Protect(recent=base.protect.recent + 1) if recent else base.protect
    return replace(base, budget=Fixed(times * base.budget.entries), protect=protect)


@pytest.fixture
def nested(monkeypatch):
    monkeypatch.setattr(policies, "PRESETS", {**PRESETS, "doubled": doubled})


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("doubled", snapkv(128)),
        ("doubled:base=h2o,base.budget=9", h2o(18, recent=0.5)),
        ("doubled:base.window=4, base=snapkv,times=3,base.budget=9", snapkv(27, window=4)),
        ("doubled:base=doubled,base.times=5,base.base=tova,base.base.budget=3,recent=True", tova(30, recent=1)),
    ],
)
def test_options_of_a_policy_within_a_policy(nested, text, policy):
    assert parse(text) == policy


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("doubled:base.budget=3", "options of base without base itself"),
        ("doubled:base=3", "base=3 is not a word"),
        ("doubled:base=h3o", r"base='h3o': did you mean h2o\?"),
        ("doubled:base=([1],)", r"base=\(\[1\],\) is not a word"),
        ("doubled:recent=(True,)", r"recent=\(True,\) is not True or False"),
        ("doubled:base=h2o,base.size=3", "h2o has no option 'size'"),
        ("doubled:base=h2o,times.size=3", "times is no policy.*'size'"),
        ("doubled:recent=1", "recent=1 is not True or False"),
        ("doubled:times=True", "times=True is not a number"),
        ("doubled:base=h2o,base.budget=3,base.budget=4", "base.budget twice"),
    ],
)
def test_unusable_options_of_a_policy_within_a_policy(nested, text, says):
    with pytest.raises(ValueError, match=says):
        parse(text)


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        (
            "kvmerger:budget=0.5,merge.theta=0.3,merge.rule=chain",
            kvmerger(0.5, merge=GaussianMerge(theta=0.3, rule="chain")),
        ),
        ("kvmerger:merge.sigma=3.0", kvmerger(merge=GaussianMerge(sigma=3.0))),
        ("kvmerger:merge.straddle=True, every=2", kvmerger(every=2, merge=GaussianMerge(straddle=True))),
        (
            "kvcrush:base.merge.theta=None,base=kvmerger,anchor=3",
            kvcrush(kvmerger(merge=GaussianMerge(theta=None)), anchor=3),
        ),
        (
            "quantize:policy=kvcrush,policy.base=d2o,policy.base.merge.alpha=1",
            policies.quantize(kvcrush(d2o(merge=SimilarityMerge(alpha=1)))),
        ),
        ("kvcompose:score.source=prompt,score.prompts=Why?", kvcompose(score=TaskAttention("prompt", "Why?"))),
        ("kvzip:score.chunk=16,sinks=2,score.suffix=''", kvzip(sinks=2, score=Reconstruction(2, 16, suffix=""))),
    ],
)
def test_options_of_a_part_of_a_policy(text, policy):
    assert parse(text) == policy
    assert parse(repr(policy)) == policy
    assert hash(parse(text)) == hash(policy)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kvmerger:theta=0.3", r"kvmerger has no option 'theta': expected budget, .* merge\.heavy, merge\.theta, "),
        ("kvmerger:merge.size=3", r"kvmerger has no option 'merge\.size': expected merge\.heavy, merge\.theta, "),
        ("kvmerger:merge.=3", r"kvmerger has no option 'merge\.': expected merge\.heavy, "),
        ("kvmerger:merge.theta.size=3", r"merge\.theta is no policy and no part.*'size'"),
        ("kvmerger:merge.theta=large", r"merge\.theta='large' is not a number \(the default is 0\.75\)"),
        ("kvmerger:merge.rule=3", r"merge\.rule=3 is not a word \(the default is 'anchor'\)"),
        ("kvmerger:merge.straddle=1", r"merge\.straddle=1 is not True or False"),
        ("kvmerger:merge.theta=2", r"theta=2: expected a cosine"),
        ("kvmerger:merge=x", r"kvmerger: merge=x: expected its own options, merge\.heavy, merge\.theta, "),
        ("kvmerger:merge=x,merge.theta=0.3", r"merge=x: expected its own options, merge\.heavy"),
        ("kvmerger:merge.theta=0.3,merge.theta=0.4", r"merge\.theta twice"),
        ("kvcrush:base=kvmerger,base.merge.size=3", r"kvmerger has no option 'merge\.size'"),
        ("kvcrush:base=kvmerger,base.merge=3", r"kvmerger: merge=3: expected its own options"),
        ("kvcrush:base=h2o,base.merge.theta=0.3", "h2o has no option 'merge'"),
        ("kvcrush:base.merge.theta=0.3", "options of base without base itself"),
        ("kvzip:score.instruction=3", r"score\.instruction=3 is not a word"),
        ("kvzip:score.sinks=6", r"score\.sinks=6 with sinks=4: expected sinks=6, or no score\.sinks"),
        ("kvcrush:anchor=True", "anchor=True is not a word"),
        ("kvmerger:merge.rule=None", r"merge\.rule=None is not a word \(the default is 'anchor'\)"),
    ],
)
def test_unusable_options_of_a_part_of_a_policy(text, says):
    with pytest.raises(ValueError, match=says):
        parse(text)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_at_most_eight_options(name):
    """More are grouped into the part that they configure, as `merge.theta` of `kvmerger`."""
    assert len(inspect.signature(PRESETS[name]).parameters) <= 8


def test_policies_that_differ_are_told_apart():
    specs = [parse(spec) for spec in ALL]
    assert len(set(specs)) == len(specs)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "unknown policy ''.*morphkv"),
        ("morph", r"unknown policy 'morph': did you mean morphkv\?$"),
        ("Morphkv", r"unknown policy 'Morphkv': did you mean morphkv"),
        ("full:budget=3", "full has no option 'budget'.*none"),
        ("morphkv:size=3", "no option 'size'.*budget, window"),
        ("morphkv:budget", "'budget'.*option=value"),
        ("morphkv:budget=", "option=value"),
        ("morphkv:budget=many", "budget='many' is not a number"),
        ("morphkv:budget=True", "budget=True is not a number"),
        ("morphkv:budget=(1,2)", r"budget=\(1, 2\): expected an integer >= 1 or a float"),
        ("morphkv:fusion=(1,2),window=4", r"\(1, 2\): expected 'sum' or 'max'"),
        ("morphkv:budget=(1,2", r"budget='\(1,2' is not a number"),
        ("morphkv:fusion=3", "fusion=3 is not a word"),
        ("morphkv:fusion=product", "'product': expected 'sum' or 'max'"),
        ("morphkv:group=mean", "group='mean': expected 'sum' or 'max' or 'logits'"),
        ("morphkv:normalise=none", "normalise='none': expected 'full' or 'distant'"),
        ("snapkv:kernel=4", "4.*odd"),
        ("snapkv:pool=min", "pool='min': expected"),
        ("streaming_llm:positions=new", "positions='new'.*in_cache"),
        ("morphkv:budget=1,budget=2048", "budget.*twice"),
        ("Policy(", "describes no policy"),
        ("Policy()", "describes no policy"),
        ("Policy(score=Unknown())", "describes no policy"),
        ("Policy(score=Recency(), budget=Fixed(entries=0.5))", r"an integer >= 1; Fraction\(0.5\) is a share"),
        ("Policy(score=Recency(), budget=Fixed(8))", "Fixed has a value without a name: expected NAME=VALUE for each"),
        ("Policy(score=Recensy())", r"unknown part Recensy: .*; did you mean Recency\?"),
        ("snapkv:windw=3", r"expected budget, window, .*; did you mean window\?"),
        ("Policy(score=__import__('os').getcwd())", "describes no policy"),
        (repr(policies.full()) + ".every", "describes no policy"),
        (repr(policies.full()).replace("Recency()", "3"), "describes no policy"),
    ],
)
def test_unusable_text_is_refused_by_name(text, says):
    with pytest.raises(ValueError, match=f"(?s){says}"):
        parse(text)
