"""What the machine asks of policies: the frozen views it shows and the form of the answers.

A view is made anew for each question and holds only what a policy may know; no view has the true
output length. Estimates are seconds from the machine's own cost model.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

from appliance.vocabulary import (
    InstanceId,
    ModelName,
    RequestClass,
    RequestId,
    Role,
    Slo,
    Word,
)


class Phase(StrEnum):
    """What an instance does next."""

    PREFILL = "prefill"
    DECODE = "decode"


class RequestView(Word, frozen=True):
    """A request to be placed. `tokens` is its prompt plus what it produced before a loss."""

    id: RequestId
    model: ModelName
    tokens: int
    max_tokens: int
    slo: Slo
    request_class: RequestClass
    waited_seconds: float


class GroupView(Word, frozen=True):
    """Requests of one model that wait to be prefilled together.

    `admitted` counts every request that ever joined (Aegaeon's group size is cumulative),
    `waiting` those still in it; `seconds` is the estimated prefill time of the latter.
    """

    model: ModelName
    admitted: int
    waiting: int
    seconds: float


class BatchView(Word, frozen=True):
    """The requests of one model that decode on an instance.

    `runnable` of its `requests` could run now (the others' KV is on its way). One step of it takes
    about `step_seconds`; making the model the one that runs takes about `switch_seconds`, whether
    or not it is in place now; `slo` is the strictest of its requests.
    """

    model: ModelName
    requests: int
    runnable: int
    slo: Slo
    step_seconds: float
    switch_seconds: float


class InstanceView(Word, frozen=True):
    """One instance: what waits, what decodes, what runs.

    `turn` is the model of the turn that is running, if one is. `prefills_since_turn` counts the
    prompts computed since the last turn began.
    """

    id: InstanceId
    role: Role
    current_model: ModelName | None
    groups: tuple[GroupView, ...]
    batches: tuple[BatchView, ...]
    turn: ModelName | None
    prefills_since_turn: int

    @property
    def load(self) -> int:
        """Requests waiting or decoding here."""
        return sum(group.waiting for group in self.groups) + sum(
            batch.requests for batch in self.batches
        )


class PrefillChoice(Word, frozen=True):
    """Where a request is prefilled: in group number `group` of the instance, or a new last one."""

    instance: InstanceId
    group: int | None = None


class PlannedTurn(Word, frozen=True):
    """A turn of a round: the model decodes for `quota_seconds` (finite, above 0)."""

    model: ModelName
    quota_seconds: float


class Policy(Protocol):
    """The questions of the machine. Answers are valid: whoever implements this checked them."""

    def assign_roles(self, instances: int) -> Sequence[Role]:
        """The role of each instance, in order."""

    def choose_prefill(
        self, request: RequestView, instances: Sequence[InstanceView]
    ) -> PrefillChoice:
        """Where to prefill a request; `instances` are those whose role allows it."""

    def choose_decode(
        self, request: RequestView, prefilled_on: InstanceId, instances: Sequence[InstanceView]
    ) -> InstanceId:
        """Where to decode a prefilled request; `instances` are those whose role allows it."""

    def choose_phase(self, instance: InstanceView) -> Phase:
        """What comes next on an instance that has both prompts and batches waiting.

        Asked when the instance is free, and when a request joins its queue during a turn:
        answering `PREFILL` then preempts the turn.
        """

    def plan_round(self, instance: InstanceView) -> Sequence[PlannedTurn]:
        """The turns of the next round, in order; models with runnable requests, each once."""

    def choose_prefetch(
        self, instance: InstanceView, upcoming: Sequence[ModelName]
    ) -> ModelName | None:
        """Which of the models that run next here is brought in beside the running one."""
