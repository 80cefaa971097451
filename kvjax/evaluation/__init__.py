"""Benchmark tasks, the runs that ask them under cache policies, and the reports of the results."""
