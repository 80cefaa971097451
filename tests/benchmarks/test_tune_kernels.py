"""The tuner tries every cut, and leaves the best one in the table where it gains something."""

from __future__ import annotations

import json

import jax
import pytest

from benchmarks import tune_kernels


@pytest.fixture(autouse=True)
def empty_table(monkeypatch) -> None:
    kept: dict[str, dict[str, list[int]]] = {}
    monkeypatch.setattr(tune_kernels, "table", lambda: kept)


@pytest.mark.slow
@pytest.mark.parametrize(("fastest", "chosen"), [(0.5, [16, 32, 4, 2]), (0.99, None)])
def test_the_best_cut_is_kept_if_it_gains(monkeypatch, capsys, fastest: float, chosen: list[int] | None) -> None:
    work, case = tune_kernels.attend(64, 4, 32, small=True)
    kind = jax.devices()[0].device_kind
    found, wrong, refused = (
        tune_kernels.Blocks(16, 32, 4, 2),
        tune_kernels.Blocks(16, 16, 4, 2),
        tune_kernels.Blocks(16, 64, 4, 2),
    )

    def current() -> list[int] | None:
        return tune_kernels.table()[kind].get(work.name)

    def check(case, arrays, expected) -> dict[str, float]:
        if current() == list(refused):
            raise RuntimeError("too much shared memory\nand where")
        return {}

    monkeypatch.setattr(tune_kernels, "check", check)
    monkeypatch.setattr(tune_kernels, "seconds", lambda *arguments: fastest if current() == list(found) else 1.0)
    taken = dict(tune_kernels.measure(work, case, [wrong, refused, found], 1))
    assert taken == {None: 1.0, wrong: 1.0, found: fastest}
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[2]["refused"] == "too much shared memory"
    best = tune_kernels.choose(work, taken)
    assert best["best"] == found
    tune_kernels.enter(best, gain=0.03)
    assert current() == chosen


@pytest.mark.slow
def test_a_wrong_result_ends_it(monkeypatch) -> None:
    work, case = tune_kernels.attend(64, 4, 32, small=True)

    def check(case, arrays, expected) -> dict[str, float]:
        raise ValueError("apart")

    monkeypatch.setattr(tune_kernels, "check", check)
    with pytest.raises(ValueError, match="apart"):
        dict(tune_kernels.measure(work, case, [], 1))


@pytest.mark.slow
def test_every_small_work_has_cuts_and_a_name_of_its_own() -> None:
    works = [work for work, _ in tune_kernels.works(small=True)]
    assert len({work.name for work in works}) == len(works)
    assert all(list(tune_kernels.cuts(work, small=True)) for work in works)


def test_the_nearest_cuts_differ_least_from_the_rule() -> None:
    rule = tune_kernels.Blocks(16, 64, 4, 3)
    near, other = tune_kernels.Blocks(16, 64, 4, 2), tune_kernels.Blocks(16, 128, 4, 3)
    far = tune_kernels.Blocks(16, 256, 2, 2)
    assert tune_kernels.nearest([far, rule, near, other], rule, 2) == [near, other]


def test_work_with_a_best_in_an_earlier_output_is_not_measured_again(monkeypatch, tmp_path, capsys) -> None:
    kind, earlier = jax.devices()[0].device_kind, tmp_path / "tuning.jsonl"
    names = [work.name for work, _ in tune_kernels.works(small=True)]
    best = {"device": kind, "work": names[0], "best": [16, 32, 4, 2], "gained": 0.5}
    others = [best | {"device": "another"}, best | {"work": names[1]}]
    cut_off = json.dumps(others[1])[:-5]
    earlier.write_text("\n".join([json.dumps(best), json.dumps(others[0]), cut_off]))
    asked = []

    def measure(work, case, tried, repeats):
        asked.append(work.name)
        return [(None, 1.0)]

    monkeypatch.setattr(tune_kernels, "measure", measure)
    monkeypatch.setattr("sys.argv", ["tune_kernels.py", "--small", "--most", "1", "--resume", str(earlier)])
    tune_kernels.main()
    assert asked == names[1:]
    assert tune_kernels.table()[kind] == {names[0]: [16, 32, 4, 2]}


def test_without_a_gpu_it_says_so(monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["tune_kernels.py"])
    with pytest.raises(SystemExit):
        tune_kernels.main()
    assert "there is no GPU here" in capsys.readouterr().err
