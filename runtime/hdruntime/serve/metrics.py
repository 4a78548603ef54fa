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

    The label ``model`` is the name of the model; it is empty for requests that choose none.
    """

    def __init__(self) -> None:
        prometheus = require("prometheus_client")
        self._registry = registry = prometheus.CollectorRegistry()
        prometheus.ProcessCollector(registry=registry)
        self._requests = prometheus.Counter(
            "hdexport_requests", "requests", ["model", "route", "status"], registry=registry
        )
        self._seconds = prometheus.Histogram(
            "hdexport_request_seconds",
            "from a request to its answer",
            ["model", "route"],
            registry=registry,
            buckets=_SECONDS,
        )
        # Labels are looked up once.
        self._requests_of = functools.cache(lambda *labels: self._requests.labels(*labels))
        self._seconds_of = functools.cache(lambda *labels: self._seconds.labels(*labels))
        self._batch_texts = prometheus.Histogram(
            "hdexport_batch_texts", "texts of a batch", ["model"], registry=registry, buckets=_TEXTS
        )
        self._truncated = prometheus.Counter(
            "hdexport_truncated_texts", "texts and pairs that were truncated", ["model", "route"], registry=registry
        )
        self._tokens = prometheus.Counter("hdexport_tokens", "tokens of texts", ["model"], registry=registry)
        self._waiting = prometheus.Gauge("hdexport_queue_tokens", "tokens that wait", ["model"], registry=registry)
        self._padding = prometheus.Gauge(
            "hdexport_padding_ratio", "padding in computed tokens, 0 to 1", ["model"], registry=registry
        )
        self._text = prometheus.generate_latest
        self.content_type: str = prometheus.CONTENT_TYPE_LATEST

    def watch(self, model: str, *, waiting: Callable[[], int], padding: Callable[[], PaddingCount]) -> None:
        """Show the tokens in a model's queue, and the share of padding in the tokens that were computed."""
        self._waiting.labels(model).set_function(waiting)
        self._padding.labels(model).set_function(lambda: _share(padding()))

    def request(self, model: str, route: str, status: int, seconds: float) -> None:
        """Count a request with its answer's status."""
        self._requests_of(model, route, status).inc()
        self._seconds_of(model, route).observe(seconds)

    def batch(self, model: str, texts: int, tokens: int) -> None:
        """Count a batch."""
        self._batch_texts.labels(model).observe(texts)
        self._tokens.labels(model).inc(tokens)

    def truncated(self, model: str, route: str, texts: int) -> None:
        """Count texts of a request that were truncated."""
        self._truncated.labels(model, route).inc(texts)

    def text(self) -> bytes:
        """All metrics in Prometheus's text format."""
        return self._text(self._registry)


def _share(count: PaddingCount) -> float:
    return count.padded_tokens / max(1, count.tokens + count.padded_tokens)
