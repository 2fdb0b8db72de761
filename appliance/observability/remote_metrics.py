"""What is counted of models of other servers, by the names that the configuration has."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from appliance.observability.registry import Registry
from appliance.observability.request_metrics import TTFT_BUCKETS
from appliance.vocabulary import ModelName


class RemoteError(StrEnum):
    """Why a request for a model of another server did not come to its end."""

    UNREACHABLE = "unreachable"
    """No connection."""
    SILENT = "silent"
    """Nothing came for `remote_timeout`."""
    BROKEN = "broken"
    """The connection, or the stream, ended before the answer did."""
    KEY = "key"
    """401 or 403: the server refuses the appliance's key."""
    MISSING = "missing"
    """404: it does not know the model, or the endpoint."""
    REDIRECT = "redirect"
    FULL = "full"
    """429 or 503."""
    STATUS = "status"
    """Another status that says that the server failed."""
    ANSWER = "answer"
    """An answer that is none of OpenAI's API, or says that it failed."""
    REQUEST = "request"
    """The server refuses what was asked (400, 422)."""
    HERE = "here"
    """Refused or ended by the appliance: a limit of the key, `max_queue`, its own end."""
    LEFT = "left"
    """The client left."""


class RemoteMetrics:
    """Metrics of requests that other servers compute."""

    def __init__(self, registry: Registry) -> None:
        self._known: set[ModelName] = set()
        self._requests = registry.counter(
            "appliance_remote_requests",
            "Requests for a model of another server that are over, also those that failed.",
            "model",
        )
        self._errors = registry.counter(
            "appliance_remote_errors",
            "Requests for a model of another server that did not end well; `kind` is "
            f"{_alternatives()}.",
            "model",
            "kind",
        )
        self._tokens = registry.counter(
            "appliance_remote_tokens",
            "Tokens of requests for a model of another server, as its server says, or estimated; "
            "`kind` is `prompt` or `output`.",
            "model",
            "kind",
        )
        self._first_byte = registry.histogram(
            "appliance_remote_time_to_first_byte_seconds",
            "Time from a request to the first byte of its server's answer.",
            TTFT_BUCKETS,
            "model",
        )
        self._running = registry.gauge(
            "appliance_remote_requests_running",
            "Requests for a model of another server that are not over.",
            "model",
        )

    def know(self, models: Iterable[ModelName]) -> None:
        """Count for these from now on, and forget all others."""
        wanted = set(models)
        for gone in self._known - wanted:
            for metric in (self._requests, self._errors, self._tokens, self._first_byte):
                metric.remove_by_labels({"model": gone})
            self._running.remove_by_labels({"model": gone})
        for new in wanted - self._known:
            self._requests.labels(new)
            self._first_byte.labels(new)
            self._running.labels(new)
            for kind in ("prompt", "output"):
                self._tokens.labels(new, kind)
        self._known = wanted

    def running(self, model: ModelName, count: int) -> None:
        """So many requests are not over."""
        if model in self._known:
            self._running.labels(model).set(count)

    def first_byte(self, model: ModelName, seconds: float) -> None:
        """The answer began."""
        if model in self._known:
            self._first_byte.labels(model).observe(seconds)

    def ended(
        self, model: ModelName, error: RemoteError | None, prompt_tokens: int, output_tokens: int
    ) -> None:
        """A request is over."""
        if model not in self._known:
            return
        self._requests.labels(model).inc()
        self._tokens.labels(model, "prompt").inc(prompt_tokens)
        self._tokens.labels(model, "output").inc(output_tokens)
        if error is not None:
            self._errors.labels(model, error.value).inc()


def _alternatives() -> str:
    return ", ".join(f"`{kind.value}`" for kind in RemoteError)
