"""What the appliance counts, in Prometheus' terms.

Names that vLLM has are vLLM's (``vllm:…``, label ``model_name``), so that its dashboards work here.
The daemon calls the methods. Label values are not checked, so the callers must use only few.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import Gauge

import appliance
from appliance.observability.batch_metrics import BatchMetrics
from appliance.observability.gpu_metrics import GpuMetrics
from appliance.observability.registry import Family, Registry
from appliance.observability.remote_metrics import RemoteMetrics
from appliance.observability.request_metrics import (
    INTER_TOKEN_BUCKETS,
    LATENCY_BUCKETS,
    TTFT_BUCKETS,
    RequestMetrics,
)
from appliance.service.interface import Load
from appliance.vocabulary import Direction, FinishReason, InstanceId, ModelName

_TRANSFER_BUCKETS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0),
)
_POLICY_CALL_BUCKETS = (
    *(0.00001, 0.000025, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.0025, 0.005),
    *(0.01, 0.025, 0.05, 0.1, 0.25, 1.0),
)
INSTANCE_STATES = ("starting", "up", "lost", "quarantined")
_TRANSFER_KINDS = ("weights", "kv_in", "kv_out", "kv_spilled", "kv_restored")


def _plain(names: Iterable[str]) -> list[str]:
    """Those that can stand between commas."""
    return [name for name in names if "," not in name]


class Metrics:
    """All metrics of one appliance. Sizes are bytes, times are seconds."""

    def __init__(self) -> None:
        self._registry = Registry()
        self.requests = RequestMetrics(self._registry)
        self.gpus = GpuMetrics(self._registry)
        self.batches = BatchMetrics(self._registry)
        self.remotes = RemoteMetrics(self._registry)
        self._prefetch_outcomes: dict[str, int] = {}
        self._prefetch_hit_ratio: Gauge | None = None
        self._add_appliance()
        self._add_vllm()

    def exposition(self) -> bytes:
        """The text format that a scraper reads."""
        return self._registry.exposition()

    @property
    def families(self) -> list[Family]:
        """Every metric there is, also one that nothing was counted for yet."""
        return self._registry.families

    # --- the appliance's own ---------------------------------------------------------------------

    def declare(self, model: ModelName) -> None:
        """Show the model's counters from the start, at 0."""
        self._preemptions.labels(model)
        self._vllm_preemptions.labels(model)
        self._prefills.labels(model)
        self._kv_recomputed.labels(model)
        self._recoveries.labels(model)
        for direction in Direction:
            self._kv_swapped.labels(direction.value, model)
        for kind in _TRANSFER_KINDS:
            self._transfer_bytes.labels(kind, model)

    def forget(self, model: ModelName) -> None:
        """The model is gone: it has no state any more. What was counted for it stays."""
        for gauge in (self._running, self._waiting):
            gauge.remove_by_labels({"model_name": model})
        self._kv_usage.remove_by_labels({"model_name": model})
        self._queue_age.remove_by_labels({"model": model})

    def switch(self, instance: InstanceId, model: ModelName, reason: str) -> None:
        self._switches.labels(instance, model, reason).inc()

    def preemption(self, model: ModelName) -> None:
        self._preemptions.labels(model).inc()
        self._vllm_preemptions.labels(model).inc()

    def drafts(self, model: ModelName, drafted: int, accepted: int) -> None:
        """A turn drafted so many tokens, and so many of them became output."""
        self._drafted.labels(model).inc(drafted)
        self._accepted.labels(model).inc(accepted)

    def kv_recomputed(self, model: ModelName, tokens: int) -> None:
        self._kv_recomputed.labels(model).inc(tokens)

    def kv_swapped(self, direction: Direction, model: ModelName, moved_bytes: int) -> None:
        self._kv_swapped.labels(direction.value, model).inc(moved_bytes)

    def transfer(
        self, kind: str, model: ModelName, moved_bytes: int, queued_seconds: float, seconds: float
    ) -> None:
        """A transfer ended. `seconds` is how long its bytes took, after it waited for its turn."""
        self._transfer_bytes.labels(kind, model).inc(moved_bytes)
        self._transfer_queue_seconds.labels(kind).observe(queued_seconds)
        self._transfer_seconds.labels(kind).observe(seconds)

    def prefill(self, model: ModelName) -> None:
        """A prompt was computed: once for each request, again only after its worker was lost."""
        self._prefills.labels(model).inc()

    def pool(self, instance: InstanceId, owners: dict[str, int], high_water_bytes: int) -> None:
        """What the pool of an instance holds now, by owner; an owner not named holds nothing."""
        for owner in self._pool_owners.get(instance, set()) - owners.keys():
            self._pool.remove(str(instance), owner)
        self._pool_owners[instance] = set(owners)
        for owner, size in owners.items():
            self._pool.labels(instance, owner).set(size)
        self._pool_high_water.labels(instance).set(high_water_bytes)

    def host(self, owner: str, held_bytes: int) -> None:
        self._host.labels(owner).set(held_bytes)

    def kv_disk(self, use: str, nbytes: int) -> None:
        self._kv_disk.labels(use).set(nbytes)

    def kv_disk_error(self, operation: str) -> None:
        """KV could not be written to disk (``write``), or what was read is not it (``read``)."""
        self._kv_disk_errors.labels(operation).inc()

    def kv_fragmentation(self, tier: str, shapes: Mapping[str, float], overall: float) -> None:
        """Unused / peak allocated KV memory of a tier; a shape not named has none there."""
        for shape in self._kv_shapes.get(tier, set()) - shapes.keys():
            self._kv_fragmentation.remove(tier, shape)
        self._kv_shapes[tier] = set(shapes)
        for shape, share in shapes.items():
            self._kv_fragmentation.labels(tier, shape).set(share)
        self._kv_fragmentation_overall.labels(tier).set(overall)

    def request_ended(self, model: ModelName, outcome: str) -> None:
        """`outcome` is a finish reason, or the code of the rejection."""
        self._requests.labels(model, outcome).inc()

    def prefetch(self, outcome: str) -> None:
        """``started``, and later ``used`` or ``wasted``. The ratio leaves out those that were
        neither, because their worker was lost."""
        self._prefetches.labels(outcome).inc()
        self._prefetch_outcomes[outcome] = self._prefetch_outcomes.get(outcome, 0) + 1
        used = self._prefetch_outcomes.get("used", 0)
        ended = used + self._prefetch_outcomes.get("wasted", 0)
        if not ended:
            return
        if self._prefetch_hit_ratio is None:  # not shown before there is one
            self._prefetch_hit_ratio = self._registry.gauge(
                "appliance_prefetch_hit_ratio", "Weight prefetches used, of those used or wasted."
            )
        self._prefetch_hit_ratio.set(used / ended)

    def recovery(self, model: ModelName) -> None:
        """A request went on after its worker was lost."""
        self._recoveries.labels(model).inc()

    def worker_restart(self, instance: InstanceId) -> None:
        self._worker_restarts.labels(instance).inc()

    def policy_call(self, hook: str, seconds: float) -> None:
        """A question was answered."""
        self._policy_calls.observe(hook, seconds)

    def decision(self, event: str, seconds: float) -> None:
        """The machine handled an event."""
        self._decisions.observe(event, seconds)

    def ages(self, waiting: Mapping[ModelName, float], progress_seconds: float) -> None:
        """How long the oldest waiting request of each model has waited, and since when nothing
        came of the slowest request; 0 where there is none."""
        for model, seconds in waiting.items():
            self._queue_age.labels(model).set(seconds)
        self._progress_age.set(progress_seconds)

    def box(self, load: Load, kv_share: float, unix_seconds: float) -> None:
        """What routers in front of several boxes read: they take the first sample of a family, so
        these have one each. The labels of the last are separated by commas."""
        self._box_waiting.set(load.waiting)
        self._box_running.set(load.running)
        self._box_kv.set(kv_share)
        resident, coming = _plain(load.resident), _plain(load.coming)
        places = str(len(resident) + len(coming))
        self._box_models.clear()
        self._box_models.labels(",".join(resident), ",".join(coming), places).set(unix_seconds)

    def instances(self, states: Iterable[str]) -> None:
        """The state of each."""
        counts = dict.fromkeys(INSTANCE_STATES, 0)
        for state in states:
            counts[state] += 1
        for state, count in counts.items():
            self._instances.labels(state).set(count)

    def quarantined(self, instance: InstanceId, holds: bool) -> None:
        self._quarantined.labels(instance).set(holds)

    def parked(self, instance: InstanceId, seconds: float) -> None:
        """It rested for so much longer."""
        self._parked.labels(instance).inc(seconds)

    def kv(self, tier: str, uses: Mapping[tuple[str, str], int]) -> None:
        """Bytes by shape and use; one that is not named has none there."""
        for gone in self._kv_uses.get(tier, set()) - uses.keys():
            self._kv.remove(tier, *gone)
        self._kv_uses[tier] = set(uses)
        for (shape, use), size in uses.items():
            self._kv.labels(tier, shape, use).set(size)

    def policy_error(self, policy: str) -> None:
        self._policy_errors.labels(policy).inc()

    # --- vLLM's ----------------------------------------------------------------------------------

    def queues(self, model: ModelName, running: int, waiting: int) -> None:
        self._running.labels(model).set(running)
        self._waiting.labels(model).set(waiting)

    def kv_usage(self, model: ModelName, share: float) -> None:
        self._kv_usage.labels(model).set(share)

    def first_token(
        self, model: ModelName, prompt_tokens: int, tokens: int, seconds: float
    ) -> None:
        """The first token of a request came `seconds` after the request; or its vector, which is
        none (`tokens`)."""
        self._prompt_tokens.labels(model).inc(prompt_tokens)
        self._generation_tokens.labels(model).inc(tokens)
        self._ttft.labels(model).observe(seconds)

    def tokens(self, model: ModelName, count: int, seconds: float) -> None:
        """`count` further tokens of a request came, each `seconds` after the one before."""
        self._generation_tokens.labels(model).inc(count)
        self._inter_token.observe(model, seconds, count)

    def finished(self, model: ModelName, reason: FinishReason, seconds: float) -> None:
        """A request that was not rejected ended `seconds` after it arrived."""
        self._latency.labels(model).observe(seconds)
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._success.labels(model, reason.value).inc()

    def _add_appliance(self) -> None:
        self._add_transfers()
        self._add_memory()
        self._add_decisions()
        self._add_state()
        self._add_box()

    def _add_transfers(self) -> None:
        counter, histogram = self._registry.counter, self._registry.histogram
        self._switches = counter(
            "appliance_switches", "Model switches.", "instance", "model", "reason"
        )
        self._preemptions = counter(
            "appliance_preemptions", "Requests preempted in mid-generation.", "model"
        )
        self._kv_recomputed = counter(
            "appliance_kv_recomputed_tokens",
            "Tokens whose KV was lost for lack of room, or on disk, and that are computed again.",
            "model",
        )
        self._kv_swapped = counter(
            "appliance_kv_swapped_bytes", "KV moved between device and host.", "direction", "model"
        )
        self._transfer_bytes = counter(
            "appliance_transfer_bytes", "Bytes of weights and KV transferred.", "kind", "model"
        )
        self._transfer_seconds = histogram(
            "appliance_transfer_seconds", "Time of a transfer's bytes.", _TRANSFER_BUCKETS, "kind"
        )
        self._transfer_queue_seconds = histogram(
            "appliance_transfer_queue_seconds",
            "Time that a transfer waited for its turn.",
            _TRANSFER_BUCKETS,
            "kind",
        )
        self._prefills = counter("appliance_prefills", "Prompts computed.", "model")

    def _add_memory(self) -> None:
        gauge = self._registry.gauge
        self._pool = gauge("appliance_pool_bytes", "Device pool by owner.", "instance", "owner")
        self._pool_owners: dict[InstanceId, set[str]] = {}
        self._pool_high_water = gauge(
            "appliance_pool_high_water_bytes", "Most of the pool ever mapped.", "instance"
        )
        self._host = gauge("appliance_host_bytes", "Host tier by owner.", "owner")
        self._kv_disk = gauge("appliance_kv_disk_bytes", "Room for KV on disk: kv or free.", "use")
        self._kv_disk_errors = self._registry.counter(
            "appliance_kv_disk_errors",
            "KV that could not be written to disk, or not be read and is computed again.",
            "operation",
        )
        for operation in ("write", "read"):
            self._kv_disk_errors.labels(operation)
        self._kv_fragmentation = gauge(
            "appliance_kv_fragmentation",
            "Unused / peak allocated KV memory of the shape whose blocks have so many bytes.",
            "tier",
            "shape",
        )
        self._kv_shapes: dict[str, set[str]] = {}
        self._kv_fragmentation_overall = gauge(
            "appliance_kv_fragmentation_overall", "The same for all shapes of a tier.", "tier"
        )

    def _add_decisions(self) -> None:
        counter, weighted = self._registry.counter, self._registry.weighted
        self._requests = counter("appliance_requests", "Requests ended.", "model", "outcome")
        self._prefetches = counter("appliance_prefetches", "Weight prefetches.", "outcome")
        self._recoveries = counter(
            "appliance_requests_recovered", "Requests that outlived their worker.", "model"
        )
        self._worker_restarts = counter(
            "appliance_worker_restarts", "Worker processes restarted.", "instance"
        )
        self._parked = counter(
            "appliance_instance_parked_seconds",
            "Time in which the policy had it take no requests, and it had nothing to do.",
            "instance",
        )
        self._policy_errors = counter(
            "appliance_policy_errors", "Policy answers that could not be used.", "policy"
        )
        self._policy_calls = weighted(
            "appliance_policy_call_seconds", "Time to an answer.", _POLICY_CALL_BUCKETS, "hook"
        )
        self._decisions = weighted(
            "appliance_decision_seconds",
            "Time in which the scheduling machine handled an event.",
            _POLICY_CALL_BUCKETS,
            "event",
        )

    def _add_state(self) -> None:
        gauge = self._registry.gauge
        self._queue_age = gauge(
            "appliance_queue_age_seconds", "How long the oldest request has waited.", "model"
        )
        self._progress_age = gauge(
            "appliance_progress_age_seconds", "Time since the slowest request last progressed."
        )
        self._instances = gauge("appliance_instances", "Instances by state.", "state")
        self._quarantined = gauge(
            "appliance_instance_quarantined", "1 while it is out of service.", "instance"
        )
        self._kv = gauge(
            "appliance_kv_bytes",
            "KV memory of the shape whose blocks have so many bytes: mapped, used or cold.",
            "tier",
            "shape",
            "use",
        )
        self._kv_uses: dict[str, set[tuple[str, str]]] = {}
        gauge("appliance_info", "1, and the version.", "version").labels(appliance.__version__).set(
            1
        )

    def _add_box(self) -> None:
        gauge = self._registry.gauge
        self._box_waiting = gauge("appliance_requests_waiting", "Requests waiting, of all models.")
        self._box_running = gauge("appliance_requests_running", "Requests running, of all models.")
        self._box_kv = gauge(
            "appliance_kv_usage_ratio", "Share of the pools that KV of all models takes, 0 to 1."
        )
        self._box_models = gauge(
            "appliance_models_info",
            "When this was so, in Unix seconds: models on devices, as routers know LoRA adapters; "
            "those on their way there; and how many both are.",
            "running_lora_adapters",
            "waiting_lora_adapters",
            "max_lora",
        )

    def _add_vllm(self) -> None:
        name = "model_name"
        counter, gauge = self._registry.counter, self._registry.gauge
        self._running = gauge("vllm:num_requests_running", "Requests running.", name)
        self._waiting = gauge("vllm:num_requests_waiting", "Requests waiting.", name)
        self._kv_usage = gauge(
            "vllm:kv_cache_usage_perc",
            "Share of the pools that the model's KV takes. 1 means all of them.",
            name,
        )
        self._vllm_preemptions = counter(
            "vllm:num_preemptions", "Requests preempted in mid-generation.", name
        )
        self._prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens computed.", name)
        self._generation_tokens = counter("vllm:generation_tokens", "Tokens generated.", name)
        self._drafted = counter("vllm:spec_decode_num_draft_tokens", "Tokens drafted.", name)
        self._accepted = counter(
            "vllm:spec_decode_num_accepted_tokens", "Drafted tokens that became output.", name
        )
        self._success = counter(
            "vllm:request_success", "Requests that ran to their end.", name, "finished_reason"
        )
        self._ttft = self._registry.histogram(
            "vllm:time_to_first_token_seconds", "Time to first token.", TTFT_BUCKETS, name
        )
        self._latency = self._registry.histogram(
            "vllm:e2e_request_latency_seconds", "Time to the last token.", LATENCY_BUCKETS, name
        )
        self._inter_token = self._registry.weighted(
            "vllm:inter_token_latency_seconds", "Time between tokens.", INTER_TOKEN_BUCKETS, name
        )
