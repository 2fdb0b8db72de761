"""About how long everything on each instance takes: where a request would be done first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from appliance.plugins.instance_work.expected import Expectations
from appliance.scheduling.policy_api import Costs, InstanceView
from appliance.vocabulary import InstanceId, ModelName

LONG_PROMPT_SECONDS = 1.0
"""A prompt that takes longer sends others that come meanwhile elsewhere. To count shorter ones,
too, makes tokens late where models share instances: requests of a model gather less."""
LOOKED_AT = 2
"""So many instances that changed are looked at anew for one request."""


class InstanceWork(NamedTuple):
    """About how long everything on an instance takes, as long as it has the same to do."""

    made: float
    membership_version: int
    resident: frozenset[ModelName]
    models: frozenset[ModelName]
    """Those with work."""
    seconds: float
    kv_seconds: float
    """On top of that, for reading the KV of the requests that decode."""


class Loads:
    """What all instances have to do, looked at a few at a time. An answer is taken to have so many
    tokens."""

    def __init__(self, expectations: Expectations, output_tokens: int) -> None:
        self._expectations = expectations
        self._output_tokens = output_tokens
        self._of: dict[InstanceId, InstanceWork] = {}
        self._chosen: InstanceId | None = None

    def choose(self, instance: InstanceId) -> None:
        """A request goes there: it is looked at anew for the next one."""
        self._chosen = instance

    def of(self, now: float, instances: Sequence[InstanceView], costs: Costs) -> list[InstanceWork]:
        """Of each of the instances. Of those where a request came or went, the one that the last
        request went to and those that were looked at longest ago are looked at anew; some requests
        later, the others. O(instances), and O(batches + groups) of `LOOKED_AT`."""
        loads = self._of
        changed = []
        for view in instances:
            load = loads.get(view.id)
            if load is None:
                loads[view.id] = self._make(now, view, costs)
            elif (
                load.membership_version != view.membership_version or load.resident != view.resident
            ):
                changed.append((view.id != self._chosen, load.made, view.id, view))
        if len(changed) > LOOKED_AT:
            changed.sort()
        for *_, view in changed[:LOOKED_AT]:
            loads[view.id] = self._make(now, view, costs)
        return [loads[view.id] for view in instances]

    def _make(self, now: float, view: InstanceView, costs: Costs) -> InstanceWork:
        """O(batches + groups)."""
        expect, resident = self._expectations.of, view.resident
        known = self._expectations.known.get  # no call of ours for each batch and group
        requests, seconds, reading = {}, 0.0, 0.0
        for batch in view.batches:
            model = batch.model
            requests[model] = batch.requests
            expected = known(model) or expect(model, now, costs)
            reading += batch.kv_tokens * expected.kv_seconds_per_token
        if view.computing_tokens and view.current_model is not None:
            expected = expect(view.current_model, now, costs)
            computing = view.computing_tokens * expected.prompt_seconds_per_token
            seconds += computing if computing > LONG_PROMPT_SECONDS else 0.0
        for group in view.groups:
            model, waiting = group.model, group.waiting
            expected = known(model) or expect(model, now, costs)
            seconds += waiting * expected.prompt_seconds
            seconds += group.tokens * expected.prompt_seconds_per_token
            requests[model] = requests.get(model, 0) + waiting
        for model, number in requests.items():
            expected = known(model) or expect(model, now, costs)
            seconds += expected.answers_seconds.get(number) or expected.of_answers(
                model, number, costs, self._output_tokens
            )
            if model not in resident:
                seconds += expected.switch_seconds
        return InstanceWork(
            made=now,
            membership_version=view.membership_version,
            resident=resident,
            models=frozenset(requests),
            seconds=seconds,
            kv_seconds=self._output_tokens * reading,
        )
