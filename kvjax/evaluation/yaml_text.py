"""Reads YAML. Nesting and aliases are limited, so that a small file cannot take all memory or time.

YAML lets the last one of several equal names win. Here they are an error, so that no line of a file is ignored."""

from __future__ import annotations

import reprlib
from typing import Any

import yaml

DEPTH = 20  # of nested lists and mappings
ALIASES = 20  # uses of `*name`, which each stand for everything that `&name` marks


class _Loader(yaml.SafeLoader):
    def __init__(self, text: str):
        super().__init__(text)
        self._depth = self._aliases = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        mark = self.peek_event().start_mark
        self._aliases += self.check_event(yaml.AliasEvent)
        self._depth += 1
        if self._depth > DEPTH or self._aliases > ALIASES:
            limit = f"{DEPTH} nested levels" if self._depth > DEPTH else f"{ALIASES} aliases"
            raise yaml.composer.ComposerError(None, None, f"expected at most {limit}", mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        names: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in names:
                    raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} occurs twice", key.start_mark)
                names.add((key.tag, key.value))
        return super().construct_mapping(node, deep)


def brief(value: Any) -> str:
    """The repr of a value, shortened: aliases can make it endless."""
    return reprlib.repr(value)


def read_yaml(text: str) -> Any:
    """The values of a YAML text. Raises yaml.YAMLError."""
    return yaml.load(text, _Loader)
