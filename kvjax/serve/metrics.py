"""The engine's counts in Prometheus' form."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvjax.engine import Engine, Histogram


def registry_of(engine: Engine) -> CollectorRegistry:
    """Returns the registry that `/metrics` writes."""
    registry = CollectorRegistry()
    registry.register(_Engine(engine))
    return registry


class _Engine(Collector):
    """Reads an engine's counts when they are asked for."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        stats = self.engine.stats()
        for name, text, value in (
            ("rows", "Rows of the engine.", stats.rows),
            ("rows_busy", "Rows that have a request.", stats.rows_busy),
            ("queue", "Requests that wait for a row.", stats.queue),
            ("cache_bytes", "Size of the resident cache in bytes.", stats.cache_bytes),
            ("prefix_bytes", "Size of the stored prefixes in bytes.", stats.prefixes.nbytes),
        ):
            yield GaugeMetricFamily(f"kvjax_{name}", text, value)
        for name, text, count in (
            ("requests", "Accepted requests.", stats.requests),
            ("prompt_tokens", "Tokens of prompts that were read.", stats.prompt_tokens),
            ("tokens", "Tokens of answers.", stats.tokens),
            ("prefix_hits", "Requests whose prefix was stored.", stats.prefixes.hits),
            ("prefix_misses", "Requests whose prefix was read.", stats.prefixes.misses),
            ("steps", "Decode steps of all rows.", stats.steps),
            ("busy_seconds", "Seconds during which there was work.", stats.busy_seconds),
        ):
            yield CounterMetricFamily(f"kvjax_{name}", text, count)
        finished = CounterMetricFamily("kvjax_finished", "Finished requests by reason.", labels=["reason"])
        for reason, number in stats.finished.items():
            finished.add_metric([reason], number)
        yield finished
        yield _histogram("kvjax_first_token_seconds", "Times from a request to its first token.", stats.first_token)
        yield _histogram("kvjax_between_tokens_seconds", "Times between tokens of a request.", stats.between_tokens)


def _histogram(name: str, text: str, times: Histogram) -> Metric:
    metric, total, buckets = HistogramMetricFamily(name, text), 0, []
    for bound, count in zip((*map(str, times.bounds), "+Inf"), times.counts, strict=True):
        total += count
        buckets.append((bound, total))
    metric.add_metric([], buckets, times.sum)
    return metric
