"""Pages of results show whole prompts only of tasks whose texts kvjax writes, or the user."""

from __future__ import annotations

from kvjax.evaluation.tasks import registry


def test_tasks_with_texts_of_others_are_not_shown() -> None:
    shown = {name for name, task in registry.TASKS.own.items() if task.shown}
    ruler = "niah_single_1 niah_multikey_2 niah_multikey_3 vt cwe fwe"
    assert shown == {f"ruler/{name}" for name in ruler.split()} | {
        name for name in registry.TASKS if name.startswith("demo/")
    }
