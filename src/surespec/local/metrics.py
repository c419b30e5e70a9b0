"""``/metrics`` in Prometheus text form, under vLLM's metric names (so that one scraper serves both)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

LABELS = ("model_name", "engine")
FINISH_REASONS = ("stop", "length", "abort")
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
"""Upper bounds of the latency buckets, in seconds: three a decade."""


class Counters(Protocol):
    """The engine's running totals (tokens, drafts, sequences); ``per_pos[i]`` counts drafts accepted up to i."""

    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def kv_usage(self) -> float: ...
    @property
    def drafts(self) -> int: ...
    @property
    def drafted(self) -> int: ...
    @property
    def accepted(self) -> int: ...
    @property
    def per_pos(self) -> Sequence[int]: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def generation_tokens(self) -> int: ...


class _EngineCollector(Collector):
    """Reads the engine's counters at every scrape, so that nothing is counted twice."""

    def __init__(self, counters: Callable[[], Counters], labels: tuple[str, str], speculating: bool) -> None:
        self._counters, self._labels, self._speculating = counters, labels, speculating

    def collect(self) -> Iterator[Metric]:
        now = self._counters()
        yield self._gauge("vllm:num_requests_running", "Requests in execution.", now.running)
        yield self._gauge("vllm:num_requests_waiting", "Requests waiting for a slot or for KV space.", now.waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "KV cache in use, 1 = full.", now.kv_usage)
        yield self._counter("vllm:prompt_tokens", "Prompt tokens processed.", now.prompt_tokens)
        yield self._counter("vllm:generation_tokens", "Tokens generated.", now.generation_tokens)
        if not self._speculating:
            return
        yield self._counter("vllm:spec_decode_num_drafts", "Drafts verified.", now.drafts)
        yield self._counter("vllm:spec_decode_num_draft_tokens", "Draft tokens verified.", now.drafted)
        yield self._counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted.", now.accepted)
        per_position = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted at each position of a draft.",
            labels=(*LABELS, "position"),
        )
        for position, count in enumerate(now.per_pos):
            per_position.add_metric((*self._labels, str(position)), count)
        yield per_position

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=LABELS)
        family.add_metric(self._labels, value)
        return family


class ServerMetrics:
    """What the server measures about its requests, together with the engine's counters.

    Latencies in seconds, from the moment a choice is handed to the engine. The inter-token latency is the gap between
    two steps of a request; with speculation a step holds several tokens.
    """

    def __init__(self, model_name: str, counters: Callable[[], Counters], *, speculating: bool) -> None:
        self.registry = CollectorRegistry()
        labels = (model_name, "0")
        self.registry.register(_EngineCollector(counters, labels, speculating))

        def histogram(name: str, text: str) -> Histogram:
            family = Histogram(f"vllm:{name}", text, LABELS, buckets=SECONDS, registry=self.registry)
            return family.labels(*labels)

        self._first = histogram("time_to_first_token_seconds", "Time from arrival to the first token.")
        self._gap = histogram("inter_token_latency_seconds", "Gap between two steps of a request.")
        self._per_token = histogram("request_time_per_output_token_seconds", "(E2E - TTFT) / (tokens - 1), a request.")
        self._total = histogram("e2e_request_latency_seconds", "Time from arrival to the last token.")
        self._finished = Counter(
            "vllm:request_success",
            "Requests that ended, by reason.",
            (*LABELS, "finished_reason"),
            registry=self.registry,
        )
        self._by_reason = {reason: self._finished.labels(*labels, reason) for reason in FINISH_REASONS}

    def step(self, since_start_s: float, since_last_s: float | None) -> None:
        """Note one step of a request: ``since_last_s`` is None for its first."""
        if since_last_s is None:
            self._first.observe(since_start_s)
        else:
            self._gap.observe(since_last_s)

    def finished(self, reason: str, tokens: int, first_s: float, total_s: float) -> None:
        """Note the end of a request that gave ``tokens`` tokens, its first after ``first_s``, all after ``total_s``."""
        self._by_reason[reason].inc()
        if reason == "abort":
            return
        self._total.observe(total_s)
        if tokens > 1:
            self._per_token.observe((total_s - first_s) / (tokens - 1))

    def text(self) -> bytes:
        """The page that ``/metrics`` serves."""
        return generate_latest(self.registry)
