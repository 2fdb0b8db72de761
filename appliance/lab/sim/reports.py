"""What an instance of the lab reports, in a worker's words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from appliance.lab.sim.engine import SimulatedEngine
from appliance.lab.sim.jobs import SimulatedTurn
from appliance.lab.sim.recorder import Life
from appliance.vocabulary import (
    Event,
    FinishReason,
    InstanceId,
    ModelBuilt,
    ModelName,
    PrefillDeferred,
    PrefillDone,
    RequestId,
    TokenCount,
    TokensProduced,
    TurnEnd,
    TurnEnded,
    WeightsStored,
)

Report = Callable[[Event], None]


class Reports:
    """Makes the events of one instance; `report` gets them."""

    def __init__(
        self, number: InstanceId, engines: Mapping[ModelName, SimulatedEngine], report: Report
    ) -> None:
        self._number = number
        self._engines = engines
        self._report = report

    def built(self, model: ModelName, slab_bytes: int) -> None:
        engine = self._engines[model]
        self._report(
            ModelBuilt(
                instance=self._number,
                model=model,
                weight_slabs=engine.weight_slabs,
                kv=engine.shape,
                host_slabs=engine.profile.host_slabs(slab_bytes),
            )
        )

    def stored(self, model: ModelName) -> None:
        self._report(WeightsStored(instance=self._number, model=model))

    def prompt_done(self, model: ModelName, request: RequestId, seconds: float) -> None:
        self._report(
            PrefillDone(
                instance=self._number,
                model=model,
                request=request,
                kv_slabs=self._engines[model].slabs(),
                seconds=seconds,
            )
        )

    def prompt_deferred(self, model: ModelName, request: RequestId) -> None:
        self._report(
            PrefillDeferred(
                instance=self._number,
                model=model,
                request=request,
                kv_slabs=self._engines[model].slabs(),
            )
        )

    def tokens(self, model: ModelName, produced: Sequence[tuple[Life, int]]) -> None:
        """Requests got so many tokens each, the last of which may have ended them."""
        counts = tuple(
            [
                TokenCount(request=life.id, count=count, finished=_finished(life))
                for life, count in produced
            ]
        )
        self._report(TokensProduced(instance=self._number, model=model, tokens=counts))

    def turn_ended(self, turn: SimulatedTurn, reason: TurnEnd) -> None:
        command = turn.command
        self._report(
            TurnEnded(
                instance=self._number,
                model=command.model,
                turn=command.turn,
                reason=reason,
                steps=turn.done_steps,
                seconds=turn.done_seconds,
                kv_slabs=self._engines[command.model].slabs(),
            )
        )


def _finished(life: Life) -> FinishReason | None:
    if life.remaining_tokens:
        return None
    return FinishReason.LENGTH if life.produced == life.max_tokens else FinishReason.STOP
