"""ZeroSCROLLS (arXiv 2305.14196): ten tasks whose data files hold the complete prompts (tau-nlp/zero_scrolls, MIT).

Only the validation sets, about twenty examples per task, have public references. The tasks therefore use these sets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from kvjax.evaluation import metrics

from .files import DataFile, Record, examples
from .task import DataError, Example, Fault, Question, Scores, Source, Task

ROUGE = ("rouge1", "rouge2", "rougeL")


def rouge(prediction: str, question: Question) -> Scores:
    """The geometric mean of ROUGE-1, -2 and -L, and each of them."""
    scores = metrics.rouge(prediction, question.answers)
    return {"rouge": prod(scores[name] for name in ROUGE) ** (1 / 3), **scores}


def best(score: Callable[[str, str], float], name: str) -> Callable[[str, Question], Scores]:
    """A metric that returns the best `score` over the references, under `name`."""
    return lambda prediction, question: {name: max(score(prediction, reference) for reference in question.answers)}


def accuracy(prediction: str, reference: str) -> float:
    """1 if the prediction and the reference name the same letter."""
    return float(metrics.letter(prediction) == metrics.letter(reference))


METRICS = {
    "gov_report": rouge,
    "summ_screen_fd": rouge,
    "qmsum": rouge,
    "squality": rouge,
    "qasper": best(metrics.unaccented_f1, "f1"),
    "narrative_qa": best(metrics.unaccented_f1, "f1"),
    "musique": best(metrics.unaccented_f1, "f1"),
    "quality": best(accuracy, "accuracy"),
    "space_digest": best(metrics.percentage_similarity, "exponential_similarity"),
    "book_sum_sort": best(metrics.concordance, "concordance_index"),
}


@dataclass(frozen=True)
class ZeroScrollsTask(Task):
    """A task of ZeroSCROLLS. Rows with the same id form one example with several references, as in the benchmark."""

    def examples(self, source: Source) -> Iterator[Example | Fault]:
        task = self.name.removeprefix("zero_scrolls/")
        file = DataFile(f"zero_scrolls/{task}/validation.jsonl", "tau/zero_scrolls", f"{task}.zip")
        rows: dict[str, list[Example]] = {}
        faults = []
        for line in file.lines(source):
            for one in examples([line], self._example):
                if isinstance(one, Fault):
                    faults.append(one)
                else:
                    rows.setdefault(one.id, []).append(one)
        for same in rows.values():
            (question,) = same[0].questions
            answers = dict.fromkeys(answer for one in same for answer in one.questions[0].answers)
            yield replace(same[0], questions=(replace(question, answers=tuple(answers)),))
        yield from faults

    def _example(self, record: Record) -> Example:
        text, answer = record.text("input"), record.text("output")
        document, query = record.integer("document_end_index"), record.integer("query_end_index")
        if not 0 < document < query <= len(text):
            raise DataError(
                f"{record.where}: fields 'document_end_index' and 'query_end_index' are {document} and {query}; "
                f"expected 0 < document_end_index < query_end_index <= {len(text)}, the length of 'input'"
            )
        if self.name == "zero_scrolls/quality" and metrics.letter(answer) is None:
            raise DataError(f"{record.where}: field 'output' is {answer[:40]!r}; expected one of the letters A to D")
        question = Question(text[document:], (answer,), text[query:])
        omitted = record.text("truncation_seperator", empty=True)  # the data file has this spelling
        return Example(record.text("id"), text[:document], (question,), omitted=omitted)

    @property
    def factors(self) -> tuple[str, ...]:
        return ROUGE if self.metric is rouge else ()

    def overall(self, scores: Sequence[Scores]) -> dict[str, float]:
        """The scores of the task. ROUGE is the geometric mean of the three means, as in the benchmark."""
        means = super().overall(scores)
        return means | {"rouge": prod(means[name] for name in ROUGE) ** (1 / 3)} if "rouge" in means else means


TASKS = tuple(
    ZeroScrollsTask(f"zero_scrolls/{name}", 1024, metric, truncation="end") for name, metric in METRICS.items()
)
