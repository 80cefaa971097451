"""The metrics of the benchmarks. Each function scores a prediction against a reference in [0, 1], as defined there.

Sources: RULER (NVIDIA, Apache-2.0), LongBench and LongWriter (THUDM, MIT and Apache-2.0), SCROLLS and ZeroSCROLLS
(tau-nlp, MIT). The extra `eval` installs the libraries that they use, which are imported on first use.
"""

from __future__ import annotations

import re
import string
import sys
import unicodedata
from collections import Counter
from collections.abc import Hashable, Sequence
from decimal import Decimal
from functools import cache
from importlib import import_module
from itertools import combinations
from typing import Any

from kvjax.checks import installs

CHINESE_PUNCTUATION = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、"  # noqa: RUF001
    "〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."  # noqa: RUF001
)


def printable(prediction: str) -> str:
    """RULER's clean-up: replaces control characters by line ends and strips both ends."""
    return re.sub(r"[\x00-\x1f]", "\n", prediction.strip()).strip()


def contained_all(prediction: str, references: Sequence[str]) -> float:
    """The share of the references that the prediction contains, ignoring case."""
    return sum(reference.lower() in prediction.lower() for reference in references) / len(references)


def contained_any(prediction: str, references: Sequence[str]) -> float:
    """1 if the prediction contains any of the references, ignoring case."""
    return float(any(reference.lower() in prediction.lower() for reference in references))


def normalized(text: str) -> str:
    """SQuAD's normal form: lower case, no punctuation, no English articles, single spaces."""
    bare = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def f1(prediction: Sequence[Hashable], reference: Sequence[Hashable]) -> float:
    """The harmonic mean of the precision and recall of tokens; repeated tokens count each time."""
    common = sum((Counter(prediction) & Counter(reference)).values())
    return 2 * common / (len(prediction) + len(reference)) if common else 0.0


def qa_f1(prediction: str, reference: str) -> float:
    """`f1` of normalized words."""
    return f1(normalized(prediction).split(), normalized(reference).split())


def qa_f1_zh(prediction: str, reference: str) -> float:
    """`f1` of Chinese words as segmented by jieba, without punctuation."""
    return f1(_chinese(prediction), _chinese(reference))


def _chinese(text: str) -> list[str]:
    dropped = set(string.punctuation + CHINESE_PUNCTUATION)
    words = ("".join("".join(c for c in word.lower() if c not in dropped).split()) for word in cut(text))
    return [word for word in words if word]


def cut(text: str) -> list[str]:
    """The Chinese words of a text, segmented by jieba."""
    jieba = _library("jieba")
    jieba.setLogLevel(60)  # jieba reports its start on stderr
    return jieba.lcut(text, cut_all=False)


def rouge_l(prediction: str, reference: str) -> float:
    """ROUGE-L F1 of the library `rouge`; 0 if a text consists of full stops and spaces only.

    The library recurses once per word. LongBench gives 0 to a text that exceeds Python's recursion limit; this
    function raises the limit and scores the text.
    """
    if not all(text.replace(".", " ").strip() for text in (prediction, reference)):
        return 0.0
    scorer = _library("rouge").Rouge(metrics=["rouge-l"])
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(limit + len(prediction) + len(reference))
    try:
        return scorer.get_scores(prediction, reference)[0]["rouge-l"]["f"]
    finally:
        sys.setrecursionlimit(limit)


def rouge_l_zh(prediction: str, reference: str) -> float:
    """`rouge_l` of Chinese words."""
    return rouge_l(" ".join(cut(prediction)), " ".join(cut(reference)))


def classification(prediction: str, reference: str, classes: Sequence[str]) -> float:
    """1 / (the number of classes that the prediction names) if the correct class is among them, else 0."""
    named = [name for name in classes if name in prediction]
    for name in named:  # like LongBench, removes from the list while iterating and therefore skips some names
        if name in reference and name != reference:
            named.remove(name)
    return 1 / len(named) if reference in named else 0.0


def numbers_right(prediction: str, number: str) -> float:
    """The share of the numbers in the prediction that equal `number`."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(number) / len(numbers) if numbers else 0.0


def code_similarity(prediction: str, reference: str) -> float:
    """The edit similarity, rounded to percent, of the first line that is neither a comment nor a code fence."""
    lines = prediction.lstrip("\n").split("\n")
    first = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return round(_library("rapidfuzz.fuzz").ratio(first, reference)) / 100


def rouge(prediction: str, references: Sequence[str]) -> dict[str, float]:
    """SCROLLS' ROUGE-1, -2 and -L: the best F1 over references, by the library `rouge-score` without stemming."""
    found = [_scorer().score(reference, prediction) for reference in references]
    return {name: max(one[name].fmeasure for one in found) for name in ("rouge1", "rouge2", "rougeL")}


@cache
def _scorer() -> Any:
    return _library("rouge_score.rouge_scorer").RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=False)


def unaccented_f1(prediction: str, reference: str) -> float:
    """`qa_f1` of texts without accents, as SCROLLS defines it."""

    def words(text: str) -> list[str]:
        return unicodedata.normalize("NFKD", normalized(text)).encode("ascii", "ignore").decode().split()

    return f1(words(prediction), words(reference))


def letter(text: str) -> str | None:
    """The first A, B, C or D that is a word of its own."""
    found = re.search(r"\b[A-D]\b", text)
    return found.group() if found else None


def percentage_similarity(prediction: str, reference: str) -> float:
    """0.5 ** (d / 10), where d is the difference of the first percentages of both texts; 0 if one has none."""
    said, right = _percentage(prediction), _percentage(reference)
    return 0.0 if said is None or right is None else 0.5 ** (abs(said - right) / 10)


def _percentage(text: str) -> float | None:
    found = re.search(r"(\d+\.?\d*)%", text)
    return float(found.group(1)) if found else None


def concordance(prediction: str, reference: str) -> float:
    """The share of pairs that both orders agree on; 0 if the prediction does not order the same numbers."""
    said, right = (integers(text) for text in (prediction, reference))
    if sorted(said) != sorted(right):
        return 0.0
    place = {number: i for i, number in enumerate(said)}
    pairs = list(combinations(right, 2))
    return sum(place[a] < place[b] for a, b in pairs) / len(pairs)


def integers(text: str) -> list[Decimal]:
    """The integers in a text, separated by spaces and commas, after all other characters are removed.

    They are no `int`, which Python refuses to make of the thousands of digits that a model may repeat.
    """
    return [Decimal(number) for number in re.sub(r"[^0-9\s,]", "", text).replace(",", " ").split()]


def count_words(text: str) -> int:
    """LongWriter's length of a text: the number of Chinese characters and English words."""
    return len(re.findall(r"[\u4e00-\u9fff]", text)) + len(re.findall(r"\b[a-zA-Z]+\b", text))


def length_score(written: int, required: int) -> float:
    """LongWriter's S_l: 1 at the required length, 0 at four times and at one third of that length."""
    if written > required:
        return max(0.0, 1 - (written / required - 1) / 3)
    return max(0.0, 1 - (required / written - 1) / 2) if written else 0.0


def repetition(text: str, n: int = 10) -> float | None:
    """The share of word n-grams that repeat an earlier one; None for a text of fewer than n words.

    MorphKV's Table 5 reports such a rate for n = 10 without a definition; this is the common definition.
    """
    words = text.split()
    grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else None


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        package = name.split(".")[0].replace("_", "-")
        raise ImportError(f"this metric needs {package}: expected {installs('eval')}") from error
