"""A simulated instance alone on its virtual clock: ordered about by a test, heard by a list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from msgspec.structs import replace

from appliance.lab.experiments.metrics import expand
from appliance.lab.hardware import Box, GpuSpec, ModelProfile
from appliance.lab.noise import EXACT, Deviation
from appliance.lab.sim.event_queue import Agenda
from appliance.lab.sim.instance import SimulatedInstance
from appliance.lab.sim.recorder import Life, Recorder
from appliance.lab.sim.topology import Wiring
from appliance.vocabulary import (
    BuildModel,
    Command,
    Direction,
    Event,
    KvMove,
    LoadModel,
    MoveKv,
    RequestClass,
    RunPrefill,
    RunTurn,
    Slo,
    StoreWeights,
)

SLAB = 1024
SLO = Slo(ttft_seconds=4.0, tbt_seconds=0.125)

E = TypeVar("E", bound=Event)


def profile(name: str = "m", **changed: object) -> ModelProfile:
    """A model of 4 slabs that loads in a second; its times are sums of powers of two, so that
    sums in any order are the same to the last bit."""
    fields: dict[str, object] = {
        "name": name,
        "weight_bytes": 4 * SLAB,
        "layers": 4,
        "hidden": 8,
        "kv_bytes_per_token": 16,
        "prefill_base_seconds": 1 / 16,
        "prefill_seconds_per_token": 1 / 1024,
        "prefill_seconds_per_token2": 0.0,
        "step_base_seconds": 1 / 64,
        "step_seconds_per_kv_token": 1 / 65536,
        "step_seconds_per_sequence": 1 / 1024,
    }
    return ModelProfile(**(fields | changed))  # type: ignore[arg-type]


def box(instances: int = 1, slabs: int = 32, host_slabs: int = 400) -> Box:
    """Blocks of 4 tokens, 16 in a slab; the link takes a slab in a quarter of a second."""
    return Box(
        gpu=GpuSpec(
            name="toy",
            vram_bytes=slabs * SLAB,
            pcie_bytes_per_second=8 * SLAB,
            efficiency=0.5,
            disk_bytes_per_second=SLAB,
        ),
        instances=instances,
        host_bytes=host_slabs * SLAB,
        pool_share=1.0,
        slab_bytes=SLAB,
        block_tokens=4,
    )


class Bench:
    """Instance 0 of a box, with these models."""

    def __init__(
        self,
        profiles: Sequence[ModelProfile] = (profile(),),
        slabs: int = 32,
        deviation: Deviation = EXACT,
        activation_seconds: float = 0.0,
        mapping_seconds: float = 0.0,
        map_seconds_per_slab: float = 0.0,
        interference_seconds: float = 0.0,
    ) -> None:
        self.agenda = Agenda()
        self.recorder = Recorder()
        self.lives: dict[str, Life] = {}
        self.heard: list[tuple[float, Event]] = []
        self.profiles = {profile.name: profile for profile in profiles}
        hardware = replace(
            box(slabs=slabs),
            activation_seconds=activation_seconds,
            interference_seconds=interference_seconds,
        )
        mapping = {
            "mapping_seconds": mapping_seconds,
            "map_seconds_per_slab": map_seconds_per_slab,
        }
        hardware = replace(hardware, gpu=replace(hardware.gpu, **mapping))
        self.instance = SimulatedInstance(
            0,
            hardware,
            self.profiles,
            self.lives,
            self.agenda,
            self.recorder,
            Wiring(self.agenda, hardware, deviation),
            lambda event: self.heard.append((self.agenda.now, event)),
            deviation,
        )
        for name in self.profiles:
            self.order(
                BuildModel(instance=0, model=name),
                StoreWeights(instance=0, model=name, host_offsets=(0, 1, 2, 3), fill=True),
            )

    def order(self, *commands: Command) -> None:
        for command in commands:
            self.instance.order(command)
        self.instance.work()

    def run(self, until: float | None = None) -> None:
        """Until then, or until nothing has happened for a hundred seconds."""
        while self.agenda.step(self.agenda.now + 100.0 if until is None else until):
            pass

    def life(
        self, name: str, prompt: int, output: int, model: str = "m", produced: int = 0
    ) -> Life:
        """A request; with tokens produced its KV is in the host tier."""
        life = Life(
            number=len(self.recorder.lives),
            id=name,
            model=model,
            request_class=RequestClass.INTERACTIVE,
            slo=SLO,
            arrived=self.agenda.now,
            prompt_tokens=prompt,
            output_tokens=output,
            max_tokens=output,
            produced=produced,
        )
        self.recorder.lives.append(life)
        self.lives[name] = life
        return life

    def load(self, model: str = "m") -> None:
        self.order(LoadModel(instance=0, model=model))

    def prefill(self, life: Life, kv_slabs: int = 8) -> None:
        self.order(RunPrefill(instance=0, model=life.model, request=life.id, kv_slabs=kv_slabs))

    def turn(
        self,
        *lives: Life,
        quota: float = 1e5,
        kv_slabs: int = 8,
        number: int = 1,
        prompts: Sequence[Life] = (),
        chunk_tokens: int = 0,
    ) -> None:
        self.order(
            RunTurn(
                instance=0,
                model=[*lives, *prompts][0].model,
                turn=number,
                requests=tuple(life.id for life in lives),
                quota_seconds=quota,
                kv_slabs=kv_slabs,
                prompts=tuple(life.id for life in prompts),
                chunk_tokens=chunk_tokens,
            )
        )

    def move(self, direction: Direction, *lives: Life, kv_slabs: int = 8) -> None:
        self.order(
            MoveKv(
                instance=0,
                model=lives[0].model,
                direction=direction,
                moves=tuple(
                    KvMove(request=life.id, host_offsets=tuple(range(-(-life.kv_tokens // 4))))
                    for life in lives
                ),
                kv_slabs=kv_slabs,
            )
        )

    def events(self, kind: type[E]) -> list[tuple[float, E]]:
        """What was heard of this kind, and when."""
        return [(at, event) for at, event in self.heard if isinstance(event, kind)]

    def token_times(self, life: Life) -> list[float]:
        return [float(at) for at in expand(self.recorder, [life]).seconds]
