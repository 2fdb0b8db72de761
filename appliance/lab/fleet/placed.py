"""Which simulated box has which model: planned as `appliance fleet plan` does, by yesterday.

The plan knows another drawing of the same workload, as the usage of the days before tells of
today: the rates are the same, the requests are not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from appliance.errors import LabError
from appliance.fleet.placement import BoxRoom, ModelNeed, Step, after, plan
from appliance.lab.experiments.run import Setting
from appliance.lab.experiments.scenario import Scenario
from appliance.lab.fleet.play import FleetSetting, box_name
from appliance.lab.workload import Arrival
from appliance.plugins.homes import find_demand
from appliance.scheduling.policy_api import Costs, ModelView
from appliance.units import Seconds
from appliance.vocabulary import ModelName, ModelSpec

HISTORY_SECONDS: Final = 3600.0
"""So much of the workload is known from before."""
HISTORY_SEED: Final = 1009
"""Further than the seeds of scenarios, so that no run is planned by its own requests."""


def history(chosen: Scenario, seed: int, directory: Path) -> Sequence[Arrival]:
    """Requests like those of the scenario, but others: what is known from before. Raises `LabError`
    for a trace, of which there is one day only."""
    if chosen.arrivals.trace is not None:
        raise LabError(
            "fleet.placement: a trace has no day before it to plan by; give rates, or leave the"
            " key out"
        )
    before = replace(chosen, duration=Seconds(HISTORY_SECONDS))
    return before.setting(seed + HISTORY_SEED, directory).arrivals


def planned(
    fleet: FleetSetting, setting: Setting, history: Iterable[Arrival]
) -> tuple[FleetSetting, Sequence[Step]]:
    """The fleet with the models where the plan has them that begins with `copies` in turn; and the
    steps of the plan."""
    names = [model.name for model in setting.models]
    homes: dict[ModelName, frozenset[str]] = {
        name: frozenset([box_name(b) for b in range(fleet.boxes) if fleet.in_turn(b, n)])
        for n, name in enumerate(names)
    }
    box = setting.box
    pools = box.instances * box.tp * box.slabs * box.slab_bytes
    rooms = [
        BoxRoom(
            name=box_name(number),
            devices=box.instances,
            memory_bytes=max(box.host_bytes, pools),
        )
        for number in range(fleet.boxes)
    ]
    demands = _demands(setting.models, history, setting.costs())
    needs = [
        ModelNeed(name=model.name, weight_bytes=model.weight_bytes, demand=demands[model.name])
        for model in setting.models
    ]
    steps = plan(rooms, needs, homes)
    return fleet.with_homes(after(homes, steps)), steps


def _demands(
    models: Sequence[ModelSpec], history: Iterable[Arrival], costs: Costs
) -> Mapping[ModelName, float]:
    """Instances that are busy with each model."""
    asked: dict[ModelName, list[Arrival]] = defaultdict(list)
    for arrival in history:
        asked[arrival.model].append(arrival)
    return {model.name: _demand(model, asked[model.name], costs) for model in models}


def _demand(model: ModelSpec, asked: Sequence[Arrival], costs: Costs) -> float:
    if not asked:
        return 0.0
    output = sum([one.output_tokens for one in asked])
    tokens = output + sum([one.prompt_tokens for one in asked])
    view = ModelView(
        name=model.name,
        weight_bytes=model.weight_bytes,
        kv_bytes_per_token=0,
        slo=model.slo,
        pinned=model.pinned,
        parts=1,
        arrivals_per_second=len(asked) / HISTORY_SECONDS,
        tokens_per_second=tokens / HISTORY_SECONDS,
        output_tokens=output / len(asked),
        requests=0,
        last_arrival=0.0,
    )
    return find_demand(view, costs, round(output / len(asked)))
