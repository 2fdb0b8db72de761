"""How much hardware a workload needs, and what bounds the load that a box can carry.

Both are answered by trials, not by formulas: the scenario is played on other hardware, or under
more load, until the attainment falls below what was asked for (bisection, `sweep`).
What bounds a box is found by doubling one resource at a time under the first load that is too much.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.table import Table

from appliance.errors import LabError
from appliance.lab.experiments import scenario
from appliance.lab.experiments.comparison import MatchResult
from appliance.lab.experiments.report import mean, share
from appliance.lab.experiments.run import Setting
from appliance.lab.experiments.sweep import LoadAxis, largest, search
from appliance.lab.hardware import ModelProfile, gpu, gpu_names, profiled
from appliance.lab.sim.extrapolation import Beyond, worst
from appliance.vocabulary import Word

Changes = Mapping[str, str]
Play = Callable[[Changes], Sequence[MatchResult]]
"""Plays the scenario with changes, once for each seed."""

TPS = (1, 2, 4, 8)

ROOM_FOR_KV_BYTES = 1 << 40
"""Of the host's memory outside the weight_cache, so that the peak of swapped-out KV is seen."""

RELIEVED = 2
"""So many times a resource, to see whether it is what there is too little of."""


class Need(Word, frozen=True, kw_only=True):
    """What a workload needs of one kind of GPU."""

    gpu: str
    why: str = ""
    """Why there is no answer; the rest means nothing then."""
    tp: int = 1
    gpus: int = 0
    attained: float = 0.0
    busy_share: float = 0.0
    masters_bytes: int = 0
    """Master images of all models, in the host's memory."""
    kv_peak_bytes: int = 0
    """Host memory under swapped KV at its peak."""
    estimated: tuple[str, ...] = ()
    """Models whose times are from data sheets: they were not measured on this hardware."""
    beyond: Mapping[str, Beyond] = {}


class Carries(Word, frozen=True, kw_only=True):
    """The largest load of one kind that a box carries."""

    load: str
    largest: float
    attained: float
    """At that load; NaN if not even the least is carried."""
    too_much: float
    """The next load that was tried, at which it was not attained; the largest, if nothing was."""
    relieved: Mapping[str, float]
    """What was attained then with twice of one resource, by resource."""
    beyond: Mapping[str, Beyond] = {}

    @property
    def bound(self) -> str:
        """The resource of which more helps most; none if nothing was too much."""
        return max(self.relieved, key=lambda name: self.relieved[name], default="nothing tried")


class Planner:
    """Plans for a scenario file, as it is with `changes`; attainment is `metric` of outcomes."""

    def __init__(self, path: Path, changes: Changes, play: Play, metric: str) -> None:
        self._path = path
        self._changes = changes
        self._play = play
        self._metric = metric
        self._chosen = scenario.read(path, changes)

    def need(self, kind: str, target: float, most: int) -> Need:
        """The fewest GPUs of a kind, at most `most`, on which `target` is attained."""
        found = self._smallest_tp(kind)
        if isinstance(found, str):
            return Need(gpu=kind, why=found)
        changes, setting = found
        tp = setting.box.tp
        played: dict[int, Sequence[MatchResult]] = {}

        def on(instances: int) -> Sequence[MatchResult]:
            if instances not in played:
                played[instances] = self._play({**changes, "hardware.count": f"{instances * tp}"})
            return played[instances]

        instances = fewest(
            max(1, self._chosen.hardware.count // tp),
            most // tp,
            lambda count: self._attained(on(count)) >= target,
        )
        if instances is None:
            return Need(gpu=kind, tp=tp, why=f"{most} are not enough")
        outcomes = on(instances)
        return Need(
            gpu=kind,
            tp=tp,
            gpus=instances * tp,
            attained=self._attained(outcomes),
            busy_share=mean(one.metrics["busy_share"] for one in outcomes),
            masters_bytes=_masters_bytes(setting),
            kv_peak_bytes=max(one.host_kv_peak_bytes for one in outcomes),
            beyond=worst(one.beyond for one in outcomes),
            estimated=self._estimated(setting),
        )

    def _estimated(self, setting: Setting) -> tuple[str, ...]:
        given = {one.name for one in self._chosen.profiles}
        box, names = setting.box, {one.name for one in setting.profiles.values()} - given
        return tuple(
            sorted(name for name in names if (name, box.gpu.name, box.tp) not in profiled())
        )

    def carries(self, load: LoadAxis, target: float) -> Carries:
        """The largest load at which `target` is attained here, and what bounds it."""
        points: dict[float, float] = {}
        played: dict[int, Sequence[MatchResult]] = {}

        def under(steps: int) -> Sequence[MatchResult]:
            if steps not in played:
                played[steps] = self._play(load.changes(steps))
            return played[steps]

        steps = largest(load, target, points, lambda steps: self._attained(under(steps)))
        above = min(steps + 1, load.most)
        too_much = load.at(above) if above > steps else load.at(steps)
        relieved = {}
        if above > steps:
            hard = load.changes(above)
            relieved = {
                name: self._attained(self._play({**hard, **relief}))
                for name, relief in self._reliefs().items()
            }
        return Carries(
            load=load.name,
            largest=load.at(steps) if steps else 0.0,
            attained=points.get(load.at(steps), float("nan")),
            too_much=too_much,
            relieved=relieved,
            beyond=worst(one.beyond for one in under(max(1, steps))),
        )

    def _attained(self, outcomes: Sequence[MatchResult]) -> float:
        known = outcomes[0].metrics
        if self._metric not in known:
            raise LabError(f"--metric: there is no {self._metric}; there are: {', '.join(known)}")
        return mean(one.metrics[self._metric] for one in outcomes)

    def _smallest_tp(self, kind: str) -> tuple[dict[str, str], Setting] | str:
        """The hardware with the fewest GPUs to an instance on which every model fits, or why there
        is none."""
        hardware = self._chosen.hardware
        if self._chosen.profiles and kind != hardware.gpu:
            return "profiles that the scenario gives are of its own GPU"
        why = ""
        for tp in TPS:
            changes = {"hardware.gpu": kind, "hardware.tp": f"{tp}", "hardware.count": f"{tp}"}
            if kind != hardware.gpu and hardware.ceilings:
                changes["hardware.ceilings"] = '""'
            if kind != hardware.gpu and hardware.pcie_gbps is not None:
                changes["hardware.pcie_gbps"] = f"{gpu(kind).pcie_bytes_per_second / 1e9}"
            if kind != hardware.gpu and hardware.vram is not None:
                changes["hardware.vram"] = f"{gpu(kind).vram_bytes}"
            if kind != hardware.gpu and hardware.relay:
                nvlink = gpu(kind).nvlink_bytes_per_second / 1e9
                changes |= (
                    {"hardware.nvlink_gbps": f"{nvlink}"} if nvlink else {"hardware.relay": "false"}
                )
            try:
                chosen = scenario.read(self._path, {**self._changes, **changes})
                setting = chosen.setting(chosen.seeds[0], self._path.parent)
            except LabError as error:
                why = why or str(error).partition(";")[0]
                continue
            tight = _too_large(setting)
            if not tight:
                host = _masters_bytes(setting) + ROOM_FOR_KV_BYTES
                return {**changes, "hardware.host_cache": f"{host}"}, setting
            why = f"{tight} has no room on {tp} of them"
        return why

    def _reliefs(self) -> dict[str, dict[str, str]]:
        """Changes that make a resource twice as large, by resource."""
        hardware, deviation = self._chosen.hardware, self._chosen.deviation
        own = hardware.box()
        return {
            "compute": {
                "deviation.prefill": f"{deviation.prefill / RELIEVED}",
                "deviation.step": f"{deviation.step / RELIEVED}",
            },
            "GPU memory": {"hardware.vram": f"{own.gpu.vram_bytes * RELIEVED}"},
            "link": {"hardware.pcie_gbps": f"{own.gpu.pcie_bytes_per_second * RELIEVED / 1e9}"},
            "host cache": {"hardware.host_cache": f"{own.host_bytes * RELIEVED}"},
        }


def kinds_known(*, data_sheets: bool = False) -> list[str]:
    """GPUs for which there is any profile, or all that there are data sheets of."""
    if data_sheets:
        return sorted(gpu_names())
    return sorted({kind for _, kind, _ in profiled()})


def fewest(start: int, most: int, enough: Callable[[int], bool]) -> int | None:
    """The least number, up to `most`, that is enough; None if that is not. From `start` up or
    down, where more is never worse."""
    if most < 1:
        return None
    # The bisection finds the largest that will do: here, the largest that will not.
    tries = search(min(start, most), most, 0.5)
    try:
        count = next(tries)
        while True:
            count = tries.send(0.0 if enough(count) else 1.0)
    except StopIteration as end:
        lacking: int = end.value
    return lacking + 1 if lacking < most else None


def _masters_bytes(setting: Setting) -> int:
    slab = setting.box.slab_bytes
    return slab * sum(profile.host_slabs(slab) for profile in setting.profiles.values())


def _too_large(setting: Setting) -> str:
    """A model whose weights and one context have no room on an instance; "" if all have."""
    box = setting.box

    def slabs(profile: ModelProfile, tokens: int) -> int:
        shape = profile.kv_shape(box.slab_bytes, box.block_tokens)
        return profile.weight_slabs(box.slab_bytes) + shape.slabs(shape.prompt_blocks(tokens))

    for model in setting.models:
        if slabs(setting.profiles[model.name], model.max_context_tokens) > box.slabs:
            return setting.profiles[model.name].name
    return ""


GIB = 1 << 30


def plan_table(title: str, policy: str, planned: Sequence[Need | Carries]) -> Table:
    """A row for each kind of GPU, or for each kind of load of a box."""
    made = Table(box=None, pad_edge=False, title=f"{title}, {policy}", title_justify="left")
    if any(isinstance(one, Carries) for one in planned):
        for heading in ("LOAD", "CARRIES", "ATTAINED", "TOO MUCH", "BOUND BY", "WITH TWICE THAT"):
            made.add_column(heading, no_wrap=True)
    else:
        for heading in ("GPU", "GPUS", "TP", "ATTAINED", "BUSY", "HOST GIB", "MASTERS", "KV", ""):
            made.add_column(heading, no_wrap=True)
    for one in planned:
        made.add_row(*(_carried(one) if isinstance(one, Carries) else _needed(one)))
    return made


def _carried(one: Carries) -> list[str]:
    relieved = [f"{name} {share(value)}" for name, value in one.relieved.items()]
    return [
        *(one.load, f"{one.largest:g}", share(one.attained)),
        *(f"{one.too_much:g}", one.bound, ", ".join(relieved)),
    ]


def _needed(one: Need) -> list[str]:
    if one.why:
        return [one.gpu, *["-"] * 7, one.why]
    return [
        *(one.gpu, str(one.gpus), str(one.tp), share(one.attained), share(one.busy_share)),
        f"{(one.masters_bytes + one.kv_peak_bytes) / GIB:.1f}",
        *(f"{one.masters_bytes / GIB:.1f}", f"{one.kv_peak_bytes / GIB:.1f}"),
        f"from data sheets: {', '.join(one.estimated)}" if one.estimated else "",
    ]
