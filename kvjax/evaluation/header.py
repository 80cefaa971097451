"""`run.json`, the grid of a run and the facts of its model, and `prompts.json`, the tokens of some of its prompts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvjax.checks import is_number, shown
from kvjax.evaluation.entries import PolicyLine
from kvjax.evaluation.lines import Key, Line, content
from kvjax.evaluation.planning import RunPlan, cell_fields, name_of
from kvjax.evaluation.records import RESULTS
from kvjax.files.home import from_home, without_home
from kvjax.files.writing import write_file
from kvjax.policies import parse
from kvjax.policy import Policy

PROMPTS = "prompts.json"
ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # of a function in the repr of a policy
ASKING = ("seed", "sampler", "new_tokens", "max_length", "chat", "ends", "judge")  # what answers to a task depend on
FIXED = ("model", "dtype", "data", *ASKING)  # the fields of a grid that must be equal for all lines of a file


def check_results(out: Path) -> None:
    """Raises ValueError if the results file is not of a run: opening it would drop its lines as incomplete ones."""
    path = out / RESULTS
    if path.exists() and path.stat().st_size and not (out / "run.json").exists():
        raise ValueError(f"{out} holds {path.name} without run.json: expected a folder of kvjax eval, or another one")


def write_header(plan: RunPlan, out: Path, asked: Mapping[Key, Line]) -> None:
    """Writes the grid and the model to `run.json`. The caller holds the results file open.

    Args:
        asked: what the results file records of the questions that have answers, by `ASKED`.

    Raises:
        ValueError: if the file is of a run with other answers, or of other questions.
    """
    there = read_header(out) if (out / "run.json").exists() else None
    if there is not None:
        _check_fixed(plan, out, there)
        _check_questions(plan, out, asked)
    write_file(out / "run.json", _header(plan, {} if there is None else there.get("tasks", {})))
    write_file(out / PROMPTS, json.dumps(read_prompts(out) | _prompts(plan), ensure_ascii=False))


def _prompts(plan: RunPlan) -> dict[str, list[Any]]:
    """The pieces of the first example of each task and length, by what identifies it."""
    return {
        prompt_key(item.task.name, item.length, item.example.id): [list(piece) for piece in item.pieces]
        for item in plan.items
        if item.pieces
    }


def prompt_key(task: str, length: int | None, name: str) -> str:
    """The name of a prompt in `prompts.json`."""
    return json.dumps([task, length, name], ensure_ascii=False)


def read_prompts(folder: Path) -> dict[str, list[list[str]]]:
    """The texts of the tokens of context and questions, by `prompt_key`; empty for a run without them.

    Raises ValueError, which names the file, if it is damaged.
    """
    path = next((path for path in (folder / PROMPTS, folder / f"{PROMPTS}.gz") if path.exists()), None)
    if path is None:
        return {}
    given = content(path)
    try:
        found = json.loads(given)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: it is no JSON ({error})") from None
    if not isinstance(found, dict) or not all(map(_is_pieces, found.values())):
        raise ValueError(f"{path} is damaged: expected an object of lists of lists of texts")
    return found


def _is_pieces(given: Any) -> bool:
    lists = isinstance(given, list) and all(isinstance(each, list) for each in given)
    return lists and all(isinstance(text, str) for each in given for text in each)


def _header(plan: RunPlan, earlier: Mapping[str, Any]) -> str:
    config = plan.config
    model = {
        "layers": config.num_layers,
        "kv_heads": config.num_kv_heads,
        "bytes_per_token": config.bytes_per_token(plan.dtype),
        "dtype": str(plan.dtype),
    }
    header = {"grid": plan.grid.document(), "model": model, "tasks": {**earlier, **plan.fixed_tasks()}}
    return json.dumps(header, indent=2, ensure_ascii=False) + "\n"


def _check_fixed(plan: RunPlan, out: Path, there: Mapping[str, Any]) -> None:
    """Raises ValueError if the answers of the run that is there cannot be in one file with the plan's."""
    grid = plan.grid.document()
    for name in FIXED:
        asked, earlier = grid[name], there["grid"].get(name)
        # The home folder of a published run is not that of whoever goes on with it.
        if asked != earlier and not (isinstance(asked, str) and from_home(asked) == earlier):
            raise ValueError(
                f"{name}={shown(asked)}, but {out} holds results with {name}={shown(earlier)}: "
                "expected the same value or another folder"
            )
    for task, facts in plan.fixed_tasks().items():
        earlier = there.get("tasks", {}).get(task, facts)
        if earlier.get("sha256") != facts.get("sha256"):
            raise ValueError(
                f"{out} holds answers to other questions of the task {shown(task)}, with the SHA-256 "
                f"{earlier.get('sha256')} and not {facts.get('sha256')}: expected the same questions or another folder"
            )
        for name in sorted(facts.keys() - {"file"}):
            if earlier.get(name) != facts[name]:
                raise ValueError(
                    f"{name}={shown(facts[name])} of the task {shown(task)}, but {out} holds answers with "
                    f"{name}={shown(earlier.get(name))}: expected the same value or another folder"
                )


def check_policies(plan: RunPlan, texts: Mapping[Key, str], out: Path) -> None:
    """Raises ValueError if a policy of the plan has the name of another one that has answers, or reads other gates.

    Args:
        texts: the texts of the policies that have answers, by label, budget and setting.
    """
    if not texts:
        return
    earlier = read_header(out)["grid"].get("gates") or []
    same_gates = without_home(plan.grid.gates) == without_home(earlier)
    for cell in plan.grid.cells():
        text = texts.get(tuple(cell_fields(cell).values()))
        if text is None:
            continue
        policy = cell.build()
        if not describes(text, cell.policy, policy):
            raise ValueError(
                f"the policy {name_of(cell)} is {shown(cell.policy)}, but {out} holds answers of {shown(text)} under "
                "this name: expected the same policy, another name or another folder"
            )
        if not same_gates and reads_gates(policy):
            raise ValueError(
                f"gates={shown(list(plan.grid.gates))}, but {out} holds answers of {name_of(cell)} with "
                f"gates={shown(earlier)}: expected the same value or another folder"
            )


def _check_questions(plan: RunPlan, out: Path, asked: Mapping[Key, Line]) -> None:
    """Raises ValueError if a question of the plan differs from the one that has answers in its place."""
    for item in plan.items:
        for index in range(len(item.questions)):
            earlier = asked.get((item.task.name, item.length, item.example.id, index), {})
            mine = item.asked(index)
            if name := next((name for name in earlier if earlier[name] != mine[name]), None):
                raise ValueError(
                    f"{out} holds answers to another question {index} of {shown(item.example.id)} of the task "
                    f"{shown(item.task.name)}, with {name}={shown(earlier[name])} and not {shown(mine[name])}: "
                    "expected the same data, or another folder"
                )


def reads_gates(policy: Policy) -> bool:
    """Returns whether a policy reads gates or statistics."""
    needs = policy.score.needs
    return bool(needs.gates or needs.statistics or policy.learned)


def describes(text: str, mine: str, policy: Policy | None) -> bool:
    """Returns whether a text is that of a policy, but for what differs from process to process, or describes it."""
    if ADDRESS.sub("", without_home(text)) == ADDRESS.sub("", without_home(mine)):
        return True
    return policy is not None and described(text) == policy


def described(text: str) -> Policy | None:
    """The policy that a text describes; None for that of an object, or of a preset or a file that is not here."""
    try:
        return parse(text)
    except (ValueError, OSError):
        return None


def read_header(folder: Path) -> dict[str, Any]:
    """Reads `run.json`. Raises ValueError, which names the file, if it is absent or damaged."""
    path = folder / "run.json"
    if not path.exists():
        raise ValueError(f"{folder} has no run.json: expected a folder that kvjax eval wrote")
    try:
        header = json.loads(path.read_bytes())
        problem = _problem(header)
    except (ValueError, RecursionError) as error:
        problem = f"it is no JSON ({error})"
    if problem is not None:
        raise ValueError(f"{path} is damaged: {problem}")
    return header


def labels(header: Mapping[str, Any]) -> list[str]:
    """The names of the grid's policies."""
    return [PolicyLine(**policy).label for policy in header["grid"]["policies"]]


def _problem(header: Any) -> str | None:
    """Says what is wrong with the fields that reports read."""
    grid, model = (header.get(name) if isinstance(header, dict) else None for name in ("grid", "model"))
    if not isinstance(grid, dict) or not isinstance(model, dict):
        return "expected an object with the objects grid and model"
    if not all(isinstance(grid.get(name), str) for name in ("model", "title")):
        return "expected the texts model and title in grid"
    policies = grid.get("policies")
    if not isinstance(policies, list) or not all(isinstance(p, dict) and _is_policy(p) for p in policies):
        return "expected policies in grid, a list of objects with a policy each"
    if not is_number(model.get("bytes_per_token")) or model["bytes_per_token"] < 1:
        return "expected bytes_per_token in model, a number >= 1"
    tasks = header.get("tasks", {})
    if not isinstance(tasks, dict) or not all(isinstance(facts, dict) for facts in tasks.values()):
        return "expected tasks, an object of objects"
    return None


def _is_policy(given: Mapping[str, Any]) -> bool:
    known = set(given) <= set(PolicyLine.__dataclass_fields__)
    return known and isinstance(given.get("policy"), str) and isinstance(given.get("name", ""), str | None)
