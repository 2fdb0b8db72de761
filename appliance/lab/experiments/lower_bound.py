"""A bound for every policy: the least time that GPUs need for a load whose SLO targets are met.

A fluid bound. Every prompt is computed once, in chunks within steps that run anyway; every step has
as large a batch as could ever be; weights are always in place, memory never ends, nothing waits.
What is left is work that no order of doing it saves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from appliance.lab.experiments.run import Setting
from appliance.lab.hardware import ModelProfile
from appliance.lab.workload import Arrival
from appliance.vocabulary import ModelSpec


def least_busy_share(setting: Setting) -> float:
    """The share of all instances' time that the requests of a setting take at least.

    Where it is more than 1, no policy meets all SLO targets. O(n log n) in the requests.
    """
    asked: dict[str, list[Arrival]] = defaultdict(list)
    for arrival in setting.arrivals:
        asked[arrival.model].append(arrival)
    specs = {spec.name: spec for spec in setting.models}
    seconds = sum(
        _work_seconds(requests, specs[name], setting.profiles[name])
        for name, requests in asked.items()
    )
    return seconds / (setting.box.instances * setting.seconds)


def _work_seconds(requests: Sequence[Arrival], spec: ModelSpec, profile: ModelProfile) -> float:
    """Of one model's requests together."""
    together = min(spec.max_batch, most_at_once(_window(one, spec) for one in requests))
    share = min(profile.step_seconds(n, 0) / n for n in range(1, together + 1))
    return sum(
        _prompt_seconds(one.prompt_tokens, profile)
        + (one.output_tokens - 1) * share
        + profile.step_seconds_per_kv_token * _kv_tokens(one)
        for one in requests
    )


def _prompt_seconds(tokens: int, profile: ModelProfile) -> float:
    """In chunks too small for a knee, within steps that read the weights anyway."""
    squared = profile.prefill_seconds_per_token2 * tokens * tokens
    return profile.prefill_seconds_per_token * tokens + squared


def _kv_tokens(one: Arrival) -> int:
    """Tokens of KV that all its steps read together."""
    steps = one.output_tokens - 1
    return steps * one.prompt_tokens + steps * (steps + 1) // 2


def _window(one: Arrival, spec: ModelSpec) -> tuple[float, float]:
    """From its arrival until its last token is due."""
    slo = one.slo or spec.slo_for(one.request_class)
    return one.seconds, one.seconds + slo.ttft_seconds + one.output_tokens * slo.tbt_seconds


def most_at_once(windows: Iterable[tuple[float, float]]) -> int:
    """The most of the intervals that have a moment in common. O(n log n)."""
    edges = sorted(edge for begin, end in windows for edge in ((begin, -1), (end, 1)))
    count = most = 0
    for _, way in edges:
        count -= way
        most = max(most, count)
    return most
