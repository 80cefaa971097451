"""The engines' counts in Prometheus' form, under its own names and, where vLLM counts the same, under vLLM's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvjax.engine import Histogram, Stats

from .models import Models

LABEL = "model_name"
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

    @property
    def names(self) -> list[str]:
        """The full names."""
        named = {"kvjax_": self.name, "vllm:": self.vllm}
        return [prefix + name for prefix, name in named.items() if name is not None]


def gauges(stats: Stats) -> list[Named]:
    """Numbers that rise and fall."""
    return [
        Named("rows", None, "Rows of the engine.", stats.rows),
        Named("rows_busy", "num_requests_running", "Rows that have a request.", stats.rows_busy),
        Named("queue", "num_requests_waiting", "Requests that wait for a row.", stats.queue),
        Named(None, "kv_cache_usage_perc", "Share of the rows that have a request.", stats.rows_busy / stats.rows),
        Named("cache_bytes", None, "Size of the resident cache in bytes.", stats.cache_bytes),
        Named("prefix_bytes", None, "Size of the stored prefixes in bytes.", stats.prefixes.nbytes),
        Named("conversation_bytes", None, "Size of conversations on the host in bytes.", stats.conversations.nbytes),
        Named(
            "conversation_device_bytes",
            None,
            "Size of conversations on the devices in bytes.",
            stats.conversations.device_nbytes,
        ),
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


def registry_of(models: Models) -> CollectorRegistry:
    """Returns the registry that `/metrics` writes. Everything has the label `model_name`."""
    registry = CollectorRegistry()
    registry.register(_Counts(models))
    return registry


class _Counts(Collector):
    """Reads the counts of engines when they are asked for."""

    def __init__(self, models: Models) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        stats = {model.id: model.engine.stats() for model in self._models}
        for family, numbers in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for same in zip(*map(numbers, stats.values()), strict=True):  # of all models
                for name in same[0].names:
                    metric = family(name, same[0].text, labels=[LABEL])
                    for model, one in zip(stats, same, strict=True):
                        metric.add_metric([model], one.value)
                    yield metric
        yield from _finished(stats)
        for same in zip(*map(histograms, stats.values()), strict=True):
            name, vllm, text, _ = same[0]
            for full in (f"kvjax_{name}", f"vllm:{vllm}"):
                histogram = HistogramMetricFamily(full, text, labels=[LABEL])
                for model, (*_, times) in zip(stats, same, strict=True):
                    histogram.add_metric([model], _buckets(times), times.sum)
                yield histogram


def _finished(stats: Mapping[str, Stats]) -> Iterator[Metric]:
    """Finished requests by model and reason."""
    text = "Finished requests by reason."
    finished = CounterMetricFamily("kvjax_finished", text, labels=[LABEL, "reason"])
    reasons = CounterMetricFamily("vllm:request_success", text, labels=[LABEL, "finished_reason"])
    for model, one in stats.items():
        sums = dict.fromkeys(REASONS.values(), 0)
        for reason, number in one.finished.items():
            finished.add_metric([model, reason], number)
            sums[REASONS[reason]] += number
        for reason, number in sums.items():
            reasons.add_metric([model, reason], number)
    yield from (finished, reasons)


def _buckets(times: Histogram) -> list[tuple[str, float]]:
    """The number of times up to each bound."""
    bounds = (*map(str, times.bounds), "+Inf")
    return [*zip(bounds, accumulate(times.counts), strict=True)]
