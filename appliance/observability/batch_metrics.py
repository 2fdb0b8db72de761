"""What is counted of batches."""

from __future__ import annotations

from appliance.observability.registry import Registry


class BatchMetrics:
    """Metrics of the batches of one appliance."""

    def __init__(self, registry: Registry) -> None:
        self._requests = registry.counter(
            "appliance_batch_requests", "Requests of batches, by what came of them.", "outcome"
        )
        self._unfinished = registry.gauge(
            "appliance_batches_unfinished", "Batches that are not over."
        )

    def request_done(self, ok: bool) -> None:
        """The outcome of a request was written down."""
        self._requests.labels("completed" if ok else "failed").inc()

    def unfinished(self, count: int) -> None:
        self._unfinished.set(count)
