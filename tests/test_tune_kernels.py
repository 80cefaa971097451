"""The tuner tries every cut, and leaves the best one in the table where it gains something."""

from __future__ import annotations

import json
from types import ModuleType

import jax
import pytest

from tests import scripts


@pytest.fixture
def script(monkeypatch) -> ModuleType:
    module = scripts.script("tune_kernels")
    kept: dict[str, dict[str, list[int]]] = {}
    monkeypatch.setattr(module, "table", lambda: kept)
    return module


@pytest.mark.slow
@pytest.mark.parametrize(("fastest", "chosen"), [(0.5, [16, 32, 4, 2]), (0.99, None)])
def test_the_best_cut_is_kept_if_it_gains(
    script, monkeypatch, capsys, fastest: float, chosen: list[int] | None
) -> None:
    work, case = script.attend(64, 4, 32, small=True)
    kind = jax.devices()[0].device_kind
    found, wrong, refused = script.Blocks(16, 32, 4, 2), script.Blocks(16, 16, 4, 2), script.Blocks(16, 64, 4, 2)

    def current() -> list[int] | None:
        return script.table()[kind].get(work.name)

    def check(case, arrays, expected) -> dict[str, float]:
        if current() == list(refused):
            raise RuntimeError("too much shared memory\nand where")
        return {}

    monkeypatch.setattr(script, "check", check)
    monkeypatch.setattr(script, "seconds", lambda *arguments: fastest if current() == list(found) else 1.0)
    taken = dict(script.measure(work, case, [wrong, refused, found], 1))
    assert taken == {None: 1.0, wrong: 1.0, found: fastest}
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[2]["refused"] == "too much shared memory"
    best = script.choose(work, taken)
    assert best["best"] == found
    script.enter(best, gain=0.03)
    assert current() == chosen


@pytest.mark.slow
def test_a_wrong_result_ends_it(script, monkeypatch) -> None:
    work, case = script.attend(64, 4, 32, small=True)

    def check(case, arrays, expected) -> dict[str, float]:
        raise ValueError("apart")

    monkeypatch.setattr(script, "check", check)
    with pytest.raises(ValueError, match="apart"):
        dict(script.measure(work, case, [], 1))


@pytest.mark.slow
def test_every_small_work_has_cuts_and_a_name_of_its_own(script) -> None:
    works = [work for work, _ in script.works(small=True)]
    assert len({work.name for work in works}) == len(works)
    assert all(list(script.cuts(work, small=True)) for work in works)


def test_the_nearest_cuts_differ_least_from_the_rule(script) -> None:
    rule = script.Blocks(16, 64, 4, 3)
    near, other = script.Blocks(16, 64, 4, 2), script.Blocks(16, 128, 4, 3)
    far = script.Blocks(16, 256, 2, 2)
    assert script.nearest([far, rule, near, other], rule, 2) == [near, other]


def test_work_with_a_best_in_an_earlier_output_is_not_measured_again(script, monkeypatch, tmp_path, capsys) -> None:
    kind, earlier = jax.devices()[0].device_kind, tmp_path / "tuning.jsonl"
    names = [work.name for work, _ in script.works(small=True)]
    best = {"device": kind, "work": names[0], "best": [16, 32, 4, 2], "gained": 0.5}
    others = [best | {"device": "another"}, best | {"work": names[1]}]
    cut_off = json.dumps(others[1])[:-5]
    earlier.write_text("\n".join([json.dumps(best), json.dumps(others[0]), cut_off]))
    asked = []

    def measure(work, case, tried, repeats):
        asked.append(work.name)
        return [(None, 1.0)]

    monkeypatch.setattr(script, "measure", measure)
    monkeypatch.setattr("sys.argv", ["tune_kernels.py", "--small", "--most", "1", "--resume", str(earlier)])
    script.main()
    assert asked == names[1:]
    assert script.table()[kind] == {names[0]: [16, 32, 4, 2]}


def test_without_a_gpu_it_says_so(script, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["tune_kernels.py"])
    with pytest.raises(SystemExit):
        script.main()
    assert "there is no GPU here" in capsys.readouterr().err
