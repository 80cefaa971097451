"""The ranges of the numbers that presets and parts accept, up to their ends."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from kvjax import policies
from kvjax.policy import check_integer
from tests import tiny
from tests.policy.compositions import ALLOCATED, BUDGETS, MERGES, SCORES, SELECTS
from tests.policy.test_options import numbers, options_of

COSINES = {"merge.theta", "threshold"}  # -1 is one


NUMBERS = [
    (preset, name, kinds)
    for preset in policies.PRESETS
    for name, _, annotation in options_of(preset)
    if (kinds := numbers(annotation))
]


@pytest.mark.parametrize(("preset", "name"), [case[:2] for case in NUMBERS if case[1] not in COSINES])
def test_a_preset_refuses_numbers_below_their_range(preset, name):
    """By text and, where the option is the preset's own, in Python. The message names what was typed."""
    named = rf"^{preset}: .*\b{name.rpartition('.')[2]}=-1"
    with pytest.raises(ValueError, match=named):
        policies.parse(f"{preset}:{name}=-1")
    if "." not in name:
        with pytest.raises(ValueError, match=named):
            policies.PRESETS[preset](**{name: -1})


# The least integer that an option accepts where that is not 1, by the option's name or by its owner's and its own.
LEAST = {
    **dict.fromkeys(("sinks", "score.sinks", "recent", "seed", "merge.seed", "anchor", "min_tokens"), 0),
    **dict.fromkeys(("first", "dense_first", "dense_last", "dense_layers", "heavy", "merge.heavy"), 0),
    **dict.fromkeys(("dms.window", "Pyramid.window", "zipcache.queries"), 0),
    **dict.fromkeys(("duo_attention.recent", "simlayerkv.recent", "LazyAttention.recent", "Ladder.recent"), 1),
    **dict.fromkeys(("fastgen.sinks", "AttentionClasses.sinks"), 1),
    **dict.fromkeys(("lag", "run", "epikv.window", "HiddenChange.window"), 2),
    **dict.fromkeys(("entropy_gated_chunkkv.length", "GatedChunks.length"), 2),
}
FLOATS = {  # with an integer for those that take one as well
    "[0, 1)": ("first", "recent", "upper", "merge.heavy", "heavy", "exempt", "large", "early", "late"),
    "(0, 1)": ("share", "drop", "ratio", "salient"),
    "(0, 1]": (
        *("budget", "lazyeviction.alpha", "RecurrenceInterval.alpha", "restkv.alpha", "LostOutput.alpha"),
        *("Fraction.share", "fraction", "rising.share", "SeenShare.share"),
    ),
    "[0, 1]": (
        *("alpha", "merge.alpha", "merge.beta", "SimilarityMerge.beta", "simlayerkv.threshold"),
        *("merging.threshold", "NearestValues.threshold"),
        *("LazyLayers.threshold", "sparsity", "recovery", "frequent", "local", "decay", "mix"),
    ),
    "[-1, 1]": ("threshold", "merge.theta", "theta"),
    "[0, inf)": ("tau", "epsilon", "blend", "growth"),
    "(0, inf)": ("merge.ridge", "merge.bound", "temperature", "merge.sigma", "sigma"),
    "[1, inf)": ("r_max", "beta"),
    "(-inf, inf)": ("dms.threshold", "ThresholdShares.threshold"),
}
RANGES = {name: ends for ends, names in FLOATS.items() for name in names}


# Words, heads that do not compete, and infinity as text.
OTHERWISE = "expected 'mean', |with structured=True, |='-?inf' is not a number"


def least_of(owner: str, name: str) -> int:
    """The least integer that an option accepts."""
    return LEAST.get(f"{owner}.{name}", LEAST.get(name, 1))


def ends(owner: str, name: str, kinds: str) -> Iterator[tuple[float, bool]]:
    """Numbers at the ends of an option's range, and whether they belong to it."""
    if "int" in kinds:
        least = least_of(owner, name)
        yield from ((-1, False), (least - 1, False), (least, True), (2**31, False))
        if "float" not in kinds and name != "recent":  # of which `Protect` takes a share
            yield least + 0.5, False
    if "float" in kinds:
        text = RANGES.get(f"{owner}.{name}", RANGES.get(name, ""))
        low, high = map(float, text[1:-1].split(", "))
        yield from ((low - 0.5, False), (low, text[0] == "["), (high, text[-1] == "]"), (high + 0.5, False))


def assert_range(make: Callable[[Any], Any], owner: str, name: str, kinds: str) -> None:
    """What belongs to the range may not fit the owner's other options, which is said in other words.

    What does not belong to it is refused in the words of the range.
    """
    for number, belongs in ends(owner, name, kinds):
        refusal = ""
        try:
            make(number)
        except ValueError as error:
            refusal = str(error)
        if belongs:
            assert f": {name}={number}: expected" not in f": {refusal}"
            continue
        whole = isinstance(number, int) or "float" not in kinds
        accepted = rf"an (odd )?integer (>= {least_of(owner, name)}|< 2\*\*31)" if whole else "an? "
        assert re.search(rf"={re.escape(str(number))}: expected {accepted}|{OTHERWISE}", refusal), refusal


@pytest.mark.parametrize(("preset", "name", "kinds"), NUMBERS)
def test_a_preset_accepts_its_numbers_up_to_the_ends_of_their_ranges(preset, name, kinds):
    assert_range(lambda number: policies.parse(f"{preset}:{name}={number}"), preset, name, kinds)


def test_integers_end_before_2_to_the_31():
    check_integer("n", 2**31 - 1, least=0)
    with pytest.raises(ValueError, match=r"n=2147483648: expected an integer < 2\*\*31"):
        check_integer("n", 2**31, least=0)


PARTS = {type(part).__name__: part for part in (*SCORES, *BUDGETS, *ALLOCATED, *SELECTS, *MERGES)}


NUMBERS_OF_PARTS = [
    (owner, field.name, kinds)
    for owner, part in PARTS.items()
    for field in fields(part)
    if (kinds := numbers(field.type))
]


@pytest.mark.parametrize(("part", "name", "kinds"), NUMBERS_OF_PARTS)
def test_a_part_accepts_its_numbers_up_to_the_ends_of_their_ranges(part, name, kinds):
    """Also what presets would refuse for another part's sake."""
    assert_range(lambda number: replace(PARTS[part], **{name: number}), part, name, kinds)


# Numbers that options accept, and that a program would overflow with if it took them as they are.
SNAPKV = "base=snapkv,base.budget=12,base.window=4,base.kernel=3"
EXTREME = (
    "cur:budget=12,window=2147483647",  # a window of a prompt of 24 tokens
    "think:ratio=0.99999,recent=4,window=4",  # rounded, it leaves no channel
    "snapkv:budget=12,window=4,kernel=2147483647",
    "kvmerger:budget=12,recent=4,merge.heavy=2,merge.sigma=1e-30",  # whose square is 0
    f"attention_matching:{SNAPKV},queries=3,merge.bound=1000",  # e^1000
)


@pytest.mark.long(first=3)
@pytest.mark.parametrize("spec", EXTREME)
def test_numbers_at_the_ends_of_ranges_are_computed_with(spec):
    rows = [np.random.default_rng(n).integers(0, tiny.VOCAB, n) for n in (24, 5)]
    params = tiny.decoder(8)
    logits, cache = tiny.prefill(params, spec, rows, 24)
    after, _ = tiny.step(params, cache, np.zeros(2, int), np.ones(2, bool))
    assert np.isfinite(logits).all()
    assert np.isfinite(after).all()
    assert [len(head) for head in tiny.held(cache, 0)[0]] == [24 if "think" in spec else 12] * 2
