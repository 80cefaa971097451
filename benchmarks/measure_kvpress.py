"""Asks kvpress the questions of a run of `kvjax eval`, in the same tokens, and compares its answers with kvjax's.

    kvjax eval --config configs/leaderboard/peer.yaml --model MODEL --data DATA --out RUN
    PEER/bin/python -m benchmarks.measure_kvpress RUN --model FOLDER --data DATA

FOLDER is a checkpoint folder that transformers loads; `kvjax convert` makes one of a GGUF file. PEER is an environment
with kvpress and kvjax. The answers are in RUN/kvpress.jsonl, and a run that was stopped goes on. The output is a table:
the accuracy of both on the questions that both have answered, and how many answers have the same text.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from kvpress import AdaKVPress, ExpectedAttentionPress, KeyDiffPress, KVzipPress, SnapKVPress
from kvpress.pipeline import KVPressTextGenerationPipeline

from benchmarks.measured_lines import MeasuredLines
from kvjax.evaluation.grid import Grid
from kvjax.evaluation.items import Item
from kvjax.evaluation.lines import read_answer, read_lines
from kvjax.evaluation.model import plan_run

REMOVED = 0.75
PRESSES: dict[str, Callable[[], Any]] = {  # by the names of configs/leaderboard/peer.yaml
    "full": lambda: None,
    "SnapKV": lambda: SnapKVPress(REMOVED),
    "AdaKV on SnapKV": lambda: AdaKVPress(SnapKVPress(REMOVED)),
    "ExpectedAttention": lambda: ExpectedAttentionPress(REMOVED),
    "KeyDiff": lambda: KeyDiffPress(REMOVED),
    "KVzip": lambda: KVzipPress(REMOVED),
}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("run", type=Path)
    arguments.add_argument("--model", required=True, help="the checkpoint folder")
    arguments.add_argument("--data", required=True)
    given = arguments.parse_args()
    ours = [line for line in read_lines(given.run / "results.jsonl", read_answer) if "error" not in line]
    asked = {(line["policy"], line["task"], line["id"]): line for line in ours if line["policy"] in PRESSES}
    answers = MeasuredLines(given.run / "kvpress.jsonl", {"removed": REMOVED}, ("policy", "task", "id"))
    header = json.loads((given.run / "run.json").read_bytes())["grid"]
    kept = {name: header[name] for name in ("tasks", "policies", "chat", "seed", "limit")}
    tasks = [{name: task[name] for name in ("name", "lengths", "limit")} for task in kept.pop("tasks")]
    grid = Grid.of(kept | {"tasks": tasks, "model": given.model, "data": given.data})
    ask = None
    for item in plan_run(grid).items:
        for name, press in PRESSES.items():
            key = name, item.task.name, item.example.id
            if key in asked and key not in answers:
                tokens, expected = item.context.size + item.questions[0].size, asked[key]["prompt_tokens"]
                if tokens != expected:
                    raise ValueError(f"{key}: {tokens} tokens instead of {expected}: expected the run's model and data")
                ask = ask or asker(given.model)
                started = time.perf_counter()
                text = ask(item, press())
                line: dict[str, Any] = dict(zip(("policy", "task", "id"), key, strict=True), prediction=text)
                line["scores"] = dict(item.task.metric(text, item.example.questions[0]))
                answers.append([line | {"seconds": round(time.perf_counter() - started, 1)}])
    print(table([(asked[line["policy"], line["task"], line["id"]], line) for line in answers]))


def asker(model: str) -> Callable[[Item, Any], str]:
    """Loads the model in float32. Returns a function that answers an item's first question under a press."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    pipe = KVPressTextGenerationPipeline(model=loaded, tokenizer=tokenizer, device="cpu")

    def ask(item: Item, press: Any) -> str:
        ids = {"context_ids": torch.tensor(item.context[None]).long()}
        ids["questions_ids"] = [torch.tensor(item.questions[0][None]).long()]
        with torch.inference_mode():
            return pipe._forward(ids, max_new_tokens=item.new_tokens, press=press)[0]

    return ask


def table(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> str:
    """The accuracy of both by policy and task, and the share of equal answers, as Markdown."""
    rows = ["| policy | task | prompts | kvjax | kvpress | equal answers |", "|---|---|---:|---:|---:|---:|"]
    for name in PRESSES:
        for task in dict.fromkeys(ours["task"] for ours, _ in pairs):
            both = [(a, b) for a, b in pairs if (a["policy"], a["task"]) == (name, task)]
            if both:
                score = [100 * np.mean([next(iter(one[i]["scores"].values())) for one in both]) for i in (0, 1)]
                equal = sum(a["prediction"] == b["prediction"] for a, b in both)
                rows.append(f"| {name} | {task} | {len(both)} | {score[0]:.0f} | {score[1]:.0f} | {equal} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
