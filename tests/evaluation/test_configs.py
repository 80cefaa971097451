"""The grids of configs/: each names existing tasks and policies and runs on stand-in data."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from kvjax.decoding.sampling import Greedy
from kvjax.evaluation.asking import Asker
from kvjax.evaluation.grid import Grid
from kvjax.evaluation.items import Item, read_items
from kvjax.evaluation.planning import RunPlan
from kvjax.evaluation.report.results import read_results
from kvjax.evaluation.report.tables import scores
from kvjax.evaluation.tasks import registry
from kvjax.evaluation.tasks.vocabulary import WORDS, tokenizer
from kvjax.policies import parse
from tests.evaluation.tasks.test_long_answers import city
from tests.evaluation.tasks.test_longbench import NAMES
from tests.evaluation.tasks.test_longbench import row as longbench_row
from tests.evaluation.tasks.test_zero_scrolls import row as scrolls_row
from tests.evaluation.test_runner import plan, right, run
from tests.products import part
from tests.tiny import decoder

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
ALL = sorted(CONFIGS.rglob("*.yaml"))
PAPERS = ("morphkv", "kvmerger", "dynamickv", "kvcrush", "kvcompose")


@pytest.fixture(scope="module")
def stand_ins(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with about two rows of every file that the grids' tasks read."""
    folder = tmp_path_factory.mktemp("stand_ins")
    shutil.copytree(data, folder, dirs_exist_ok=True)

    def write(name: str, *rows: object) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            "".join(f"{json.dumps(row)}\n" for row in rows) if path.suffix == ".jsonl" else json.dumps(rows)
        )

    for name in NAMES.split():
        write(f"longbench/{name}.jsonl", *(longbench_row(name, _id=f"{i}") for i in range(2)))
    for task in registry.find("zero_scrolls/*"):
        name = task.name.split("/")[1]
        output = "1, 2, 3" if name == "book_sum_sort" else "an answer"
        write(
            f"zero_scrolls/{name}/validation.jsonl", *(scrolls_row(output, id=f"{i}", pid=f"{i}_0") for i in range(2))
        )
    write("longgenbench/Dataset_short.json", city(), city("Week"))
    write("longwriter/longbench_write_en.jsonl", {"prompt": "Write a letter.", "type": "Letter", "length": 100})
    write("gsm8k/test.jsonl", {"question": "How much is 9 * 2?", "answer": "9 * 2 = 18\n#### 18"})
    for name in ("math500", "aime24"):
        write(f"{name}/test.jsonl", {"problem": "What is $9 \\cdot 2$?", "answer": "18"})
    return folder


def small(path: Path, data: Path) -> Grid:
    """The grid on the demo model, with one example per task, short prompts and short answers."""
    grid = Grid.read(path)
    tasks = tuple(replace(line, lengths=(1024,) if line.lengths else ()) for line in grid.tasks)
    grid = replace(
        grid, model="demo", dtype=None, data=str(data), tasks=tasks, new_tokens=4, chat=False, memory_gb=None
    )
    return replace(grid, max_length=None).limited(1)


@pytest.mark.long(first=1)
@pytest.mark.slow(first=20)
@pytest.mark.parametrize("path", ALL, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_each_runs_on_stand_ins(path: Path, stand_ins: Path, tmp_path: Path) -> None:
    for library in ("wonderwords", "rouge", "jieba", "rapidfuzz", "math_verify"):
        pytest.importorskip(library, reason="these tasks need the extra `eval`")
    written = Grid.read(path)
    assert written.title
    for cell in written.cells():
        parse(cell.policy)
    grid = small(path, stand_ins)
    ready = replace(plan(grid), config=decoder(windows=(None,) * 4).config)  # the demo model's layers and kv heads
    assert ready.refusals == ()
    asked = {name for line in grid.tasks for task in registry.find(line.name) for name in [task.name]}
    assert {item.task.name for item in ready.items} == asked
    summary = run(ready, right, tmp_path / "run")
    assert summary.errors == ()
    assert summary.answers == summary.planned > 0
    (results,) = read_results([tmp_path / "run"])
    for question in results.settings:
        assert {row[0] for table in scores(results, question) for row in table.rows} == {p.label for p in grid.policies}


def test_all_of_the_papers_tables_are_there() -> None:
    found = {paper: " ".join(p.stem for p in ALL if p.parent.name == paper) for paper in PAPERS}
    numbers = {paper: set(re.findall(r"(?:table|figure)\d+", names)) for paper, names in found.items()}
    assert numbers["morphkv"] >= {f"table{n}" for n in (1, 2, 3, 4, 5, 6, 7, 8, 10, 11)}
    assert numbers["kvmerger"] >= {"table1", "table3", "table4", "table5", "table6"}
    assert numbers["dynamickv"] >= {"table1", "table2", "table5", "table7", "table8", "table9"}
    assert numbers["kvcrush"] >= {"table3", "figure4", "figure5"}
    assert numbers["kvcompose"] >= {"table2", "figure2", "figure3", "figure4", "table4"}


@pytest.mark.slow
@pytest.mark.parametrize("paper", part(PAPERS, ["dynamickv"]))
def test_a_model_runs_them(paper: str, stand_ins: Path, tmp_path: Path) -> None:
    """Runs every kind of policy in a paper's grids once, at one budget, on one example of the first task.

    The model has random weights. Two policies are of one kind if they differ in numbers only, given or not.
    """
    seen: set[str] = set()
    params = decoder(windows=(None, None), vocab=len(WORDS))

    def kind(text: str) -> str:
        return re.sub(r"[\w.]+=(\d[^,]*|{\w+}),?", "", text).rstrip(":,")

    for path in (path for path in ALL if path.parent.name == paper):
        grid = small(path, stand_ins)
        first = registry.find(grid.tasks[0].name)[0].name
        policies = tuple({kind(line.policy): line for line in grid.policies if kind(line.policy) not in seen}.values())
        seen |= {kind(line.policy) for line in policies}
        if not policies:
            continue
        policies = tuple(replace(line, budgets=(line.budgets or grid.budgets)[-1:]) for line in policies)
        task = replace(grid.tasks[0], name=first)
        grid = replace(grid, tasks=(task,), policies=policies, question=grid.question[:1])
        items = [item for item in read_items(grid, tokenizer(), 2560) if isinstance(item, Item)]
        ready = RunPlan(grid, tuple(items), (), params.config, params.embed.dtype)
        summary = run(ready, Asker(params, tokenizer(), Greedy(), ends=grid.ends), tmp_path / path.stem)
        assert summary.errors == ()
        assert summary.answers == summary.planned > 0
