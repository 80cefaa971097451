"""The engine's counts in Prometheus' form, under its own names and, where vLLM counts the same, under vLLM's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvjax.engine import Engine, Histogram, Stats

REASONS = {"end": "stop", "stop": "stop", "length": "length", "cancelled": "abort", "failed": "error"}  # vLLM's


class Named(NamedTuple):
    """A number or a histogram.

    Attributes:
        name: that of kvjax, without its prefix; None if kvjax has it under another.
        vllm: that of vLLM, without its prefix; None if vLLM has none.
        text: what it says.
        value: the number.
    """

    name: str | None
    vllm: str | None
    text: str
    value: float


def gauges(stats: Stats) -> list[Named]:
    """Numbers that rise and fall."""
    return [
        Named("rows", None, "Rows of the engine.", stats.rows),
        Named("rows_busy", "num_requests_running", "Rows that have a request.", stats.rows_busy),
        Named("queue", "num_requests_waiting", "Requests that wait for a row.", stats.queue),
        Named(None, "kv_cache_usage_perc", "Share of the rows that have a request.", stats.rows_busy / stats.rows),
        Named("cache_bytes", None, "Size of the resident cache in bytes.", stats.cache_bytes),
        Named("prefix_bytes", None, "Size of the stored prefixes in bytes.", stats.prefixes.nbytes),
        Named("conversation_bytes", None, "Size of the kept conversations in bytes.", stats.conversations.nbytes),
    ]


def counters(stats: Stats) -> list[Named]:
    """Numbers that rise."""
    prefixes, conversations = stats.prefixes, stats.conversations
    return [
        Named("requests", None, "Accepted requests.", stats.requests),
        Named("prompt_tokens", "prompt_tokens", "Tokens of prompts.", stats.prompt_tokens),
        Named(None, "prefix_cache_queries", "Tokens of prompts.", stats.prompt_tokens),
        Named("cached_tokens", "prefix_cache_hits", "Tokens of prompts that caches had seen.", stats.cached_tokens),
        Named("tokens", "generation_tokens", "Tokens of answers.", stats.tokens),
        Named("prefix_hits", None, "Requests whose prefix was stored.", prefixes.hits),
        Named("prefix_misses", None, "Requests whose prefix was read.", prefixes.misses),
        Named("conversation_hits", None, "Requests that continued a conversation.", conversations.hits),
        Named("conversation_misses", None, "Requests that continued nothing.", conversations.misses),
        Named("steps", None, "Decode steps of all rows.", stats.steps),
        Named("busy_seconds", None, "Seconds during which there was work.", stats.busy_seconds),
    ]


def histograms(stats: Stats) -> list[tuple[str, str, str, Histogram]]:
    """Times: the name of kvjax, that of vLLM, the text, and the histogram."""
    first, between = "time_to_first_token_seconds", "inter_token_latency_seconds"
    return [
        ("first_token_seconds", first, "Times from a request to its first token.", stats.first_token),
        ("between_tokens_seconds", between, "Times between tokens of a request.", stats.between_tokens),
        ("queue_seconds", "request_queue_time_seconds", "Times until a prompt begins to be read.", stats.queued),
        ("request_seconds", "e2e_request_latency_seconds", "Times from a request to its end.", stats.whole),
    ]


def registry_of(engine: Engine, model: str) -> CollectorRegistry:
    """Returns the registry that `/metrics` writes. Names of vLLM have the label `model_name`."""
    registry = CollectorRegistry()
    registry.register(_Engine(engine, model))
    return registry


class _Engine(Collector):
    """Reads an engine's counts when they are asked for."""

    def __init__(self, engine: Engine, model: str) -> None:
        self.engine, self.model = engine, model

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        stats = self.engine.stats()
        for family, found in ((GaugeMetricFamily, gauges(stats)), (CounterMetricFamily, counters(stats))):
            for one in found:
                if one.name is not None:
                    yield family(f"kvjax_{one.name}", one.text, one.value)
                if one.vllm is not None:
                    yield self._labelled(family(f"vllm:{one.vllm}", one.text, labels=["model_name"]), one.value)
        finished = CounterMetricFamily("kvjax_finished", "Finished requests by reason.", labels=["reason"])
        labels = ["model_name", "finished_reason"]
        reasons = CounterMetricFamily("vllm:request_success", "Finished requests by reason.", labels=labels)
        sums = dict.fromkeys(REASONS.values(), 0)
        for reason, number in stats.finished.items():
            finished.add_metric([reason], number)
            sums[REASONS[reason]] += number
        for reason, number in sums.items():
            reasons.add_metric([self.model, reason], number)
        yield from (finished, reasons)
        for name, vllm, text, times in histograms(stats):
            yield _histogram(f"kvjax_{name}", text, times, {})
            yield _histogram(f"vllm:{vllm}", text, times, {"model_name": self.model})

    def _labelled(self, metric: GaugeMetricFamily | CounterMetricFamily, value: float) -> Metric:
        metric.add_metric([self.model], value)
        return metric


def _histogram(name: str, text: str, times: Histogram, labels: dict[str, str]) -> Metric:
    metric, total, buckets = HistogramMetricFamily(name, text, labels=[*labels]), 0, []
    for bound, count in zip((*map(str, times.bounds), "+Inf"), times.counts, strict=True):
        total += count
        buckets.append((bound, total))
    metric.add_metric([*labels.values()], buckets, times.sum)
    return metric
