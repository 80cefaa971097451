"""The defaults of presets are the settings that their papers publish, or those that the documentation states."""

from __future__ import annotations

from inspect import signature
from typing import Any

import pytest

from kvjax import policies
from kvjax.methods import registry
from kvjax.policy import LearnedTokens, Policy, Protect

# Options that are numbers, texts, truth values or None, in their order.
DEFAULTS = {
    "adakv": "alpha=0.2,normalise=None,formula=paper,groups=1",
    "attention_matching": "queries=256,seed=0",
    "blockwise": "block=128",
    "cam": "budget=1024,sinks=4,tokens=32,form=bernoulli,group=mean,every=1,seed=0",
    "capkv": "budget=1024,tau=5.0,sinks=4,future=512,epsilon=1e-06",
    "chunkkv": "length=20",
    "compactor": "budget=1024,chunk=256,sketch=48,blend=0.5,seed=0,sinks=8,recent=4",
    "corm": "budget=1024,window=256,recent=256,every=1",
    "criticalkv": "first=0.5,epsilon=0.0001",
    "cur": "budget=1024,kind=product,window=16,sinks=4,every=None",
    "d2o": "budget=0.2,sinks=4,recent=0.5,layer_budgets=True,dense_first=2,dense_last=1,every=1",
    "defensivekv": "budget=1024,window=32,kernel=5,pool=avg,level=layer,first=0.5,groups=1",
    "dms": "threshold=-0.5,window=128,budget=1.0,groups=1",
    "duo_attention": "gates=demo,sparsity=0.5,sinks=128,recent=256,every=1,groups=1",
    "dynamickv": "budget=1024,window=8,kernel=7,pool=avg,group=mean,interval=4,r_max=10.0,code_rounding=False",
    "entropy_gated_chunkkv": "length=10,few=4",
    "epikv": "budget=4096,window=64,early=0.3125,late=0.65625,sinks=0,recent=128,every=1",
    "expected_attention": "budget=1024,sinks=4,future=512,covariance=True,value_norm=True,epsilon=0.0",
    "expected_attention_stats": "budget=1024,sinks=4,future=512,covariance=True,value_norm=True,epsilon=0.0,every=None",
    "fastgen": "budget=1.0,recovery=0.95,sinks=4,frequent=0.3,local=0.3,groups=1",
    "fastkvzip": "budget=0.3,sinks=4,recent=128,every=None,level=global,groups=1",
    "finch": "budget=1024,window=32,chunk=None,rescale=True,positions=original",
    "full": "",
    "gkv": "budget=1024,window=16,decay=0.8,mix=0.5,threshold=0.5,every=128",
    "h2o": "budget=1024,recent=0.5,group=mean,every=1,sinks=0",
    "headkv": "budget=1024,importance=demo,group=1,beta=1.5,window=8,kernel=7,pool=max,groups=1",
    "key_rerotation": "",
    "keydiff": "budget=1024,sinks=0,recent=0,every=None",
    "keydiff_codes": "budget=1920,recent=32,bits=8",
    "keyformer": "budget=0.6,recent=0.3,temperature=1.0,growth=0.01,noise=gumbel,seed=0,every=1",
    "knorm": "budget=1024,sinks=0,recent=0,every=None",
    "kvcompose": "budget=1024,heads=mean,structured=True,groups=1,min_tokens=0,first_layer=False,recent=0",
    "kvcrush": "share=0.25,anchor=mean,pick=centroid,upper=0.5,granularity=token,page=32,bits=kv",
    "kvgrad": "budget=0.3,sinks=4,level=global,groups=1,recent=0",
    "kvmerger": "budget=0.5,recent=0.34,group=mean,every=None",
    "kvzap": "budget=0.3,sinks=0,recent=128,every=None,level=global,groups=1",
    "kvzip": "budget=0.3,sinks=4,level=global,strict=False,groups=1,recent=0",
    "lacache": "budget=1024,run=2,keep=1,sinks=4,recent=32,positions=original,every=1",
    "lagkv": "budget=1024,sinks=4,lag=128,cross=False,every=None",
    "lazyeviction": "budget=1024,window=175,alpha=0.0001",
    "leverage_score": "budget=1024,sketch=48,seed=0,sinks=0,recent=0",
    "lookaheadkv": "budget=1024,tokens=32,recent=32,kernel=1,pool=max,group=mean",
    "lukv": "curve=demo,budget=0.2,sinks=4,recent=1,groups=1",
    "merging": "threshold=0.0,fraction=1.0",
    "morphkv": "budget=2048,window=32,fusion=sum,every=1,dense_layers=0,normalise=full,group=sum,block=None",
    "non_causal_attention": "budget=1024,chunk=256,sinks=0,recent=0",
    "observed_attention": "budget=1024,group=mean,sinks=0,recent=0,every=None",
    "per_layer": "",
    "pyramidkv": "budget=1024,window=8,kernel=7,pool=max,group=mean,beta=20,formula=paper",
    "qfilter": "budget=1024,sinks=0,recent=0,every=None",
    "quantize": "bits=8,group=None",
    "random": "budget=1024,seed=0,sinks=0,recent=0,every=None",
    "restkv": "budget=1024,window=32,alpha=0.3,kernel=5,reach=2000",
    "restorekv": "tokens=8",
    "rising": "share=0.5,every=1",
    "rkv": "budget=1024,window=8,kernel=7,mix=0.07,threshold=0.5,every=128",
    "roco": "budget=1024,exempt=0.3,recent=10,sinks=0,every=1",
    "scissorhands": "budget=1024,window=400,recent=10,drop=0.5",
    "simlayerkv": "budget=1.0,threshold=0.9,sinks=4,recent=1024,last=1",
    "snapkv": "budget=1024,window=32,kernel=7,pool=max,group=mean",
    "streaming_llm": "budget=1024,sinks=4,positions=original,every=1",
    "think": "ratio=0.4,window=32,recent=32",
    "tova": "budget=1024,recent=0,every=1",
    "triattention": "budget=2048,sinks=0,recent=128,every=128,farthest=65536",
    "vase": "budget=1024,window=64,large=0.25,kernel=5,sinks=4,seed=0,every=64",
    "zipcache": "salient=0.6,bits=4,other_bits=2,window=64,queries=64,seed=0",
}


@pytest.mark.parametrize("name", policies.PRESETS)
def test_defaults(name: str) -> None:
    assert plain(policies.PRESETS[name]) == DEFAULTS[name]


def plain(build: Any) -> str:
    each = {option.name: option.default for option in signature(build).parameters.values()}
    texts = ("instruction", "starting", "suffix")  # that are replayed
    each = {name: value for name, value in each.items() if name not in texts}
    return ",".join(f"{name}={value}" for name, value in each.items() if isinstance(value, int | float | str | None))


# Of parts by themselves, likewise.
OF_PARTS = {
    "AccumulatedAttention": "group=mean",
    "AdaptiveShares": "alpha=0.2,normalise=True,formula=paper,groups=1",
    "AttentionClasses": "group=mean,sinks=4,frequent=0.3,local=0.3",
    "Attribution": "sinks=4,chunk=512",
    "BlockByBlock": "block=128",
    "Chunks": "length=20",
    "CompositeShares": "min_tokens=0,first_layer=False,heads=mean",
    "DefendedValues": "first=0.5,epsilon=0.0",
    "DistancePreference": "farthest=65536",
    "DynamicShares": "interval=4,r_max=10.0,code_rounding=False",
    "ExpectedAttention": "sinks=4,future=512,covariance=True,value_norm=True,epsilon=0.0",
    "FittedEntries": "bias=True,ridge=1.0,bound=3.0",
    "GatedChunks": "length=10,few=4",
    "GatedShares": "groups=1",
    "GaussianMerge": "heavy=0.24,theta=0.75,rule=anchor,straddle=False,sigma=mean,weights=gauss,pivot=score,seed=0,"
    "count_bias=False",
    "GlobalShares": "groups=1,min_tokens=0,strict=False",
    "HeadShares": "groups=1",
    "HiddenChange": "window=64,early=0.3125,late=0.65625",
    "ImportanceShares": "beta=1.5,groups=1",
    "LagDifference": "sinks=4,lag=128,cross=False",
    "LearnedTokens": "count=8",
    "LeverageScore": "sketch=48,seed=0",
    "LeveragedAttention": "blend=0.5",
    "LookaheadAttention": "tokens=32,group=mean,pooling=None",
    "LostOutput": "alpha=0.3,kernel=5,reach=2000",
    "NearestValues": "threshold=0.0,fraction=1.0",
    "NoisyAttention": "temperature=1.0,growth=0.01,noise=gumbel,seed=0",
    "NonCausalAttention": "chunk=256,sinks=0,recent=0",
    "ObservedAttention": "group=mean",
    "Pages": "page=32",
    "Pooling": "kind=max,kernel=7",
    "ProjectedValues": "first=0.5,epsilon=0.0001",
    "Protect": "sinks=0,recent=0",
    "Pyramid": "beta=20,formula=paper",
    "Quantized": "bits=8,group=None",
    "QuerySample": "queries=256,seed=0",
    "RandomDraw": "seed=0",
    "Reconstruction": "sinks=4,chunk=2048,normalise=False",
    "RecoveringHeads": "groups=1",
    "Representatives": "anchor=mean,pick=centroid,upper=0.5,by_age=False,granularity=token,page=32,bits=kv",
    "SalientCodes": "salient=0.6,bits=4,other_bits=2,window=64,queries=64,seed=0",
    "SavedExpectedAttention": "sinks=4,future=512,covariance=True,value_norm=True,epsilon=0.0",
    "SimilarityMerge": "weights=paper,alpha=0.5,beta=0.5",
    "SquaredNorms": "kind=product,window=16",
    "TaskAttention": "source=replay,prompts=,rows=max,group=mean,head_mean=True,value_norm=none",
    "ThinKeys": "ratio=0.4,window=32,recent=32",
    "ThresholdShares": "groups=1",
    "ValueCapacity": "tau=5.0,sinks=4,future=512,epsilon=1e-06",
    "ValueMerge": "tokens=32,form=bernoulli,seed=0",
    "VarianceShares": "dense_first=2,dense_last=1",
    "WindowAttention": "pooling=None,normalise=full,sum_logits=False,rescale=False",
}


def test_defaults_of_parts() -> None:
    classes = {**registry.parts(), "Protect": Protect, "LearnedTokens": LearnedTokens}
    assert {name: text for name, part in classes.items() if (text := plain(part))} == OF_PARTS


BASES = {
    "adakv": "snapkv",
    "attention_matching": "snapkv",
    "blockwise": "keydiff",
    "chunkkv": "snapkv",
    "criticalkv": "snapkv",
    "dms": "keydiff",
    "entropy_gated_chunkkv": "snapkv",
    "key_rerotation": "snapkv",
    "kvcrush": "snapkv:budget=2048",
    "lukv": "expected_attention:epsilon=0.02",
    "merging": "snapkv",
    "per_layer": "snapkv",
    "quantize": "full",
    "restorekv": "kvzip:budget=0.3",
    "rising": "h2o",
    "think": "full",
    "zipcache": "full",
}


def test_default_bases() -> None:
    given = {name: signature(build).parameters.values() for name, build in registry.presets().items()}
    found = {name: x.default for name, options in given.items() for x in options if isinstance(x.default, Policy)}
    assert found == {name: policies.parse(text) for name, text in BASES.items()}
