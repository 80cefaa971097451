"""The page of each preset, and the tables of all presets on docs/methods/index.md, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from kvjax.evaluation.report.families import KINDS, PROMPT
from kvjax.methods.registry import presets
from scripts.site import measured
from scripts.site.docstrings import linked
from scripts.site.presets import SHAPE, Preset

MARKER = "<!-- presets -->"  # where docs/methods/index.md has the tables


def pages() -> dict[str, str]:
    """The pages of all presets of kvjax by path in the folder `docs`."""
    return {f"methods/{name}.md": page(Preset(name)) for name in presets().own}


def page(preset: Preset) -> str:
    """A page of what the code and the measurements say of a preset."""
    no_paper = "" if preset.papers or "no paper" in preset.title else " It has no paper."
    sections = {
        "What it computes": f"{preset.description}\n\n{preset.background}",
        "Options": _options(preset),
        "Facts": _facts(preset),
        "Cost": _cost(preset),
        "Accuracy": _accuracy(preset),
        "Paper and code": preset.differences,
    }
    head = f"# {preset.name}\n\n{linked(preset.title)}{no_paper}\n\nAs text, with all options at their defaults:\n\n"
    parts = [f"## {title}\n\n{section.strip()}\n\n" for title, section in sections.items() if section.strip()]
    return f"{head}``` {{ .text .wrap }}\n{preset.text}\n```\n\n{''.join(parts)}The source is `{preset.source}`.\n"


def index(text: str) -> str:
    """The text of docs/methods/index.md with a table of all presets of each kind."""
    if MARKER not in text:
        raise ValueError(f"docs/methods/index.md: expected the line {MARKER}")
    ordered = sorted(map(Preset, presets().own), key=lambda preset: (KINDS.index(preset.kind), preset.name))
    parts = [f"### {kind}\n\n{_listing(list(some))}" for kind, some in groupby(ordered, lambda preset: preset.kind)]
    return text.replace(MARKER, "\n\n".join(parts))


def _listing(presets: list[Preset]) -> str:
    rows = []
    for preset in presets:
        papers = ", ".join(preset.papers).replace("arXiv ", "")
        of_it = [cost for cost in measured.costs() if cost.preset == preset.name][:1]
        ratios = [(cost.prefill, cost.decode) for cost in of_it] or [("", "")]
        link = f"[`{preset.name}`]({preset.name}.md)"
        rows.append((link, preset.summary, papers, preset.evicts, *ratios[0]))
    return _table(("preset", "what it does", "paper", "evicts", "prefill", "decode"), rows, right=2)


def _options(preset: Preset) -> str:
    rows = [(f"`{option.name}`", f"`{option.default}`", option.meaning) for option in preset.meanings]
    table = _table(("option", "default", "meaning"), rows) if rows else ""
    return f"{table}\n\nRaises {preset.raises}" if preset.raises else table


def _facts(preset: Preset) -> str:
    policy = preset.policy
    needs = policy.score.needs
    replays = "once"
    if behind := sum(preset.replays):
        replays = f"{'twice' if behind >= PROMPT else 'once'}: {behind:,} tokens run after a prompt of {PROMPT:,}"
    asks = "must end the prompt: the last queries decide what is retained" if policy.asks_the_end else ""
    name = needs.gates or (policy.learned.gates if policy.learned else "")
    gates = f"[gates](index.md#gates) of `{name}`" if name else ""
    statistics = f"[statistics](index.md#statistics) `{'`, `'.join(needs.statistics)}`" if needs.statistics else ""
    rows = [
        ("evicts", preset.evicts),
        ("budget", preset.budget),
        ("reads the prompt", replays),
        ("the question", asks),
        ("needs", gates or statistics),
        ("state while it reads", preset.state_of_reading),
        ("state while it decodes", preset.state_of_decoding),
    ]
    group = SHAPE.heads // SHAPE.kv_heads
    note = (
        f"State is what lies beside keys, values and positions: {group} query heads per kv head, D = {SHAPE.head_dim}."
    )
    table = _table(("", ""), [row for row in rows if row[1]])
    return f"{table}\n\n{note}" if preset.state_of_reading else table


def _cost(preset: Preset) -> str:
    rows = [
        (cost.options or "defaults", cost.prefill, cost.decode)
        for cost in measured.costs()
        if cost.preset == preset.name
    ]
    if not rows:
        return ""
    note = "Time relative to full attention, and to a step without a policy: [what was measured](index.md#all-presets)."
    return f"{_table(('options', 'prefill', 'decode'), rows, right=2)}\n\n{note}"


def _accuracy(preset: Preset) -> str:
    found = [(table, rows) for table in measured.tables() if (rows := table.of(preset.name))]
    return "\n\n".join(f"[{table.caption}](../{table.address}):\n\n{rows}" for table, rows in found)


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]], right: int = 0) -> str:
    """A table whose last `right` columns hold numbers."""
    rules = ["---"] * (len(header) - right) + ["---:"] * right
    return "\n".join(f"| {' | '.join(map(_cell, row))} |" for row in (header, tuple(rules), *rows))


def _cell(text: str) -> str:
    """Returns a text in one line, with bars that separate no cells."""
    pieces = " ".join(text.split()).split("`")
    return "`".join(piece if i % 2 else piece.replace("|", "&#124;") for i, piece in enumerate(pieces))
