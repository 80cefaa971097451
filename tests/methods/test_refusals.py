"""Options of methods that are refused, and what the error says. A row is an option as text."""

import pytest

from kvjax.policies import parse

SIGNED = (
    *("blockwise", "dms", "gkv", "keydiff", "keydiff_codes", "knorm", "kvzap", "qfilter", "rkv", "scissorhands"),
    *("simlayerkv", "triattention", "vase"),
)
BUDGETS = (
    *("adakv", "d2o", "defensivekv", "dms", "duo_attention", "dynamickv", "fastgen", "headkv", "kvcompose"),
    *("lukv", "per_layer", "pyramidkv", "simlayerkv", "morphkv,base.dense_layers=2", "kvzip,base.level=layer"),
    *("kvzip,base.strict=True", "kvzip,base.groups=2", "kvcompose,base.structured=False,base.min_tokens=1"),
)
ORDINAL = "duo_attention", "fastgen", "full", "lacache", "lagkv", "random", "streaming_llm"
REFUSED = {
    "adakv": [
        ("normalise=True,formula=kvpress", "normalise=True with formula='kvpress'.*normalise=False"),
        ("base=adakv", "a budget of AdaptiveShares\\(.* under which each head has a number of its own"),
        ("base=kvzip", "a budget of GlobalShares.* each head has a number of its own"),
        ("base=kvcompose,base.structured=False", "a budget of GlobalShares.* each head has a number of its own"),
        ("base=duo_attention", "a budget of GatedShares.* each head has a number of its own"),
        ("base=d2o", "a budget of VarianceShares.* has layers that retain everything"),
        ("base=morphkv,base.dense_layers=1", "DenseLayers.*expected one that limits every layer"),
        ("base=knorm", "the scores of KeyNorm may be negative: expected normalise=False"),
        ("base=keydiff", "the scores of KeyDifference may be negative"),
        ("base=scissorhands", "the scores of Neglect may be negative"),
        ("base=full", "Everything.*expected one that limits every layer"),
        ("base=tova", "^adakv: LastAttention: it has all heads .*AdaptiveShares"),
        *(
            (f"base={base}", "of the scores of .* only the order means something: expected normalise=False")
            for base in ("lacache", "lagkv", "random", "streaming_llm")
        ),
    ],
    "attention_matching": [
        ("base=kvmerger", "^attention_matching: its base already merges entries, by GaussianMerge"),
        ("base=expected_attention", "its base ExpectedAttention observes queries before RoPE"),
        ("base=finch,base.positions=in_cache", "^attention_matching: it asks cached keys .* positions='in_cache'"),
    ],
    "cam": [
        ("every=None", "every=None: expected an integer >= 1, since values are merged while decoding evicts"),
    ],
    "chunkkv": [
        ("base=chunkkv", "its base selects by Chunks; choose a base that retains the highest scores one by one"),
        ("base=cam", "its base selects by Newest; choose a base"),
    ],
    "corm": [
        ("budget=256", "a budget of 256 entries: expected "),
    ],
    "criticalkv": [
        ("base=criticalkv", "^criticalkv: its base ProjectedValues already multiplies scores by value norms; choose"),
        ("base=expected_attention", "^criticalkv: its base ExpectedAttention already multiplies.*value_norm=False"),
        ("base=kvcompose,base.score.value_norm=v", "^criticalkv: its base TaskAttention already multiplies"),
        *(
            (f"base={base}", "^criticalkv: its base .* may be negative, .* choose a base whose scores")
            for base in SIGNED
        ),
        *((f"base={base}", "^criticalkv: its base .* only the order means something") for base in ORDINAL),
        ("base=compactor", "^criticalkv: its base LeveragedAttention"),
        ("base=blockwise,base.base=h2o", "^criticalkv: its base BlockByBlock .* as in blockwise:base=criticalkv"),
        ("base=tova", "^criticalkv: its base LastAttention has all heads .* choose a base whose heads differ"),
        ("base=chunkkv", "^criticalkv: it scores .* the selection Chunks compares means of scores"),
    ],
    "d2o": [
        ("budget=8", "a budget of 8 entries: expected "),
    ],
    "dms": [
        ("budget=128", "a budget of 128 entries: expected 129 or more"),
        *((f"base={base}", "^dms: it replaces its base's budget, and .* choose a base whose") for base in BUDGETS),
        ("base=tova", "LastAttention: it has all heads of a layer retain the same tokens"),
        *(
            (f"base={base}", rf"^dms: it compares single entries with a threshold, and the selection {name} does not")
            for base, name in (
                ("chunkkv", "Chunks"),
                ("kvcrush", "Representatives"),
                ("finch,base.chunk=6", "EvenChunks"),
            )
        ),
    ],
    "dynamickv": [
        ("budget=8", "a budget of 8 entries: expected 9 or more, which is window=8"),
    ],
    "expected_attention_stats": [
        ("budget=6,every=3", r"expected 7 or more, which is sinks=4 \+ every=3"),
    ],
    "fastgen": [
        ("budget=4", "a budget of 4 entries: expected "),
    ],
    "gkv": [
        ("budget=128", "a budget of 128 entries: expected "),
    ],
    "key_rerotation": [
        ("base=morphkv", "FoldedWindow keeps rotated queries, .* with every=1 .* positions='in_cache'"),
        ("base=adakv", "AdaptiveShares stores heads in segments .* positions='in_cache'"),
        ("base=expected_attention", "ExpectedAttention: it compares keys, .* positions='in_cache'"),
    ],
    "kvcrush": [
        ("anchor=0.5", "anchor=0.5: expected 'mean', 'alternate' or an integer in 0 .. 2147483647"),
        ("base=snapkv,base.budget=40,share=0.02", "share=0.02 of a budget of 40 entries is less than one token"),
        ("base=kvcrush", "^kvcrush: its base selects representatives already; choose another"),
        ("granularity=page,page=0", "page=0"),
        ("granularity=chunk,page=65537", "page=65537: expected at most 65536"),
        ("granularity=page,share=0.0,page=65537", "page=65537: expected at most 65536"),
        ("granularity=page,pick=kmeans", "pick='kmeans': expected another one with granularity='page'"),
        ("base=snapkv,base.budget=100,granularity=page", "less than one page: expected a share of 32 entries or more"),
        ("base=cam,granularity=chunk", "^kvcrush: chunks and pages .* the base's selection Newest does not"),
        ("base=cam,granularity=page,share=0.0", "^kvcrush: chunks and pages .* selection Newest does not"),
        ("base=expected_attention,bits=query", "^kvcrush: its base ExpectedAttention observes queries before RoPE"),
        ("base=streaming_llm,base.positions=in_cache,bits=query", "^kvcrush: it .* positions='in_cache'"),
    ],
    "kvmerger": [
        ("merge.theta=True", "is not a number"),
        ("merge.rule=ring", "rule='ring': expected 'anchor' or 'chain'"),
        ("recent=0.6,merge.heavy=0.5", "leave nothing to merge into"),
        ("budget=8,recent=4,merge.heavy=4", "heavy=4, sinks=0, recent=4 and every=None leave nothing to merge"),
        ("budget=8,recent=3,merge.heavy=3,every=2", "recent=3 and every=2 leave nothing to merge into"),
        ("budget=0.5,every=0", "every=0: expected an integer >= 1"),
    ],
    "lookaheadkv": [
        ("kernel=4", "kernel=4: expected an odd integer >= 1"),
        ("budget=32", "a budget of 32 entries: expected 33 or more, which is recent=32 \\+ 1"),
    ],
    "restorekv": [
        ("base=h2o", "^restorekv: its entries stay, and with every=1 decoding would evict them: expected every=None"),
        ("base=finch,base.positions=in_cache", "cannot be combined with positions='in_cache'"),
        ("base=full", "expected one that limits every layer"),
        ("base=duo_attention", "expected one that limits every layer and head"),
    ],
    "kvzap": [
        ("level='head',groups=2", "groups=2 with level='head'"),
        ("budget=64", r"expected 129 or more, which is recent=128 \+ 1"),
    ],
    "epikv": [
        ("budget=128", r"a budget of 128 entries: expected 129 or more, which is recent=128 \+ every=1"),
    ],
    "lacache": [
        ("run=2,keep=2", "keep=2 with run=2: expected fewer than a run has"),
        ("run=9,keep=1,recent=3", "recent=3: expected an integer >= 7"),
        ("every=2", "^lacache: it says which entry leaves next; with every=2 .*cannot be combined"),
        ("budget=36", "a budget of 36 entries: expected "),
    ],
    "lazyeviction": [
        ("budget=300", "a budget of 300 entries: expected 350 or more"),
    ],
    "lukv": [
        *((f"base={base}", "^lukv: it replaces its base's budget, and .* choose a base whose") for base in BUDGETS),
    ],
    "per_layer": [
        ("shares=(1.0,0)", r"shares=\(1.0, 0\): expected a tuple of numbers above 0 and at most 1000, one for"),
        ("shares=()", "expected a tuple of numbers above 0"),
        ("shares=(True,)", "expected a tuple of numbers above 0"),
        *((f"shares=({x},)", "expected a tuple of numbers above 0") for x in ("1e999", "1e300")),
        (
            "base=snapkv,base.budget=9000000,shares=(1000,)",
            "the largest layer's budget=9000000000: expected an integer",
        ),
        ("shares=0.5", "shares=0.5: expected a tuple of numbers above 0"),
        ("shares=many", r"shares='many' is not a tuple \(the default is"),
        ("shares=(1.0,0.5", r"shares='\(1.0,0.5' is not a tuple"),
        ("base=pyramidkv", "Pyramid.*: expected one that is the same for all layers"),
        ("base=full", "Everything.*: expected one that limits every layer"),
        ("base=snapkv,base.budget=64,shares=(1.5,0.5)", "^per_layer: a budget of 32 entries: expected 33 or more"),
    ],
    "pyramidkv": [
        ("budget=8,window=8", "budget of 8 .*9 or more"),
    ],
    "quantize": [
        ("policy=full,bits=16", "bits=16: expected 8 or 4"),
        ("bits=True", "bits=True is not a number"),
        ("policy=quantize,policy.bits=4", "^quantize: its policy already stores"),
        ("policy=kvcrush,policy.base=quantize", "^quantize: its policy already stores"),
    ],
    "rkv": [
        ("kernel=4", "kernel=4: expected an odd integer"),
        ("budget=128", "a budget of 128 entries: expected "),
    ],
    "roco": [
        ("budget=10", "a budget of 10 entries: expected "),
    ],
    "scissorhands": [
        ("budget=16,recent=10", "a budget of 16 entries: expected "),
    ],
    "simlayerkv": [
        ("budget=1000", "a budget of 1000 entries: expected "),
    ],
    "triattention": [
        ("budget=200", r"expected 256 or more, which is recent=128 \+ every=128"),
    ],
    "vase": [
        ("kernel=2", "kernel=2: expected an odd integer"),
        ("budget=100", "a budget of 100 entries: expected "),
    ],
    "zipcache": [
        ("bits=2", "bits=2: expected 8 or 4"),
        ("other_bits=8", "other_bits=8: expected 4 or 2"),
        ("other_bits=4", "other_bits=4 with bits=4: expected fewer bits than these"),
    ],
}
CASES = [(f"{name}:{options}", says) for name, rows in REFUSED.items() for options, says in rows]


@pytest.mark.parametrize(("text", "says"), CASES)
def test_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse(text)
