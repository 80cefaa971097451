"""Benchmark tasks: prompts with reference answers, and the metrics that mark answers."""
