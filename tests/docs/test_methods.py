"""The page of each preset: what it says follows from the code, and agrees with it."""

from __future__ import annotations

import re

import pytest

from kvjax import policies
from scripts.site import measured, methods
from scripts.site.docstrings import first_sentence, linked
from scripts.site.presets import Preset


@pytest.mark.parametrize("name", policies.PRESETS.own)
def test_a_page_has_the_paper_the_description_and_every_option(name: str) -> None:
    preset, page = Preset(name), methods.page(Preset(name))
    assert page.startswith(f"# {name}\n")
    assert preset.papers or "no paper" in page
    assert f"## What it computes\n\n{preset.description}" in page
    assert preset.summary.removesuffix(".") in " ".join(page.split())
    assert not [option.name for option in preset.meanings if f"| `{option.name}` |" not in page or not option.meaning]
    assert preset.differences in page
    assert preset.evicts in page


@pytest.mark.parametrize("name", policies.PRESETS.own)
def test_the_text_of_a_preset_is_the_preset(name: str) -> None:
    preset = Preset(name)
    assert policies.parse(preset.text) == preset.policy


def test_every_preset_is_in_the_index() -> None:
    text = methods.index(methods.MARKER)
    assert set(re.findall(r"^\| \[`(\w+)`\]\(\1\.md\)", text, re.MULTILINE)) == policies.PRESETS.own.keys()
    with pytest.raises(ValueError, match="expected the line"):
        methods.index("# Methods")


@pytest.mark.parametrize(
    ("name", "fact"),
    [
        ("morphkv", "| evicts | prompt; decoding |"),
        ("morphkv", "| state while it decodes | 36 B per slot and 33,408 B per kv head |"),
        ("snapkv", "| evicts | prompt |"),
        ("h2o", "| state while it decodes | 4 B per slot |"),
        ("kvzip", "| reads the prompt | twice: 8,224 tokens run after a prompt of 8,192 |"),
        ("lookaheadkv", "| reads the prompt | once: 32 tokens run after a prompt of 8,192 |"),
        ("restorekv", "| needs | [gates](index.md#gates) of `restorekv` |"),
        ("kvzap", "| needs | [gates](index.md#gates) of `kvzap` |"),
        ("attention_matching", "| state while it decodes | 4 B per slot |"),
        ("rkv", "| evicts | prompt; decoding, 128 at once |"),
        ("full", "| evicts | never |"),
        ("think", "| budget | That of its `base`. |"),
    ],
)
def test_facts_that_are_known(name: str, fact: str) -> None:
    assert fact in methods.page(Preset(name))


def test_presets_whose_prompt_state_leaves_have_none_while_decoding() -> None:
    assert "state while it decodes" not in methods.page(Preset("snapkv"))


def test_costs_and_results_are_of_presets() -> None:
    assert {cost.preset for cost in measured.costs()} <= policies.PRESETS.own.keys()
    for table in measured.tables():
        assert sum(bool(table.of(name)) for name in policies.PRESETS.own) > 20, table.caption
    assert "of `snapkv`" not in methods.page(Preset("snapkv"))  # rows of other presets over it


def test_the_costs_of_presets_are_in_the_ranges_of_performance() -> None:
    """Of defaults, in the column `prefill` of the table of classes."""
    text = (measured.DOCS / "performance.md").read_text().partition("## What a policy costs")[2]
    prefill = {cost.preset: float(cost.prefill) for cost in reversed(measured.costs())}
    outside, found = [], 0
    for examples, cell in re.findall(r"^\| [^|]+ \| (`[^|]+) \| ([\d., to]+) \| ", text, re.MULTILINE):
        numbers = [float(number) for number in re.findall(r"\d+\.\d+", cell)]
        names = re.findall(r"`(\w+)`", examples)
        found += len(names)
        outside += [name for name in names if not min(numbers) <= prefill[name] <= max(numbers)]
    assert found > 20
    assert outside == []


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("One. Two.", "One."),
        ("Of Xu et al. 2024\nin two lines. More.", "Of Xu et al. 2024 in two lines."),
        ("Chooses by keys: score[h] = 1.", "Chooses by keys."),
        ("Thins out: of each run some stay. More.", "Thins out: of each run some stay."),
        ("No full stop", "No full stop."),
    ],
)
def test_first_sentences(text: str, sentence: str) -> None:
    assert first_sentence(text) == sentence


@pytest.mark.parametrize(
    ("text", "markdown"),
    [
        ("(arXiv 2404.14469)", "([arXiv 2404.14469](https://arxiv.org/abs/2404.14469))"),
        ("(https://openreview.net/forum?id=a), as", "([openreview.net](https://openreview.net/forum?id=a)), as"),
    ],
)
def test_papers_become_links(text: str, markdown: str) -> None:
    assert linked(text) == markdown
