"""Accuracy of every policy on the demo model, at shares of a 1,024-token cache.

    python scripts/demo_results.py --out demo_results.jsonl    # takes long; begins again where it stopped
    python scripts/demo_results.py --out demo_results.jsonl --table > demo_results.md

Each example is a text of 1,024 tokens with one question at its end, of one of the demo's seven tasks; an answer counts
if it is exact. "known": text and question are one prompt, so that a policy sees the question while it compresses.
"unknown": the text is read and compressed first, and the question comes as a later turn. Every policy gets the same
examples.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

LENGTH = 1024
SHARES = (0.5, 0.25, 0.1, 0.05)
NEW_TOKENS = 16
SETTINGS = ("known", "unknown")

# Text forms with {budget}, in entries, or {removed}, the share that is not kept; what is not a default says so.
POLICIES = (
    "streaming_llm:budget={budget}",
    "h2o:budget={budget}",
    "tova:budget={budget}",
    "snapkv:budget={budget}",
    "pyramidkv:budget={budget}",
    "morphkv:budget={budget}",
    "kvmerger:budget={budget},theta=None",
    "kvcrush:base=snapkv,base.budget={budget}",
    "kvcrush:base=h2o,base.budget={budget}",
    "cam:budget={budget}",
    "d2o:budget={budget},layer_budgets=False",
    "keyformer:budget={budget}",
    "scissorhands:budget={budget},window=32",
    "expected_attention:budget={budget}",
    "knorm:budget={budget}",
    "keydiff:budget={budget}",
    "lagkv:budget={budget}",
    "finch:budget={budget}",
    "chunkkv:base=snapkv,base.budget={budget}",
    "criticalkv:base=snapkv,base.budget={budget}",
    "random:budget={budget}",
    "dynamickv:budget={budget}",
    "kvcompose:budget={budget}",
    "kvcompose:budget={budget},structured=False",
    "adakv:base=snapkv,base.budget={budget}",
    "adakv:base=expected_attention,base.budget={budget}",
    "kvzip:budget={budget},instruction='',starting='',suffix=''",
    "duo_attention:sparsity={removed},sinks=8,recent=32",
    "kvcrush:base=dynamickv,base.budget={budget}",
    "adakv:base=morphkv,base.budget={budget}",
    "quantize:policy=kvcompose,policy.budget={budget},bits=4",
    "quantize:policy=snapkv,policy.budget={budget},bits=8",
    "quantize:policy=snapkv,policy.budget={budget},bits=4",
)


def draw(examples: int, seed: int) -> list[tuple[str, Any]]:
    """(task, example), so many of each task."""
    import numpy as np

    from kvjax.evaluation.tasks import demo

    rng = np.random.default_rng(seed)
    return [(name, demo.example(name, LENGTH, rng)) for name in demo.TASKS for _ in range(examples)]


def correct(params: Any, examples: Sequence[Any], policy: Any, setting: str, end_token: int) -> list[bool]:
    """Whether each example is answered exactly."""
    import kvjax
    from kvjax.evaluation.answers import Answers, answer

    if setting == "known":
        return answer(params, examples, policy, end_token=end_token, new_tokens=NEW_TOKENS).correct.tolist()
    cache = kvjax.prefill(params, [e.context for e in examples], policy=policy)
    questions = [e.question for e in examples]
    out = kvjax.generate(params, questions, cache=cache, max_new_tokens=NEW_TOKENS, eos=())
    return Answers.marked(examples, out, end_token).correct.tolist()


def measure(out: Path, policies: Sequence[str], shares: Sequence[float], examples: int, batch: int, seed: int) -> None:
    """Appends a line for each policy, share and setting that `out` does not have yet."""
    from importlib.resources import files

    import kvjax

    params, tokenizer = kvjax.load(str(files("kvjax") / "demo_model"))
    assert tokenizer is not None
    drawn = draw(examples, seed)
    done = {(line["policy"], line["share"], line["setting"]) for line in lines(out)}
    cells = [("full", 1.0, setting) for setting in SETTINGS]
    cells += [(text, share, setting) for share in shares for text in policies for setting in SETTINGS]
    for text, share, setting in cells:
        if (text, share, setting) in done:
            continue
        started = time.perf_counter()
        policy = kvjax.policies.parse(text.format(budget=int(LENGTH * share), removed=round(1 - share, 6)))
        tasks: dict[str, list[bool]] = {}
        for first in range(0, len(drawn), batch):
            part = drawn[first : first + batch]
            marks = correct(params, [e for _, e in part], policy, setting, tokenizer.eos_token_id)
            for (task, _), mark in zip(part, marks, strict=True):
                tasks.setdefault(task, []).append(mark)
        line = {
            "policy": text,
            "share": share,
            "setting": setting,
            "examples": examples,
            "seed": seed,
            "correct": {task: sum(marks) for task, marks in tasks.items()},
            "seconds": round(time.perf_counter() - started, 1),
        }
        with out.open("a") as file:
            print(json.dumps(line), file=file)
        print(json.dumps(line), file=sys.stderr)


def lines(out: Path) -> Iterator[dict[str, Any]]:
    if out.exists():
        yield from map(json.loads, out.read_text().splitlines())


def table(out: Path) -> str:
    """The results as Markdown: a row for each policy, a column for each share, percent over all tasks."""
    found: dict[tuple[str, str], dict[float, dict[str, Any]]] = {}
    for line in lines(out):
        found.setdefault((line["setting"], line["policy"]), {})[line["share"]] = line
    text = ["# The demo model under every policy", "", (__doc__ or "").split("\n\n")[2].replace("\n", " ").strip(), ""]
    first = next(lines(out))
    text += [f"{first['examples']} examples of each task, seed {first['seed']}. Percent of all tasks' answers.", ""]
    for setting in SETTINGS:
        rows = {policy: cells for (s, policy), cells in found.items() if s == setting}
        text += [f"## Question {setting} while compressing", ""]
        text += ["| policy | " + " | ".join(f"{share:.0%}" for share in SHARES) + " |", "|---|" + "---|" * len(SHARES)]
        for policy, cells in rows.items():
            values = [cells.get(1.0 if policy == "full" else share) for share in SHARES]
            text.append(
                f"| `{policy}` | " + " | ".join("" if v is None else f"{percent(v):.0f}" for v in values) + " |"
            )
        text += [""]
        text += ["By task at 10 %:", ""]
        tasks = list(first["correct"])
        text += ["| policy | " + " | ".join(tasks) + " |", "|---|" + "---|" * len(tasks)]
        for policy, cells in rows.items():
            if (cell := cells.get(1.0 if policy == "full" else 0.1)) is not None:
                share = [100 * cell["correct"][task] / cell["examples"] for task in tasks]
                text.append(f"| `{policy}` | " + " | ".join(f"{x:.0f}" for x in share) + " |")
        text += [""]
    return "\n".join(text)


def percent(line: dict[str, Any]) -> float:
    return 100 * sum(line["correct"].values()) / (line["examples"] * len(line["correct"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, one for each cell that was measured")
    parser.add_argument("--policies", nargs="*", default=POLICIES, help="text forms with {budget}")
    parser.add_argument("--shares", nargs="*", type=float, default=SHARES, help="of a full cache")
    parser.add_argument("--examples", type=int, default=100, help="of each task")
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--table", action="store_true", help="print what --out has as Markdown")
    args = parser.parse_args()
    if args.table:
        print(table(args.out))
    else:
        measure(args.out, args.policies, args.shares, args.examples, args.batch, args.seed)


if __name__ == "__main__":
    main()
