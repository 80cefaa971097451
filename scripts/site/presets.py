"""Reads what the code says of a preset: its docstrings, its options, and the facts that its policy declares."""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from kvjax import policies
from kvjax.evaluation.report import families
from kvjax.policy import LayerShape, Part, Policy, Score
from kvjax.runtime.memory import tree_bytes
from scripts.site import docstrings

ROOT = Path(__file__).resolve().parents[2]
# The sizes of Llama 3.1 8B.
SHAPE = LayerShape(batch=1, heads=32, kv_heads=8, head_dim=128, dtype=jnp.dtype(jnp.bfloat16), hidden=4096, slots=64)


@dataclass(frozen=True)
class Option:
    """An option of a preset: its name in texts, its default and what it means."""

    name: str
    default: str
    meaning: str


@dataclass(frozen=True)
class Preset:
    """A preset by name."""

    name: str

    @property
    def build(self) -> Any:
        return policies.PRESETS[self.name]

    @cached_property
    def policy(self) -> Policy:
        """The policy with its defaults."""
        return self.build()

    @cached_property
    def options(self) -> dict[str, Any]:
        """The defaults of its options."""
        return {option.name: option.default for option in inspect.signature(self.build).parameters.values()}

    @property
    def base(self) -> str:
        """The option that is another policy; empty if there is none."""
        return families.base_of(self.name)

    @property
    def source(self) -> str:
        """The path of its file in the repository."""
        return str(Path(inspect.getfile(inspect.unwrap(self.build))).relative_to(ROOT))

    @cached_property
    def _says(self) -> str:
        return docstrings.text(sys.modules[self.build.__module__])

    @property
    def title(self) -> str:
        """The method's name, its paper, and what it is."""
        return self._says.partition("\n\n")[0]

    @property
    def background(self) -> str:
        """Returns what the method's file says before its differences."""
        return self._body[0].strip()

    @property
    def differences(self) -> str:
        """The differences from the paper and its code."""
        return self._body[1].strip()

    @property
    def _body(self) -> tuple[str, str]:
        body = self._says.partition("\n\n")[2]
        found = re.search(r"^(#+ )?Differences?\b", body, re.MULTILINE)
        return (body[: found.start()], body[found.start() :]) if found else (body, "")

    @property
    def description(self) -> str:
        """Says what it computes."""
        return docstrings.text(self.build)

    @property
    def summary(self) -> str:
        """The first sentence of the description."""
        return docstrings.first_sentence(self.description)

    @property
    def raises(self) -> str:
        """Why its options may be refused."""
        return docstrings.raises(self.build)

    @property
    def papers(self) -> list[str]:
        """Links to its papers; else the conference, or the library that it is known from."""
        found = re.findall(r"arXiv \d{4}\.\d{5}|https?://[^\s,;)]+", self.title)
        return [docstrings.linked(each) for each in found] or re.findall(r"\w+ \d{4}(?=\))|kvpress", self.title)[:1]

    @property
    def kind(self) -> str:
        """One of `KINDS`."""
        return families.kind(self.policy, changes_another=bool(self.base))

    @property
    def evicts(self) -> str:
        """Says when entries leave."""
        if self.base:
            return f"as its `{self.base}`"
        if not self.policy.limited(0):
            return "never"
        prompt = "prompt, after all layers" if self.policy.allocates else "prompt"
        if self.policy.every is None:
            return f"{prompt}; with `every`, decoding" if "every" in self.options else prompt
        at_once = f", {self.policy.every} at once" if self.policy.every > 1 else ""
        return f"{prompt}; decoding{at_once}"

    @property
    def budget(self) -> str:
        """Returns what the class of its budget says."""
        if self.base and type(self.policy.budget) is type(self.options[self.base].budget):
            return f"That of its `{self.base}`."
        return docstrings.first_sentence(docstrings.text(type(self.policy.budget)))

    @cached_property
    def replays(self) -> list[int]:
        """The tokens of each pass after a prompt of `families.PROMPT` tokens."""
        return families.replays(self.policy)

    @property
    def state_of_reading(self) -> str:
        """The bytes beside keys, values and positions while a prompt is read; empty if there are none."""
        return _size([self.policy.score, self.policy.merge, self.policy.storage])

    @property
    def state_of_decoding(self) -> str:
        """The same while decoding."""
        bias = "4 B per slot" if self.policy.merge.effects.bias else ""
        state = _size([self.policy.score, self.policy.merge])
        if self.policy.every is None and state:
            state = f"{state}, with `every`" if "every" in self.options else ""
        return " and ".join(filter(None, (bias, state)))

    @property
    def text(self) -> str:
        """The preset with all its options that have a text, as policies are written on a command line."""
        items: list[str] = []
        for name, value in self.options.items():
            if isinstance(value, Policy):
                base, _, rest = policies.brief(value).partition(":")
                if base in policies.PRESETS:
                    items += [f"{name}={base}", *(f"{name}.{item}" for item in rest.split(",") if item)]
            elif not isinstance(value, Part):
                items.append(f"{name}={value}".replace(", ", ","))
        return f"{self.name}:{','.join(items)}".rstrip(":")

    @property
    def meanings(self) -> list[Option]:
        """Its options, and those of the parts that are options."""
        told = docstrings.arguments(self.build)
        found = [Option(name, _shown(value), told.get(name, "")) for name, value in self.options.items()]
        for name, part in self.options.items():
            if isinstance(part, Part):
                of_part = docstrings.arguments(type(part))
                found += [
                    Option(f"{name}.{key}", _shown(value), of_part[key])
                    for key, value in vars(part).items()
                    if key in of_part
                ]
        return found


def _shown(value: Any) -> str:
    if isinstance(value, Policy):
        return policies.brief(value)
    return f"{type(value).__name__}()" if isinstance(value, Part) else repr(value)


def _size(parts: list[Any]) -> str:
    """The bytes of what parts lay out for a layer."""
    states = [_shapes(part) for part in parts]
    of_slot = sum(tree_bytes(per_slot) for per_slot, _ in states) / SHAPE.kv_heads / SHAPE.slots
    of_head = sum(tree_bytes(per_row) for _, per_row in states) / SHAPE.kv_heads
    sizes = [f"{of_slot:.3g} B per slot"] * (of_slot > 0) + [f"{of_head:,.0f} B per kv head"] * (of_head > 0)
    return " and ".join(sizes)


def _shapes(part: Any) -> tuple[Any, Any]:
    """The shapes of a part's state per slot and per row."""
    state = jax.eval_shape(lambda: part.init(SHAPE))
    return state if isinstance(part, Score) else (None, state)
