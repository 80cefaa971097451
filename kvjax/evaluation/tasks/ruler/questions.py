"""RULER's question answering: questions of SQuAD or HotpotQA whose documents are among other documents."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from ..files import Record, parse, read
from ..task import DataError, Source
from .text import Maker, RulerTask, Text

ASK = "Answer the question based on the given documents. Only give me the answer and do not output any other words."
CONTEXT = f"{ASK}\n\nThe following are given documents.\n\n{{context}}\n\n"
QUESTION = f"{ASK}\n\nQuestion: {{query}} "
OPENING = "Answer:"


@dataclass(frozen=True)
class LibraryQuestion:
    """A question, its references, and the indices of the documents that it needs and of related documents."""

    query: str
    answers: tuple[str, ...]
    needed: tuple[int, ...]
    near: tuple[int, ...] = ()


@dataclass(frozen=True)
class Library:
    """All documents and the questions about them."""

    documents: tuple[str, ...]
    questions: tuple[LibraryQuestion, ...]


@dataclass(frozen=True)
class DocumentQuestions(RulerTask):
    """A task whose example i is question i of `squad.json` (dev-v2.0) or `hotpotqa.json` (dev_distractor_v1)."""

    data: Literal["squad", "hotpotqa"] = "squad"

    @property
    def smallest(self) -> int:
        return 1 if self.data == "squad" else 10

    def available(self, source: Source) -> int:
        return len(self._library(source).questions)

    def _library(self, source: Source) -> Library:
        name = f"{self.data}.json"
        if source.folder is None:
            raise DataError(f"{self.name} needs {name}: expected a folder that holds it (--data)")
        return _library(source.folder / name, self.data)

    def maker(self, source: Source, length: int) -> Maker:
        library = self._library(source)
        documents = range(len(library.documents))

        def make(i: int, rng: random.Random, units: int) -> Text:
            asked = library.questions[i]
            missing = max(units - len(asked.needed), 0)
            if units >= len(documents):
                chosen = (list(documents) * (-(-units // len(documents))))[:units]
            elif missing <= len(asked.near):
                chosen = [*asked.needed, *rng.sample(asked.near, missing)]
            else:
                taken = {*asked.needed, *asked.near}
                others = [d for d in documents if d not in taken]
                chosen = [*asked.needed, *asked.near, *rng.sample(others, min(missing - len(asked.near), len(others)))]
            rng.shuffle(chosen)
            context = "\n\n".join(f"Document {n}:\n{library.documents[d]}" for n, d in enumerate(chosen, 1))
            return Text(CONTEXT.format(context=context), QUESTION.format(query=asked.query), OPENING, asked.answers)

        return make


@cache
def _library(path: Path, data: str) -> Library:
    value = parse(path.name, read(path))
    library = _squad(Record.of(path.name, value)) if data == "squad" else _hotpotqa(path.name, value)
    if not library.questions:
        raise DataError(f"{path.name} has no question: expected at least one")
    return library


def _numbered(documents: list[str]) -> dict[str, int]:
    return {document: n for n, document in enumerate(sorted(set(documents)))}


def _squad(file: Record) -> Library:
    articles = [[(p, p.text("context")) for p in article.records("paragraphs")] for article in file.records("data")]
    number = _numbered([context for article in articles for _, context in article])
    questions = []
    for article in articles:
        of_article = dict.fromkeys(number[context] for _, context in article)
        for paragraph, context in article:
            here = number[context]
            for asked in paragraph.records("qas"):
                if asked.fields.get("is_impossible", False):
                    continue
                answers = tuple(dict.fromkeys(answer.text("text") for answer in asked.records("answers")))
                if not answers:
                    raise DataError(f"{asked.where}: field 'answers' is empty")
                near = tuple(n for n in of_article if n != here)
                questions.append(LibraryQuestion(asked.text("question"), answers, (here,), near))
    return Library(tuple(number), tuple(questions))


def _hotpotqa(name: str, value: object) -> Library:
    if not isinstance(value, list):
        raise DataError(f"{name} is not a list; expected a list of questions")
    rows = []
    for i, one in enumerate(value):
        row = Record.of(f"{name}, [{i}]", one)
        documents = []
        for item in row.items("context"):
            match item:
                case [str(title), [*paragraph]] if all(isinstance(sentence, str) for sentence in paragraph):
                    documents.append(f"{title}\n{''.join(paragraph)}")
                case _:
                    raise DataError(
                        f"{row.where}: field 'context' has another form; expected a list of [title, [sentence, ...]]"
                    )
        rows.append((row.text("question"), row.text("answer"), documents))
    number = _numbered([document for _, _, documents in rows for document in documents])
    questions = [
        LibraryQuestion(q, (a,), tuple(dict.fromkeys(number[d] for d in documents))) for q, a, documents in rows
    ]
    return Library(tuple(number), tuple(questions))
