"""Evaluation: tasks under policies, the answers of a run, and reports of them. `run` does it from Python."""

from .api import run
from .report.rows import rows

__all__ = ["rows", "run"]
