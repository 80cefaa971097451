"""RULER's variable tracking: a chain of assignments in noise, preceded by one worked example."""

from __future__ import annotations

import random
import string
from dataclasses import dataclass
from itertools import pairwise

from ..task import Source
from .needles import NOISE
from .text import Maker, RulerTask, Text, most

CONTEXT = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
QUESTION = "Question: Find all variables that are assigned the value {value} in the text above. "
OPENING = (
    "Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assigned the "
    "value {value}, they are: "
)
EXAMPLE_TOKENS = 500
"""The largest number of tokens of the worked example."""


@dataclass(frozen=True)
class VariableTracking(RulerTask):
    """A text with `chains` chains of `hops` assignments. The question asks for the variables of the first chain."""

    chains: int = 1
    hops: int = 4

    @property
    def smallest(self) -> int:
        return self.hops + 1

    def maker(self, source: Source, length: int) -> Maker:
        def example(units: int) -> Text:
            return self._text(random.Random(f"{source.seed} {self.name} example"), units, letters=3, value="12345")

        def solved(sample: Text) -> str:
            return f"{sample.prompt} {' '.join(sample.answers)}\n"

        units = most(lambda units: source.tokens(example(units).prompt), EXAMPLE_TOKENS, self.smallest)
        sample = example(units or self.smallest)

        def make(i: int, rng: random.Random, units: int) -> Text:
            text = self._text(rng, units, letters=5, value=str(rng.randrange(10000, 99999)))
            worked = solved(sample)
            for name in sample.answers:  # each prompt has its own names and value in the worked example
                worked = worked.replace(name, letters_of(rng, len(name)))
            worked = worked.replace("12345", str(rng.randrange(10000, 99999)))
            return Text(f"{worked}\n{text.context}", text.question, text.opening, text.answers)

        return make

    def _text(self, rng: random.Random, units: int, *, letters: int, value: str) -> Text:
        names: list[str] = []
        while len(names) < self.chains * (self.hops + 1):
            if (name := letters_of(rng, letters)) not in names:
                names.append(name)
        lines = [NOISE] * units
        for chain in range(self.chains):
            links = names[chain * (self.hops + 1) :][: self.hops + 1]
            given = value if chain == 0 else str(rng.randrange(10000, 99999))
            said = [f"VAR {links[0]} = {given}", *(f"VAR {b} = VAR {a} " for a, b in pairwise(links))]
            for j, at in enumerate(sorted(rng.sample(range(len(lines)), len(said)))):
                lines.insert(at + j, said[j])
        context = "\n".join(lines).replace(". \n", ".\n")
        return Text(
            CONTEXT.format(context=context),
            QUESTION.format(value=value),
            OPENING.format(value=value, count=self.hops + 1),
            tuple(names[: self.hops + 1]),
        )


def letters_of(rng: random.Random, count: int) -> str:
    """`count` random capital letters."""
    return "".join(rng.choices(string.ascii_uppercase, k=count))
