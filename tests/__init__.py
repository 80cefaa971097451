"""Tests mirror the tree. What they share is imported as `tests.tiny` and `tests.dense`."""
