"""Metrics as a scraper reads them."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from appliance.observability.metrics import Metrics
from appliance.vocabulary import Direction, FinishReason


def samples(metrics: Metrics) -> dict[str, float]:
    """Every sample but creation times, as ``name{labels}``."""
    families = text_string_to_metric_families(metrics.exposition().decode())
    return {
        f"{sample.name}{{{','.join(f'{k}={v}' for k, v in sorted(sample.labels.items()))}}}": (
            sample.value
        )
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_what_the_appliance_counts() -> None:
    """Every method shows up under its documented name and labels."""
    metrics = Metrics()
    metrics.switch(0, "m", "quota")
    metrics.preemption("m")
    metrics.kv_swapped(Direction.OUT, "m", 64)
    metrics.host("weights:m", 128)
    metrics.request_ended("m", "stop")
    metrics.prefetch("hit")
    metrics.recovery("m")
    metrics.worker_restart(1)
    metrics.policy_error("mine")
    found = samples(metrics)

    assert found["appliance_switches_total{instance=0,model=m,reason=quota}"] == 1
    assert found["appliance_preemptions_total{model=m}"] == 1
    assert found["appliance_kv_swapped_bytes_total{direction=out,model=m}"] == 64
    assert found["appliance_host_bytes{owner=weights:m}"] == 128
    assert found["appliance_requests_total{model=m,outcome=stop}"] == 1
    assert found["appliance_prefetches_total{outcome=hit}"] == 1
    assert found["appliance_requests_recovered_total{model=m}"] == 1
    assert found["appliance_worker_restarts_total{instance=1}"] == 1
    assert found["appliance_policy_errors_total{policy=mine}"] == 1


def test_transfers_by_kind() -> None:
    """Bytes by kind and model, from the start; time in the queue apart from the time of bytes."""
    metrics = Metrics()
    metrics.declare("m")
    metrics.transfer("weights", "m", 1000, queued_seconds=0.3, seconds=0.004)
    metrics.transfer("weights", "n", 500, queued_seconds=0.0, seconds=2.0)
    metrics.transfer("kv_out", "m", 64, queued_seconds=0.1, seconds=0.01)
    found = samples(metrics)

    assert {name: value for name, value in found.items() if "transfer_bytes" in name} == {
        "appliance_transfer_bytes_total{kind=weights,model=m}": 1000,
        "appliance_transfer_bytes_total{kind=weights,model=n}": 500,
        "appliance_transfer_bytes_total{kind=kv_in,model=m}": 0,
        "appliance_transfer_bytes_total{kind=kv_out,model=m}": 64,
        "appliance_transfer_bytes_total{kind=kv_spilled,model=m}": 0,
        "appliance_transfer_bytes_total{kind=kv_restored,model=m}": 0,
    }
    assert found["appliance_transfer_seconds_count{kind=weights}"] == 2
    assert found["appliance_transfer_seconds_sum{kind=weights}"] == 2.004
    assert found["appliance_transfer_seconds_bucket{kind=weights,le=0.005}"] == 1
    assert found["appliance_transfer_queue_seconds_sum{kind=weights}"] == 0.3
    assert found["appliance_transfer_queue_seconds_bucket{kind=kv_out,le=0.1}"] == 1
    assert found["appliance_transfer_queue_seconds_bucket{kind=kv_out,le=0.05}"] == 0


def test_the_hit_ratio_of_prefetches() -> None:
    """Used, of those used or wasted; nothing before the first of them."""
    metrics = Metrics()
    name = "appliance_prefetch_hit_ratio{}"
    metrics.prefetch("started")
    assert name not in samples(metrics)

    metrics.prefetch("wasted")
    assert samples(metrics)[name] == 0
    for _ in range(3):
        metrics.prefetch("used")

    assert samples(metrics)[name] == 0.75


def test_fragmentation_forgets_shapes_that_are_gone() -> None:
    """By tier and shape as of now, and one figure for each tier."""
    metrics = Metrics()
    metrics.kv_fragmentation("device", {"300": 0.5, "500": 0.25}, 0.4)
    metrics.kv_fragmentation("host", {"300": 0.1}, 0.1)
    metrics.kv_fragmentation("device", {"500": 0.0}, 0.2)
    found = samples(metrics)

    assert {name: value for name, value in found.items() if "fragmentation" in name} == {
        "appliance_kv_fragmentation{shape=500,tier=device}": 0,
        "appliance_kv_fragmentation{shape=300,tier=host}": 0.1,
        "appliance_kv_fragmentation_overall{tier=device}": 0.2,
        "appliance_kv_fragmentation_overall{tier=host}": 0.1,
    }


def test_the_pool_forgets_owners_that_hold_nothing() -> None:
    """The pool gauge shows the last report and nothing of the one before."""
    metrics = Metrics()
    metrics.pool(0, {"weights:a": 10, "free": 5}, 10)
    metrics.pool(1, {"weights:a": 7}, 7)
    metrics.pool(0, {"kv:b": 3, "free": 12}, 11)
    found = samples(metrics)

    assert {name: value for name, value in found.items() if "pool_bytes" in name} == {
        "appliance_pool_bytes{instance=0,owner=kv:b}": 3,
        "appliance_pool_bytes{instance=0,owner=free}": 12,
        "appliance_pool_bytes{instance=1,owner=weights:a}": 7,
    }
    assert found["appliance_pool_high_water_bytes{instance=0}"] == 11


def test_vllm_names_keep_their_meaning() -> None:
    """Requests, tokens and latencies are where vLLM's dashboards look for them."""
    metrics = Metrics()
    metrics.queues("m", running=2, waiting=3)
    metrics.first_token("m", prompt_tokens=7, tokens=1, seconds=0.05)
    metrics.tokens("m", 4, 0.02)
    metrics.tokens("m", 1, 100.0)
    metrics.finished("m", FinishReason.STOP, 1.25)
    metrics.finished("m", FinishReason.CANCELLED, 1.25)
    found = samples(metrics)

    assert found["vllm:num_requests_running{model_name=m}"] == 2
    assert found["vllm:num_requests_waiting{model_name=m}"] == 3
    assert found["vllm:prompt_tokens_total{model_name=m}"] == 7
    assert found["vllm:generation_tokens_total{model_name=m}"] == 6
    assert found["vllm:time_to_first_token_seconds_sum{model_name=m}"] == 0.05
    assert found["vllm:e2e_request_latency_seconds_count{model_name=m}"] == 2
    assert found["vllm:request_success_total{finished_reason=stop,model_name=m}"] == 1
    assert "vllm:request_success_total{finished_reason=cancelled,model_name=m}" not in found
    assert found["vllm:inter_token_latency_seconds_count{model_name=m}"] == 5
    assert found["vllm:inter_token_latency_seconds_sum{model_name=m}"] == 100.08
    assert found["vllm:inter_token_latency_seconds_bucket{le=0.01,model_name=m}"] == 0
    assert found["vllm:inter_token_latency_seconds_bucket{le=0.025,model_name=m}"] == 4
    assert found["vllm:inter_token_latency_seconds_bucket{le=80.0,model_name=m}"] == 4
    assert found["vllm:inter_token_latency_seconds_bucket{le=+Inf,model_name=m}"] == 5
