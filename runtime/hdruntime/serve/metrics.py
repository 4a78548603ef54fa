"""Metrics of a server, for Prometheus."""

from __future__ import annotations

import functools
from collections.abc import Callable

from hdruntime.inference.scheduling import PaddingCount
from hdruntime.optional import require

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TEXTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """Counts of requests, texts, tokens and batches; and of the process, its memory among them.

    `waiting` gives the tokens in the queue, and `padding` the tokens that the session has computed.
    """

    def __init__(self, waiting: Callable[[], int], padding: Callable[[], PaddingCount]) -> None:
        prometheus = require("prometheus_client")
        self._registry = registry = prometheus.CollectorRegistry()
        prometheus.ProcessCollector(registry=registry)
        self._requests = prometheus.Counter("hdexport_requests", "requests", ["route", "status"], registry=registry)
        self._seconds = prometheus.Histogram(
            "hdexport_request_seconds", "from a request to its answer", ["route"], registry=registry, buckets=_SECONDS
        )
        # Labels are looked up once.
        self._requests_of = functools.cache(lambda route, status: self._requests.labels(route, status))
        self._seconds_of = functools.cache(lambda route: self._seconds.labels(route))
        self._batch_texts = prometheus.Histogram(
            "hdexport_batch_texts", "texts of a batch", registry=registry, buckets=_TEXTS
        )
        self._truncated = prometheus.Counter(
            "hdexport_truncated_texts", "texts and pairs that were truncated", ["route", "model"], registry=registry
        )
        self._tokens = prometheus.Counter("hdexport_tokens", "tokens of texts", registry=registry)
        gauge = prometheus.Gauge("hdexport_queue_tokens", "tokens that wait", registry=registry)
        gauge.set_function(waiting)
        padded = prometheus.Gauge("hdexport_padding_ratio", "padding in computed tokens, 0 to 1", registry=registry)
        padded.set_function(lambda: _share(padding()))
        self._text = prometheus.generate_latest
        self.content_type: str = prometheus.CONTENT_TYPE_LATEST

    def request(self, route: str, status: int, seconds: float) -> None:
        """Count a request with its answer's status."""
        self._requests_of(route, status).inc()
        self._seconds_of(route).observe(seconds)

    def batch(self, texts: int, tokens: int) -> None:
        """Count a batch."""
        self._batch_texts.observe(texts)
        self._tokens.inc(tokens)

    def truncated(self, route: str, model: str, texts: int) -> None:
        """Count texts of a request to a model that were truncated."""
        self._truncated.labels(route, model).inc(texts)

    def text(self) -> bytes:
        """All metrics in Prometheus's text format."""
        exposed: bytes = self._text(self._registry)
        return exposed


def _share(count: PaddingCount) -> float:
    return count.padded_tokens / max(1, count.tokens + count.padded_tokens)
