"""Explains the scores of some methods on the model that ships: compares each method with one part exchanged.

    python -m benchmarks.demo_checks > demo_checks.jsonl

The script asks 25 texts of 1,024 tokens per task. It prints JSON lines with the share of correct answers. The checks:

    question    methods that protect no recent tokens, and the same methods with the last 32 tokens protected, on
                prompts that end with the question; tasks with facts
    norm        `knorm`, and its opposite, which retains the largest keys; tasks with facts
    merge       `d2o`, and the same policy without merging; tasks with labels and votes
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from jaxtyping import Array

from kvjax.cache import Slots
from kvjax.decoding.sampling import Greedy
from kvjax.evaluation.asking import Asker
from kvjax.evaluation.batches import batches, readings
from kvjax.evaluation.grid import Grid
from kvjax.evaluation.items import Item, read_items
from kvjax.evaluation.model import load_model
from kvjax.parts import Drop, KeyNorm
from kvjax.policies import parse
from kvjax.policy import Moment, Policy

FACTS, COUNTS = ("needles", "keys", "variables"), ("labels", "frequent")
CHECKS = {"question": FACTS, "norm": FACTS, "merge": COUNTS}
RECENT = 32  # more tokens than any question has
BATCH = 25

Question = Literal["after", "before"]


@dataclass(frozen=True)
class LargeKeyNorm(KeyNorm):
    """The Euclidean norm of the key."""

    def __call__(self, entries: Slots, moment: Moment) -> Array:
        return -super().__call__(entries, moment)


def sides(check: str) -> Iterator[tuple[str, Policy, Question]]:
    """The name, the policy and the setting of each side of a check."""
    if check == "question":
        for text in (
            "kvcompose:budget=0.1",
            # The model does not follow instructions.
            "kvzip:budget=0.1,score.instruction='',score.starting='',score.suffix=''",
            "expected_attention:budget=0.1",
            "keydiff:budget=0.1",
            "random:budget=0.1",
            "tova:budget=0.1",
        ):
            policy = parse(text)
            yield text, policy, "before"
            yield f"{text}, {RECENT} recent", replace(policy, protect=replace(policy.protect, recent=RECENT)), "before"
    elif check == "norm":
        for budget in (0.5, 0.25):
            policy = parse(f"knorm:budget={budget}")
            yield f"knorm at {budget}", policy, "after"
            yield f"knorm at {budget}, the largest", replace(policy, score=LargeKeyNorm()), "after"
    else:
        for budget in (0.1, 0.05):
            policy = parse(f"d2o:budget={budget},layer_budgets=False")
            yield f"d2o at {budget}", policy, "before"
            yield f"d2o at {budget}, nothing merged", replace(policy, merge=Drop()), "before"


def answered(ask: Asker, items: Sequence[Item], policy: Policy, question: Question) -> float:
    """The share of questions with a correct answer."""
    scores: list[float] = []
    for batch in batches(readings(items, question, policy.score.needs.whole_prompt), lambda reading: BATCH):
        ((_, answers, _),) = ask(batch, [policy])
        for reading, mine in zip(batch.readings, answers, strict=True):
            for one, answer in zip(reading.asks, mine, strict=True):
                asked = one.item.example.questions[one.index]
                (score,) = one.item.task.metric(answer.text, asked).values()
                scores.append(score)
    return sum(scores) / len(scores)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", nargs="+", choices=CHECKS, default=list(CHECKS))
    parser.add_argument("--limit", type=int, default=25, help="texts per task")
    arguments = parser.parse_args()
    for check in arguments.check:
        tasks = [{"name": f"demo/{name}", "lengths": [1024]} for name in CHECKS[check]]
        about: dict[str, Any] = {"tasks": tasks, "limit": arguments.limit, "policies": "full"}
        grid = Grid.of(about)
        params, tokenizer = load_model(grid)
        items = [item for item in read_items(grid, tokenizer, params.config.max_positions) if isinstance(item, Item)]
        ask = Asker(params, tokenizer, Greedy())
        for name, policy, question in sides(check):
            share = answered(ask, items, policy, question)
            print(json.dumps({"check": check, "policy": name, "question": question, "right": share}), flush=True)


if __name__ == "__main__":
    main()
