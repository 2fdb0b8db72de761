"""What is counted when a request is over: sizes, phases, and whether SLO targets were met."""

from __future__ import annotations

from appliance.observability.registry import Registry
from appliance.service.generation import RequestStream
from appliance.service.interface import RequestTimes

LATENCY_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
INTER_TOKEN_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKENS_BUCKETS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
_PREEMPTIONS_BUCKETS = (1, 2, 3, 4, 5, 10, 20)


class RequestMetrics:
    """Metrics of requests that ran to an end; those refused are counted by their outcome only.

    vLLM's names mean what they mean there: decoding goes from the first token to the last, and so
    holds the time preempted; what is before the prompt's computation is the queue.
    """

    def __init__(self, registry: Registry) -> None:
        self._add_vllm(registry)
        self._add_appliance(registry)

    def _add_vllm(self, registry: Registry) -> None:
        name = "model_name"
        self._queue = registry.histogram(
            "vllm:request_queue_time_seconds", "Time until the prompt ran.", LATENCY_BUCKETS, name
        )
        self._prefill = registry.histogram(
            "vllm:request_prefill_time_seconds", "Time of the prompt.", LATENCY_BUCKETS, name
        )
        self._decode = registry.histogram(
            "vllm:request_decode_time_seconds",
            "Time from the first token to the last.",
            LATENCY_BUCKETS,
            name,
        )
        self._inference = registry.histogram(
            "vllm:request_inference_time_seconds",
            "Time of the prompt and from the first token to the last.",
            LATENCY_BUCKETS,
            name,
        )
        self._per_token = registry.histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time between tokens of a request.",
            INTER_TOKEN_BUCKETS,
            name,
        )
        self._prompt_tokens = registry.histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a request.", _TOKENS_BUCKETS, name
        )
        self._generation_tokens = registry.histogram(
            "vllm:request_generation_tokens", "Tokens generated.", _TOKENS_BUCKETS, name
        )
        self._max_tokens = registry.histogram(
            "vllm:request_params_max_tokens", "Tokens asked for.", _TOKENS_BUCKETS, name
        )
        self._preemptions = registry.histogram(
            "vllm:request_num_preemptions",
            "How often a request was preempted.",
            _PREEMPTIONS_BUCKETS,
            name,
        )

    def _add_appliance(self, registry: Registry) -> None:
        self._load = registry.histogram(
            "appliance_request_model_load_seconds",
            "Time of a request in which its weights came in.",
            LATENCY_BUCKETS,
            "model",
        )
        self._preempted = registry.histogram(
            "appliance_request_preempted_seconds",
            "Time of a request between its turns.",
            LATENCY_BUCKETS,
            "model",
        )
        self._slo_tokens = registry.counter(
            "appliance_slo_tokens",
            "Tokens that met or missed their deadline: token k is due at arrival + TTFT + k * TBT, "
            "or, with a longest gap, that long after token k - 1 if that is earlier.",
            "model",
            "class",
            "outcome",
        )
        self._slo_requests = registry.counter(
            "appliance_slo_requests",
            "Requests whose TTFT and mean TBT met their SLO, or missed it.",
            "model",
            "class",
            "outcome",
        )

    def ended(self, stream: RequestStream, times: RequestTimes) -> None:
        """A request that had its first token is over."""
        if stream.first is None:
            return
        request, tokens, model = stream.request, len(stream.output), stream.request.model
        decode = stream.decode_seconds()
        self._queue.labels(model).observe(times.queue_seconds)
        self._load.labels(model).observe(times.load_seconds)
        self._prefill.labels(model).observe(times.prefill_seconds)
        self._decode.labels(model).observe(decode)
        self._inference.labels(model).observe(times.prefill_seconds + decode)
        self._preempted.labels(model).observe(times.preempted_seconds)
        self._prompt_tokens.labels(model).observe(len(request.prompt))
        self._generation_tokens.labels(model).observe(tokens)
        self._max_tokens.labels(model).observe(request.max_tokens)
        self._preemptions.labels(model).observe(times.preemptions)
        mean = decode / (tokens - 1) if tokens > 1 else 0.0
        if tokens > 1:
            self._per_token.labels(model).observe(mean)
        kind, slo = request.request_class.value, stream.slo
        kept = stream.first - stream.arrived <= slo.ttft_seconds and mean <= slo.tbt_seconds
        self._slo_requests.labels(model, kind, "met" if kept else "missed").inc()
        self._slo_tokens.labels(model, kind, "met").inc(tokens - stream.late)
        self._slo_tokens.labels(model, kind, "missed").inc(stream.late)
