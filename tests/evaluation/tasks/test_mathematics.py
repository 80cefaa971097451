"""GSM8K, MATH-500 and AIME: prompts, the final answers of many texts, and lines that cannot be asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvjax.evaluation import equality
from kvjax.evaluation.tasks import registry
from kvjax.evaluation.tasks.mathematics import boxed, last_box, numeric
from kvjax.evaluation.tasks.task import Example, Fault, Question, Source

ASK = "\nPlease reason step by step, and put your final answer within \\boxed{}."


def read(name: str, folder: Path, *lines: object) -> list[Example | Fault]:
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "test.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (task,) = registry.find(f"math/{name}")
    return list(task.examples(Source(folder=folder)))


@pytest.fixture
def _judge() -> None:
    pytest.importorskip("math_verify", reason="answers in LaTeX need math-verify (the extra `eval`)")


def test_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's turn of Qwen2.5-Math's `qwen-boxed`; the reference is the final answer alone."""
    monkeypatch.setattr(equality, "check_installed", lambda: None)
    eggs = {"question": "How many eggs?", "answer": "16 + 984 = <<16+984=1000>>1,000\n#### 1,000"}
    matrix = {"problem": "Find $A$.", "solution": "...", "answer": r"\frac{1}{2}", "subject": "Algebra", "level": 2}
    walk = {"id": 60, "problem": "How long?", "answer": " 025", "url": "..."}
    for name, line, answer, meta in (
        ("gsm8k", eggs, "1,000", {}),
        ("math500", matrix | {"unique_id": "test/algebra/1.json"}, r"\frac{1}{2}", {"subject": "Algebra", "level": 2}),
        ("aime24", walk, "025", {}),
    ):
        (one,) = read(name, tmp_path, line)
        assert isinstance(one, Example)
        (question,) = one.questions
        assert one.context + question.text == line.get("question", line.get("problem")) + ASK
        assert (one.id, one.meta, question.answers, question.opening) == ("1", meta, (answer,), "")
    tasks = registry.find("math/*")
    assert [task.name for task in tasks] == ["math/gsm8k", "math/math500", "math/aime24"]
    assert all(task.varied and task.chat and task.new_tokens == 2048 for task in tasks)


def test_lines_that_cannot_be_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equality, "check_installed", lambda: None)
    good = {"question": "q", "answer": "#### -3"}
    found = read("gsm8k", tmp_path, good, {"question": "q", "answer": "three"}, good | {"answer": "#### 1 or 2"},
                 {"answer": "#### 3"}, good | {"question": " "}, [], good)  # fmt: skip
    assert [one.reason for one in found if isinstance(one, Fault)] == [
        "gsm8k/test.jsonl, line 2: field 'answer' ends with 'three'; expected #### and a number",
        "gsm8k/test.jsonl, line 3: field 'answer' ends with '#### 1 or 2'; expected #### and a number",
        "gsm8k/test.jsonl, line 4: field 'question' is missing; expected a string",
        "gsm8k/test.jsonl, line 5: field 'question' is empty; expected a text",
        "gsm8k/test.jsonl, line 6 is empty; expected a JSON object",
    ]
    assert [one.id for one in found if isinstance(one, Example)] == ["1", "7"]
    found = read("math500", tmp_path, {"problem": "p"}, {"problem": "p", "answer": 5})
    assert [one.reason for one in found] == [
        "math500/test.jsonl, line 1: field 'answer' is missing; expected a string",
        "math500/test.jsonl, line 2: field 'answer' is a number; expected a string",
    ]


def test_without_math_verify_nothing_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equality, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"needs math-verify: expected .*eval"):
        read("aime24", tmp_path, {"problem": "p", "answer": "5"})
    assert read("gsm8k", tmp_path, {"question": "q", "answer": "#### 5"})  # needs numbers only


BOXES = {
    r"so $\boxed{5}$.": "5",
    r"\boxed{1} and then \boxed{2}": "2",
    r"\boxed{\frac{1}{\sqrt{2}}}": r"\frac{1}{\sqrt{2}}",
    r"\boxed{ 18. } eggs": "18",
    r"\boxed {7}": "7",
    r"\boxed 7$ and": "7",
    r"\fbox{3}": "3",
    r"\boxed{\boxed{4}}": "4",
    r"\boxed{\{1, 2\}}": r"\{1, 2\}",
    r"\boxed{\left\{x : x > 0\right.}": r"\left\{x : x > 0\right.",
    r"first \boxed{5}, and again \boxed{1": "5",
    r"\boxed{\frac{1}{2": None,
    r"\frac{1{2} } } \boxed{6}": "6",
    r"} \boxed{8": None,
    r"\boxed{}": "",
    "the answer is 5": None,
    "": None,
    "\\boxed{" * 50_000 + "1" + "}" * 40_000: "1",  # in linear time
    "\\boxed{1}" * 20_000 + "\\boxed{": "1",
}


def test_the_last_box() -> None:
    assert {text: last_box(text) for text in BOXES} == BOXES


@pytest.mark.parametrize(
    ("reference", "right", "wrong"),
    [
        ("18", [r"\boxed{18}", r"\boxed{\$18}", "$\\boxed{18.00}$", r"\boxed{18 \text{ dollars}}", r"\boxed{x = 18}",
                r"\boxed{\text{Janet makes } \$18}", r"\boxed{18 \text{ m}^2}", r"\boxed{18 m^{12}}", "#### 18",
                "#### $18.00\nQuestion: 3", "She makes 9 * 2 = $18 every day.", "**18**", r"\(18\)",
                r"5 in all, so \boxed{18}, not 7", r"\boxed{18} then \boxed{2", "18%", "9 * 2=18",
                r"\boxed{no} #### 18", "#### eighteen, 18"],
               [r"\boxed{81}", r"\boxed{-18}", "", "eighteen", "18 or 19", r"18, so \boxed{9}", "#### 9 18", "0.18",
                "180", r"\boxed{18,000}", "1.8e", r"\boxed{18} \boxed{19}"]),
        ("1,450,000", ["1450000", "$1,450,000.00", r"\boxed{1{,}450{,}000}", r"\boxed{1\,450\,000}",
                       r"\boxed{1,\!450,\!000}", "#### 1,450,000 dollars"],
                      ["1,450", "1,450,00", "1 450 000", "1, 450, 000"]),
        ("-10", ["-10", r"\boxed{-\$10}", "= -10 degrees", r"\boxed{-10^\circ}"], ["10", "20-10", "20 - 10", "(3)-10"]),
        ("2", ["2", "2.", "2.000", "$2.", "1,2"], [".2", "1/2 = 0.5", "2 - 1"]),
    ],
)  # fmt: skip
def test_numbers(reference: str, right: list[str], wrong: list[str]) -> None:
    marked = {text: numeric(text, Question("?", (reference,)))["exact_match"] for text in [*right, *wrong]}
    assert marked == dict.fromkeys(right, 1.0) | dict.fromkeys(wrong, 0.0)


@pytest.mark.parametrize(
    ("reference", "right", "wrong"),
    [
        (r"\frac{1}{2}", [r"\dfrac{1}{2}", r"\tfrac12", "1/2", "0.5", ".5", r"\frac{2}{4}", r"50\%", r"x = \frac12"],
                         [r"-\frac{1}{2}", "2", r"\frac{1}{3}", "0.51", ""]),
        (r"\frac14", [r"\frac{1}{4}", "0.25", r"\left(\frac{1}{2}\right)^2"], ["1", "14"]),
        (r"-\sqrt{3}", [r"-\sqrt3", r"- \sqrt{3}", r"-\frac{3}{\sqrt{3}}"], [r"\sqrt{3}", "-1.7"]),
        (r"1\frac{4}{5}", [r"\frac95", "1.8"], [r"\frac{4}{5}"]),
        (r"10,\!080", ["10080", "10,080", "10{,}080"], ["10", "80"]),
        (r"\$18.90", ["18.9", r"\$18.90"], ["1890"]),
        (r"864 \mbox{ inches}^2", ["864", r"864\text{ in}^2"], ["864^2"]),
        (r"90^\circ", ["90", r"90^{\circ}", r"90 \text{ degrees}"], ["9"]),
        ("(3,4]", ["(3, 4]", r"\left(3,4\right]"], ["(3,4)", "[3,4]", "(3,5]"]),
        (r"(-\infty, 2) \cup (3, \infty)", [r"(-\infty,2)\cup(3,\infty)"], [r"(-\infty,2]\cup[3,\infty)", "(2,3)"]),
        (r"x \in [-2,7]", ["[-2,7]", r"x\in\left[-2,7\right]"], ["(-2,7)", "-2, 7"]),
        ("(1,-16,-4,43)", ["(1, -16, -4, 43)"], ["(1,-16,-4)", "(-16,1,-4,43)"]),
        ("1,-2", ["-2, 1", r"1 \text{ and } -2"], ["1", "-1,2"]),
        (r"1 \pm \sqrt{19}", [r"1+\sqrt{19}, 1-\sqrt{19}"], [r"1 + \sqrt{19}"]),
        (r"\text{Evelyn}", ["Evelyn", r"\text{evelyn}", r"\textbf{Evelyn}"], ["Debra", r"\text{Angela}"]),
        (r"\text{(C)}", ["C", "(C)", r"\text{C}"], ["(B)", "D"]),
        ("p - q", ["-q+p", "p-q"], ["q - p", "p+q"]),
        ("y = 2x + 3", ["y=3+2x", "2x+3"], ["y = 2x - 3"]),
        (r"(a+5)(b+2)", ["ab + 2a + 5b + 10", "(b+2)(a+5)"], ["(a+2)(b+5)"]),
        ("6 - 5i", ["-5i + 6"], ["6 + 5i"]),
        (r"\begin{pmatrix} -2 \\ -14 \end{pmatrix}", [r"\begin{bmatrix}-2\\-14\end{bmatrix}"],
                                                     [r"\begin{pmatrix} -2 \\ 14 \end{pmatrix}"]),
        ("025", ["25", "025", r"25\text{ ways}"], ["250", "2.5"]),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("_judge")
def test_boxes(reference: str, right: list[str], wrong: list[str]) -> None:
    question = Question("?", (reference,))
    marked = {box: boxed(f"So $x = \\boxed{{{box}}}$.", question)["exact_match"] for box in [reference, *right, *wrong]}
    assert marked == dict.fromkeys([reference, *right], 1.0) | dict.fromkeys(wrong, 0.0)


def test_answers_that_are_not_marked() -> None:
    """The scores in their order. A number without a box or #### can be right, but no final answer was written."""
    assert list(numeric("18", Question("?", ("18",))).items()) == [("exact_match", 1.0), ("answered", 0.0)]
    assert numeric("#### 18", Question("?", ("18",))) == {"exact_match": 1, "answered": 1}
    assert numeric("x ####", Question("?", ("18",))) == {"exact_match": 0, "answered": 0}
    assert boxed("The answer is 18", Question("?", ("18",))) == {"exact_match": 0, "answered": 0}
    assert boxed(r"\boxed{}", Question("?", ("18",))) == {"exact_match": 0, "answered": 0}
    assert boxed(r"\boxed{18}", Question("?", ("18",))) == {"exact_match": 1, "answered": 1}
    loop = "a b c d e f g h i j " * 2 + r"\boxed{18}"
    assert boxed(loop, Question("?", ("18",))) == {"exact_match": 1, "answered": 1, "repetition": 1 - 11 / 12}


@pytest.mark.parity
def test_numbers_as_in_lm_evaluation_harness() -> None:
    extraction = pytest.importorskip("lm_eval.filters.extraction", reason="needs lm-eval (the extra `lm-eval`)")
    flexible = extraction.RegexFilter(r"(-?[$0-9.,]{2,})|(-?[0-9]+)", group_select=-1)
    texts = ["9 * 2 = $18 a day.", "#### 18", "It takes 2/2=1 bolt. So 2+1=3 bolts", "-10 degrees", "$1,450,000", "no"]
    for text, (found,) in zip(texts, flexible.apply([[text] for text in texts], [{}] * len(texts)), strict=True):
        plain = found.replace(",", "").replace("$", "").rstrip(".")
        for reference in ("18", "3", "-10", "1,450,000", "10"):
            same = plain == reference.replace(",", "")
            assert numeric(text, Question("?", (reference,)))["exact_match"] == same, (text, reference)


@pytest.mark.long
@pytest.mark.parity
@pytest.mark.usefixtures("_judge")
def test_boxes_as_in_lm_evaluation_harness() -> None:
    """Where its normal form (Hendrycks et al.) finds two answers equal, so does math-verify."""
    utils = pytest.importorskip("lm_eval.tasks.aime.utils", reason="needs lm-eval (the extra `lm-eval`)")
    for text in (r"so $\boxed{5}$.", r"\boxed{1} and \boxed{2}", r"\boxed{\frac{1}{\sqrt{2}}}", "5", r"\boxed{\frac{1"):
        theirs = utils.last_boxed_only_string(text)
        assert last_box(text) == (None if theirs is None else utils.remove_boxed(theirs))
    answers = [
        *(r"\frac{1}{2}", r"\dfrac12", "1/2", "0.5", r"\sqrt{3}", r"\sqrt3", r"90^\circ", "90", "x=5", "5", r"5\%"),
        *(r"\$5", r"5\text{ cm}", "(2,3)", r"\left(2, 3\right)", "10,080", r"10,\!080", r"\text{east}", "east"),
    ]
    for one in answers:
        for other in answers:
            if utils.is_equiv(one, other):
                assert equality.equal(one, other), (one, other)
