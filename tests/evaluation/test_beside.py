"""A published ranking: the form of its file, ranks, and its place on the leaderboard."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from scipy import stats

from kvjax.evaluation.report.beside import Published, is_outlier, ranks, read_published, spearman
from tests.evaluation.test_leaderboard import of
from tests.evaluation.test_report import KEYS, NEEDLE, Marks, write

HEAD = "model,policy,question,removed"


def read(tmp_path: Path, *lines: str) -> list[Published]:
    (tmp_path / "peer.csv").write_text("\n".join(lines))
    return read_published(tmp_path / "peer.csv")


def test_a_row_has_a_mean_scores_of_tasks_or_both(tmp_path: Path) -> None:
    tasks = read(tmp_path, f"{HEAD},keys,demo/needle", "8B,snapkv,after,0.75,50,", "", " 8B , h2o ,before, 0.5,40,20")
    assert tasks == [
        Published("8B", "snapkv", "after", 0.75, None, {"keys": 50}),
        Published("8B", "h2o", "before", 0.5, None, {"keys": 40, "demo/needle": 20}),
    ]
    assert [tasks[1].over(names) for names in (["demo/keys"], ["demo/keys", "demo/needle"], ["demo/values"])] == [
        *(40, 30, None)
    ]
    (alone,) = read(tmp_path, f"{HEAD},mean", "8B,snapkv,after,0.75,62.5")
    assert (alone.over(["demo/keys"]), alone.task("demo/keys")) == (62.5, None)
    (both,) = read(tmp_path, f"{HEAD},mean,keys", "8B,snapkv,after,0.75,62.5,50")
    assert (both.over(["demo/keys"]), both.over(["demo/keys", "demo/needle"])) == (50, 62.5)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            (),
            "line 1: the columns are missing: expected the columns model, policy, question, removed, then mean, names",
        ),
        (
            ("policy,model,question,removed,mean",),
            "line 1: the columns policy, model, question, removed, mean: expected",
        ),
        ((HEAD,), "line 1: the columns model, policy, question, removed: expected"),
        ((f"{HEAD},keys,keys",), "two of them alike"),
        ((f"{HEAD},mean",), "has no row: expected one per policy, question and share"),
        ((f"{HEAD},mean", "8B,snapkv,after,0.5"), "line 2: 4 cells: expected 5, one per column"),
        ((f"{HEAD},mean", ",snapkv,after,0.5,1"), "line 2: an empty model or policy"),
        ((f"{HEAD},mean", "8B,snapkv,never,0.5,1"), "line 2: question='never': expected one of after, before"),
        ((f"{HEAD},mean", "8B,snapkv,after,75,1"), "line 2: removed='75': expected a share from 0 to below 1"),
        ((f"{HEAD},mean", "8B,snapkv,after,1,1"), "removed='1': expected a share from 0 to below 1"),
        ((f"{HEAD},mean", "8B,snapkv,after,0.5,nan"), "mean='nan': expected a number from 0 to 100, in percent"),
        ((f"{HEAD},keys", "8B,snapkv,after,0.5,101"), "keys='101': expected a number from 0 to 100, in percent"),
        ((f"{HEAD},mean,keys", "8B,snapkv,after,0.5,,"), "line 2: no score: expected a mean, or the score of a task"),
        ((f"{HEAD},mean", 'a,b,after,0.5,"1'), "line 2: unexpected end of data"),
        ((f"{HEAD},mean", *["8B,snapkv,after,0.5,1"] * 2), "has ('8B', 'snapkv', 'after', 0.5) twice"),
    ],
)
def test_another_form_is_one_error(lines: tuple[str, ...], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(str(tmp_path / 'peer.csv'))}.*{re.escape(message)}"):
        read(tmp_path, *lines)


def test_ranks_and_their_correlation_are_those_of_scipy() -> None:
    rng = random.Random(0)
    for size in (3, 5, 20):
        one, other = ([float(rng.randint(0, 9)) for _ in range(size)] for _ in range(2))
        assert ranks(one) == list(size + 1 - stats.rankdata(one))
        assert spearman(one, other) == pytest.approx(stats.spearmanr(one, other).statistic)
    assert spearman([1, 2], [2, 1]) is spearman([1, 1, 1], [1, 2, 3]) is None
    assert [is_outlier(*pair) for pair in ((3, 9), (-3, 9), (3, 10), (2, 3))] == [True, True, False, False]


def test_both_rankings_are_compared_share_by_share(tmp_path: Path) -> None:
    names = ("a", "b", "c", "d")
    marks: Marks = {("full", None): {KEYS: [[1]], NEEDLE: [[1]]}}
    for share in (0.5, 0.25):
        marks |= {(name, share): {KEYS: [[0.1 * (i + 1)]], NEEDLE: [[0]]} for i, name in enumerate(names)}
    rows = read(
        tmp_path,
        f"{HEAD},needle,keys",
        *(f"8B,{name},after,0.5,{score},{score}" for name, score in zip("abcd", (90, 30, 20, 10), strict=True)),
        *(f"8B,{name},after,0.75,{score},50" for name, score in zip("dcbz", (90, 80, "", 60), strict=True)),
        "8B,full,after,0,99,98",
        "8B,a,before,0.5,1,1",
    )
    found = of([write(tmp_path / "run", marks)], *rows)
    groups = {group["removed"]: group for group in found["published"]["groups"]}
    assert set(groups) == {0, 50, 75}
    assert {(group["published"], group["question"]) for group in groups.values()} == {("8B", "after")}
    half = groups[50]
    assert half["spearman"] == -1
    named = {found["policies"][found["cells"][row["cell"]]["policy"]]["name"]: row for row in half["rows"]}
    assert [named[name]["ranks"] for name in names] == [[4, 1], [3, 2], [2, 3], [1, 4]]
    assert [named[name]["outlier"] for name in names] == [True, False, False, True]
    assert (named["a"]["mean"], named["a"]["tasks"]) == (90, [90, 90])
    assert [row["mean"] for row in groups[75]["rows"]] == [
        65,
        70,
    ]  # of c and d; b has no score of a task, z is not ours
    assert groups[75]["spearman"] is None
    assert [row["mean"] for row in groups[0]["rows"]] == [98.5]
    assert found["published"]["missing"] == ["z"]


def test_without_a_file_nothing_is_beside(tmp_path: Path) -> None:
    assert of([write(tmp_path / "run")])["published"] is None
