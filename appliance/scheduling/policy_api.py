"""What the machine asks of policies: the frozen views it shows and the form of the answers.

A view holds only what a policy may know; no view has the true output length. Views of what did not
change are the same objects from one question to the next, so a question costs what changed since
the last one. Estimates come from `Costs`.

Times, `now` and those in views, are seconds on the machine's clock. It is steady: it never goes
back, whatever is done to the time of day. Its zero means nothing (in a daemon it is about when the
computer started, in the lab when the run began), so only differences of times mean something. The
time of day, the date and Unix time come from `LocalClock`.
"""

from __future__ import annotations

import datetime as _datetime  # a name that `import *` does not give to policies
import math
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from appliance.vocabulary import (
    InstanceClass,
    InstanceId,
    ModelName,
    RequestClass,
    RequestId,
    Role,
    Slo,
    Word,
)

if TYPE_CHECKING:
    from datetime import datetime, time

MAX_HOLD_SECONDS: Final = 86_400.0
"""A request is held no longer than this after it came, in all."""
_DAY_SECONDS: Final = 86_400.0


class Phase(StrEnum):
    """What an instance does next."""

    PREFILL = "prefill"
    DECODE = "decode"


# --- views ---------------------------------------------------------------------------------------


class LocalClock(Word, frozen=True):
    """The clock on the wall, in the daemon's time zone. Its methods take a time of the machine's
    clock, such as `now`. Without a daemon, and in a lab whose scenario has no `start`, it is
    1970-01-01 00:00 UTC when the machine's clock is at 0."""

    unix_offset_seconds: float = 0.0
    """Unix time when the machine's clock is at 0."""
    utc_offset_seconds: int = 0
    """Seconds by which local time is ahead of UTC; it changes with summer time."""

    def unix_seconds(self, now: float) -> float:
        """Unix time."""
        return now + self.unix_offset_seconds

    def local(self, now: float) -> datetime:
        """Local date and time. Its `hour` is 0 to 23, its `weekday()` 0 on Monday."""
        zone = _datetime.timezone(_datetime.timedelta(seconds=self.utc_offset_seconds))
        return _datetime.datetime.fromtimestamp(self.unix_seconds(now), zone)

    def next(self, now: float, at: time) -> float:
        """When, on the machine's clock, the local time of day is `at` the next time after `now`. A
        change to or from summer time until then moves it by an hour."""
        local = self.local(now)
        then = local.replace(
            hour=at.hour, minute=at.minute, second=at.second, microsecond=at.microsecond
        )
        seconds = (then - local).total_seconds()
        return now + (seconds if seconds > 0 else seconds + _DAY_SECONDS)


class RequestView(Word, frozen=True):
    """A request to be placed. `tokens` is its prompt plus what it produced before a loss; it may
    produce `max_tokens` in all (0: its prompt is embedded); `arrived` is when it came.
    `weight_bytes` and `kv_bytes_per_token` are its model's (the latter 0 until an engine was
    built, and if the model keeps no KV; of layers with windows, until these are full). Once it was
    `accepted`, by an instance that took it on, it goes somewhere even if it is refused."""

    id: RequestId
    model: ModelName
    tokens: int
    max_tokens: int
    weight_bytes: int
    kv_bytes_per_token: int
    slo: Slo
    request_class: RequestClass
    arrived: float
    accepted: bool = False
    key: str = ""
    """Name of the API key that asks; empty if there is none. Requests without a key count as those
    of one key."""
    key_requests: int = 0
    """Other requests of the key that instances have taken on, and that have not ended."""

    @property
    def deadline(self) -> float:
        """When its first token is due."""
        return self.arrived + self.slo.ttft_seconds

    @property
    def hold_limit(self) -> float:
        """Until when it may be held at most."""
        return self.arrived + MAX_HOLD_SECONDS


class DecodingView(Word, frozen=True):
    """A request that decodes: `output_tokens` so far, the first of them at `first_token`, the
    newest at `newest_token`. `here_tokens` of them came since it decodes on this instance.
    `instances` are those that can serve its model, None for all."""

    id: RequestId
    model: ModelName
    tokens: int
    output_tokens: int
    here_tokens: int
    slo: Slo
    request_class: RequestClass
    arrived: float
    first_token: float
    newest_token: float
    instances: frozenset[InstanceId] | None = None

    def tpot_seconds(self) -> float:
        """Mean time per output token after the first; 0 before the second."""
        if self.output_tokens < 2:
            return 0.0
        return (self.newest_token - self.first_token) / (self.output_tokens - 1)


class GroupView(Word, frozen=True):
    """Requests of one model that wait to be prefilled together.

    `admitted` counts every request that ever joined (Aegaeon's group size is cumulative),
    `waiting` those still in it, with `tokens` tokens to compute. `arrived` is when the first of
    them came; `deadline` is when the most urgent is due; `slo` is the strictest of theirs;
    `interactive` of them are not batch work. `first` is the request that is computed next.
    """

    model: ModelName
    first: RequestId
    admitted: int
    waiting: int
    tokens: int
    slo: Slo
    arrived: float
    deadline: float
    interactive: int
    scheduled: float | None = None
    """The deadline without longest gaps; None if none of its requests is promised one."""
    resumed: int = 0
    """So many of its requests have output, and are computed again."""


class BatchView(Word, frozen=True):
    """The requests of one model that decode on an instance.

    `runnable` of its `requests` could run now (the others' KV is on its way); `interactive` are not
    batch work; `kv_tokens` tokens of KV are read by a step of all, `away_tokens` of them are on the
    host and come to the device first. `slo` is the strictest of its requests; `deadline` is when
    the next token of the most urgent is due: token k of a request at arrival + TTFT + k TBT, or its
    longest gap after token k - 1 if that is earlier and the request is in no turn; `arrived` is
    when the oldest came.
    """

    model: ModelName
    requests: int
    runnable: int
    interactive: int
    kv_tokens: int
    slo: Slo
    deadline: float
    deadlines: tuple[float, ...]
    """When the next token of each request is due, the most urgent first."""
    arrived: float
    away_tokens: int = 0
    scheduled: tuple[float, ...] = ()
    """The same without longest gaps; empty if none of its requests is promised one."""


class TurnView(Word, frozen=True):
    """A turn that is over: `requests` decoded for `seconds`, making `tokens` in `steps` steps. With
    drafts, a step counts as many as the tokens that it gave a request. `limit` is the batch limit
    it ran under, `left_out` requests were kept out by it."""

    model: ModelName
    requests: int
    limit: int
    left_out: int
    steps: int
    tokens: int
    seconds: float
    tbt_seconds: float
    """The strictest TBT target of its requests."""
    number: int = 0
    """Turns of the instance are numbered from 1, in order: a number that was seen before is of a
    turn that was seen before."""


class InstanceView(Word, frozen=True):
    """One instance: what waits, what decodes, what runs, what is in memory.

    `models` are those it may serve, None for all. `membership_version` changes whenever a request
    came or went, and stays while only tokens were made. `turn` is the model of the turn that is
    running, if one is, since `turn_began`; `last_turn` is the one that ended last.
    `computing_tokens` of prompts are computed now, of `current_model`; `prefills_since_turn` counts
    the prompts whose computing began since the last turn did. `resident` models
    have their weights on the device or on the way there; `kv_bytes` of `total_bytes` hold KV that
    is in use, `free_bytes` nothing that is in use, `idle_bytes` weights of models that have nothing
    to do there and did not run last: they leave, at no cost, where room is short. `kv_short`: a
    prompt waits until requests of its model end and leave room for its KV; the machine ends the
    turn of its model as soon as they do.
    """

    id: InstanceId
    role: Role
    instance_class: InstanceClass
    models: frozenset[ModelName] | None
    up: bool
    current_model: ModelName | None
    groups: tuple[GroupView, ...]
    batches: tuple[BatchView, ...]
    membership_version: int
    turn: ModelName | None
    turn_began: float
    last_turn: TurnView | None
    computing_tokens: int
    prefills_since_turn: int
    resident: frozenset[ModelName]
    total_bytes: int
    free_bytes: int
    kv_bytes: int
    kv_short: bool = False
    idle_bytes: int = 0
    computing_requests: int = 0
    """So many prompts have the `computing_tokens`."""

    @property
    def load(self) -> int:
        """Requests waiting or decoding here."""
        return sum(group.waiting for group in self.groups) + sum(
            batch.requests for batch in self.batches
        )


class ModelView(Word, frozen=True):
    """One model: its sizes, SLO targets, and what is asked of it.

    `arrivals_per_second` and `tokens_per_second` (prompts, and the room asked for answers) are
    smoothed; `requests` are live; `last_arrival` is -inf before the first. `kv_bytes_per_token` is
    0 until an engine was built, and if the model keeps no KV; layers with windows take as much for
    a token until these are full. `parts` GPUs share its weights. `instances` are those that can
    serve it, None for all: others have no engine for it, wherever it is placed.
    """

    name: ModelName
    weight_bytes: int
    kv_bytes_per_token: int
    slo: Slo
    pinned: bool
    parts: int
    arrivals_per_second: float
    tokens_per_second: float
    output_tokens: float
    """Smoothed mean of the outputs that ended; 0 before the first."""
    requests: int
    last_arrival: float
    instances: frozenset[InstanceId] | None = None
    batch_arrivals_per_second: float = 0.0
    """Of the arrivals, those of batch requests; so with their tokens."""
    batch_tokens_per_second: float = 0.0
    max_batch: float = math.inf
    """Most of its requests that an instance runs in one step; infinite if not limited."""
    max_sequences: float = math.inf
    """Most of its requests that decode, or wait to, on an instance; infinite if not limited."""
    device_bytes_per_token: float = 0.0
    """What a token of KV takes of `total_bytes` of an instance: the part of one of its GPUs, and
    what slabs leave over; 0 as `kv_bytes_per_token`."""

    def fits(self, instance: InstanceId) -> bool:
        """Whether the instance can serve it."""
        return self.instances is None or instance in self.instances


class ClusterView(Word, frozen=True):
    """Everything: what placement and scaling look at."""

    instances: tuple[InstanceView, ...]
    models: tuple[ModelView, ...]


class Costs(Protocol):
    """Estimates, in seconds. All O(1)."""

    def step_seconds(self, model: ModelName, requests: int = 1, kv_tokens: int = 0) -> float:
        """One decoding step of `requests` requests that read `kv_tokens` tokens of KV."""

    def prefill_seconds(self, model: ModelName, tokens: int) -> float:
        """Computing a prompt whose model is in place."""

    def switch_seconds(self, model: ModelName) -> float:
        """Bringing a model in that is not resident."""

    def move_seconds(self, kv_bytes: int) -> float:
        """Moving so much KV from a device to the host, or back."""


# --- answers -------------------------------------------------------------------------------------


class PrefillChoice(Word, frozen=True):
    """Where a request is prefilled: in group number `group` of the instance, or a new last one."""

    instance: InstanceId
    group: int | None = None


class Refusal(Word, frozen=True):
    """The request is refused at once: its SLO target cannot be met, and why."""

    reason: str


class Hold(Word, frozen=True):
    """The request waits until the time `until`, and why, in a few words. Then the question is put
    again, and sooner if something changed that may let it go on: a request ended, or instances,
    policies or the clock on the wall changed. Meanwhile it has no
    instance, and counts as a request that waits: its deadlines pass, its key and its model's queue
    are charged for it, its client may cancel it. `until` is after now, and not after
    `RequestView.hold_limit`, a day after the request came."""

    until: float
    reason: str = ""


class PlannedTurn(Word, frozen=True):
    """A turn of a round: the model decodes for `quota_seconds` (above 0, at most 1e9).

    A turn that is not `firm` is an outlook: it says what is likely to run then, so that it can be
    brought in, and is planned anew when its time has come.
    """

    model: ModelName
    quota_seconds: float
    firm: bool = True


class BatchLimits(Word, frozen=True):
    """At most `requests` requests (above 0) decode together. Prompts of the running model are
    computed `chunk_tokens` at a time in the decoding steps; whole and apart if that is 0, or if the
    machine has to learn what prompts of the model take. Prompts of a group are computed together up
    to `prompt_tokens` tokens; one by one if that is 0."""

    requests: int
    chunk_tokens: int = 0
    prompt_tokens: int = 2048


class Migration(Word, frozen=True):
    """A decoding request goes to another instance."""

    request: RequestId
    target: InstanceId


class Placement(Word, frozen=True):
    """What an instance is for: its role, and the models it may serve (None for all). Weights of
    those of them in `ahead` are loaded before they are asked for, in this order, while a fifth of
    the device's memory stays free and nothing else is loaded."""

    role: Role = Role.MIXED
    models: frozenset[ModelName] | None = None
    ahead: tuple[ModelName, ...] = ()


class Fleet(Word, frozen=True):
    """How many instances serve interactive work only, both, and batch work only. The rest rest."""

    interactive: int
    mixed: int
    batch: int


Admitted: TypeAlias = Sequence[int]
"""Numbers of groups in the order they are served; those left out come after, as they were."""


class Policy(Protocol):
    """The questions of the machine. Answers are valid: implementations have checked them."""

    def set_clock(self, clock: LocalClock) -> None:
        """Questions are put with this clock from now on."""

    def take_over(self, before: Policy) -> None:
        """It decides from now on, and may go on from what the one before it knows."""

    def place(self, now: float, cluster: ClusterView, costs: Costs) -> Sequence[Placement]:
        """What each instance is for, in order."""

    def scale(self, now: float, cluster: ClusterView, costs: Costs) -> Fleet:
        """How many instances of each class there are to be."""

    def prefill(
        self, now: float, request: RequestView, instances: Sequence[InstanceView], costs: Costs
    ) -> PrefillChoice | Refusal | Hold:
        """Where to prefill a request; `instances` are those that may."""

    def decode(
        self,
        now: float,
        request: RequestView,
        prefilled_on: InstanceId,
        instances: Sequence[InstanceView],
        costs: Costs,
    ) -> InstanceId:
        """Where to decode a prefilled request; `instances` are those that may."""

    def admit(self, now: float, instance: InstanceView, costs: Costs) -> Admitted:
        """In which order the groups of prompts are served."""

    def phase(self, now: float, instance: InstanceView, costs: Costs) -> Phase:
        """What comes next on a free instance that has both prompts and batches waiting."""

    def round(self, now: float, instance: InstanceView, costs: Costs) -> Sequence[PlannedTurn]:
        """The turns of the next round, in order; models with runnable requests, each once. Those
        that are not firm may be of any model with work."""

    def preempt(self, now: float, instance: InstanceView, costs: Costs) -> float:
        """Something joined during a turn: how many seconds more the turn may go on at most."""

    def batch(
        self, now: float, model: ModelName, instance: InstanceView, costs: Costs
    ) -> BatchLimits:
        """How a turn of the model is run."""

    def flow(
        self,
        now: float,
        instance: InstanceView,
        requests: Sequence[DecodingView],
        others: Sequence[InstanceView],
        costs: Costs,
    ) -> Sequence[Migration]:
        """Which of the requests that decode on an instance go on elsewhere."""

    def evict(
        self, now: float, instance: InstanceView, victims: Sequence[ModelName], costs: Costs
    ) -> Sequence[ModelName]:
        """In which order models lose their place when memory is short."""

    def prefetch(
        self, now: float, instance: InstanceView, upcoming: Sequence[ModelName], costs: Costs
    ) -> ModelName | None:
        """Which of the models that run next here is loaded while the current one runs."""
