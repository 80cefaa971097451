"""Escapes text from data, such as names of policies and tasks, for each form that a report is written in."""

from __future__ import annotations

import html
import re

_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "<": "$<$",
    ">": "$>$",
    "[": "{[}",  # behind the end of a row it would begin a length
} | {c: f"\\{c}" for c in "&%$#_{}"}
_FORMULA = "=+-@"  # spreadsheets run a cell that begins with one of these


def line(text: str) -> str:
    """The text in one line: control characters and line ends become spaces."""
    return "".join(c if c.isprintable() else " " for c in text)


def markdown(text: str) -> str:
    """The text in Markdown, without markup, HTML and the ends of table cells. It shows as it is."""
    escaped = re.sub(r"[\\`*\[\]|~]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", line(text))  # a_b is no markup
    return html.escape(escaped, quote=False)


def latex(text: str) -> str:
    """The text in LaTeX, without commands."""
    return "".join(_LATEX.get(c, c) for c in line(text))


def csv(text: str) -> str:
    """The text in one line, as a cell that spreadsheets do not take for a formula."""
    return formula(line(text))


def formula(text: str) -> str:
    """The text, which begins with an apostrophe if spreadsheets took it for a formula. Numbers keep their signs."""
    return f"'{text}" if text.lstrip().startswith(tuple(_FORMULA)) and number(text) is None else text


def plot(text: str) -> str:
    """The text as matplotlib shows it: without formulas, and never hidden from a legend."""
    escaped = line(text).replace("$", r"\$")
    return f" {escaped}" if escaped.startswith("_") else escaped


def number(text: str) -> float | None:
    """The number that a text stands for; None if it is not one."""
    try:
        return float(text)
    except ValueError:
        return None
