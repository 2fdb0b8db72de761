"""TaiChi: instances heavy on prefill or on decode, and latency that flows between them.

Prompts of any length go where they are just in time (Alg. 2, §3.4), decoding begins where prompts
disturb least, and when memory is short there the longest answers go on where they disturb more,
until their SLO targets are at risk (Alg. 1, §3.3). What kind an instance is follows from nothing
but the chunks in which it computes prompts while decoding (§3.1). The printed gaps are settled as
docs/policies/taichi.md says.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Annotated, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta

from appliance.hookspecs import hookimpl
from appliance.plugins.serverlessllm import lone_turn
from appliance.scheduling.policy_api import (
    BatchLimits,
    ClusterView,
    Costs,
    DecodingView,
    InstanceView,
    Migration,
    ModelView,
    Phase,
    Placement,
    PlannedTurn,
    PrefillChoice,
    Refusal,
    RequestView,
)
from appliance.vocabulary import InstanceClass, InstanceId, ModelName, RequestId, Role, Word

Positive: TypeAlias = Annotated[float, Meta(gt=0, le=86400)]
Share: TypeAlias = Annotated[float, Meta(gt=0, lt=1)]
Tokens: TypeAlias = Annotated[int, Meta(ge=0)]

UNLIMITED = 1 << 20
"""More requests than any batch has."""


class Infeasible(StrEnum):
    """What becomes of a request that no instance can serve in time."""

    LEAST_LATE = "least_late"
    """It goes where it is least late."""
    RANDOM = "random"
    """Anywhere, as in the paper's experiments; by its id, so that a replay does the same."""
    REFUSE = "refuse"
    """Early rejection."""


# --- Algorithm 2 ---------------------------------------------------------------------------------


def chunked_seconds(
    prefill_seconds: float, tokens: int, chunk_tokens: int, step_seconds: float
) -> float:
    """Estimate(len, chunk, batch) of Alg. 2: computing a prompt of `tokens` tokens in chunks, each
    in a decoding step of `step_seconds`; whole and alone if `chunk_tokens` is 0."""
    steps = -(-tokens // chunk_tokens) if chunk_tokens else 0
    return prefill_seconds + steps * step_seconds


def feasible(
    queued_seconds: float, own_seconds: float, transfer_seconds: float, budget_seconds: float
) -> bool:
    """Whether the first token comes in time: Q + E + T < TTFT SLO (Alg. 2, line 6)."""
    return queued_seconds + own_seconds + transfer_seconds < budget_seconds


# --- Algorithm 1 ---------------------------------------------------------------------------------


def backflow(requests: Iterable[DecodingView], alpha: float) -> list[DecodingView]:
    """The optimizing set O: requests whose TPOT so far exceeds `alpha` of the target
    (Alg. 1, line 2)."""
    return [request for request in requests if _at_risk(request, alpha)]


def degrade(
    requests: Iterable[DecodingView],
    excess_bytes: float,
    kv_bytes: Mapping[RequestId, float],
    alpha: float,
) -> list[DecodingView]:
    """The degrading set D: the longest outputs first, until `excess_bytes` are released (Alg. 1,
    lines 5-11), or no request is left that can bear it.

    An output is counted from when the request came here, so it restarts on backflow. TPOT does
    not: who is at risk still is not sent away again. O(n log n).
    """
    chosen: list[DecodingView] = []
    for request in sorted(requests, key=lambda r: (-r.here_tokens, r.arrived, r.id)):
        if excess_bytes <= 0:
            break
        if not _at_risk(request, alpha):
            chosen.append(request)
            excess_bytes -= kv_bytes[request.id]
    return chosen


def _at_risk(request: DecodingView, alpha: float) -> bool:
    return request.tpot_seconds() > alpha * request.slo.tbt_seconds


class KvRoom(NamedTuple):
    """Of an instance: the KV of all that decode there, and the room there is for it."""

    used_bytes: float
    room_bytes: float

    def use(self, more_bytes: float = 0.0) -> float:
        """What share is used, with `more_bytes`."""
        used = self.used_bytes + more_bytes
        return used / self.room_bytes if self.room_bytes > 0 else math.inf


def distribute(
    requests: Sequence[DecodingView],
    kv_bytes: Mapping[RequestId, float],
    targets: Mapping[InstanceId, KvRoom],
    limit: float,
    takes: Callable[[InstanceId, DecodingView], bool],
) -> list[Migration]:
    """Each request goes where the least share of the memory is used then, but nowhere beyond
    `limit`; who finds no place stays. O(requests x targets)."""
    memory = dict(targets)
    migrations = []
    for request in requests:
        size = kv_bytes[request.id]
        open_ = [
            target
            for target, state in memory.items()
            if takes(target, request) and state.use(size) <= limit
        ]
        if open_:
            best = min(open_, key=lambda target: (memory[target].use(size), target))
            used, room = memory[best]
            memory[best] = KvRoom(used + size, room)
            migrations.append(Migration(request=request.id, target=best))
    return migrations


# --- sliders -------------------------------------------------------------------------------------


class Sliders(Word, frozen=True):
    """R_PD, S_P and S_D (§3.1), as the parameters of the same names."""

    prefill_share: float
    p_chunk_tokens: int
    d_chunk_tokens: int


def slider_grid(
    instances: int, p_chunk_tokens: Iterable[int], d_chunk_tokens: Sequence[int]
) -> list[Sliders]:
    """Every number of P-heavy instances with every pair of chunks, the smaller one for D-heavy."""
    return [
        Sliders(prefill_share=heavy / instances, p_chunk_tokens=p, d_chunk_tokens=d)
        for p in p_chunk_tokens
        for d in d_chunk_tokens
        for heavy in range(1, instances)
        if d <= p
    ]


def search_sliders(
    evaluate: Callable[[Sliders], float], grid: Iterable[Sliders]
) -> tuple[Sliders, float]:
    """The setting of the sliders with the highest `evaluate` (goodput, say), and that value; the
    first of several. Raises ValueError for an empty grid."""
    values = [(sliders, evaluate(sliders)) for sliders in grid]
    return max(values, key=lambda pair: pair[1])


def p_heavy(ids: Iterable[InstanceId], share: float) -> frozenset[InstanceId]:
    """The first `share` of the instances, but neither none nor all; a lone one is not."""
    order = sorted(ids)
    if len(order) < 2:
        return frozenset()
    return frozenset(order[: min(len(order) - 1, max(1, round(len(order) * share)))])


# --- the policy ----------------------------------------------------------------------------------


class Taichi(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, dict=True):
    """Parameters as in the paper's evaluation (§4.2, ArXiv SLO1)."""

    prefill_share: Share = 0.5
    """R_PD: the share of the instances that are P-heavy."""
    p_chunk_tokens: Tokens = 1024
    """S_P: prompts are computed in such chunks with decoding on P-heavy instances; whole and
    alone for 0."""
    d_chunk_tokens: Tokens = 256
    """S_D: as S_P, on D-heavy instances; they take no prompts for 0 (disaggregation)."""
    alpha: Positive = 0.96
    """Approach factor: a TPOT beyond this share of the target is at risk."""
    watermark: Annotated[float, Meta(gt=0, le=1)] = 0.95
    """M: the share of the memory for KV beyond which D-heavy instances send requests away."""
    infeasible: Infeasible = Infeasible.LEAST_LATE
    """What becomes of requests whose first token cannot be in time."""
    link_bytes_per_second: Annotated[float, Meta(gt=0)] = 16e9
    """How fast KV goes from one instance to another."""
    turn_seconds: Positive = 0.25
    """Length of the turns of a lone model; who should flow is looked at after each."""

    def __post_init__(self) -> None:
        """What is kept from one question to the next; it follows from the questions alone."""
        self._models: dict[ModelName, ModelView] = {}
        self._p_heavy: frozenset[InstanceId] | None = None

    @hookimpl
    def place(self, cluster: ClusterView) -> Sequence[Placement]:
        """Every instance for every model. All compute prompts and decode; without chunks on
        D-heavy instances each kind does its own."""
        self._models = {model.name: model for model in cluster.models}
        live = [view.id for view in cluster.instances if view.up]
        self._p_heavy = p_heavy(live, self.prefill_share)
        if self.d_chunk_tokens or len(live) < 2:
            return [Placement()] * len(cluster.instances)
        return [
            Placement(role=Role.PREFILL if view.id in self._p_heavy else Role.DECODE)
            for view in cluster.instances
        ]

    def _heavy(self, views: Iterable[InstanceView]) -> frozenset[InstanceId]:
        """The P-heavy instances; if another policy decides places, the first of those shown."""
        if self._p_heavy is not None:
            return self._p_heavy
        return p_heavy([view.id for view in views], self.prefill_share)

    # --- prompts ---------------------------------------------------------------------------------

    @hookimpl
    def prefill(
        self, now: float, request: RequestView, instances: Sequence[InstanceView], costs: Costs
    ) -> PrefillChoice | Refusal:
        """Alg. 2: of the instances where the first token is in time, the one with the fewest
        queued prompt tokens; at a tie the D-heavy one. Queues are first come, first served."""
        heavy = self._heavy(instances)
        budget = request.deadline - now
        best: tuple[tuple[int, bool, int, InstanceId], InstanceId] | None = None
        soonest = (math.inf, instances[0].id)
        for view in instances:
            p = view.id in heavy
            estimates = _Estimates(view, self._chunk_tokens(view.id, heavy), costs)
            queued = estimates.queued_seconds(request.model)
            own = estimates.prompt_seconds(request.model, request.tokens)
            transfer = self._transfer_seconds(request) if p else 0.0
            if feasible(queued, own, transfer, budget):
                key = (_queued_tokens(view), p, view.load, view.id)
                best = min(best or (key, view.id), (key, view.id))
            soonest = min(soonest, (queued + own + transfer, view.id))
        if best is not None:
            return PrefillChoice(instance=best[1])
        if self.infeasible is Infeasible.REFUSE:
            return Refusal(
                reason=f"its first token would come {soonest[0]:.1f} s from now at the soonest,"
                f" {max(0.0, budget):.1f} s are left"
            )
        if self.infeasible is Infeasible.RANDOM:
            return PrefillChoice(
                instance=instances[zlib.crc32(request.id.encode()) % len(instances)].id
            )
        return PrefillChoice(instance=soonest[1])

    def _transfer_seconds(self, request: RequestView) -> float:
        model = self._models.get(request.model)
        per_token = 0 if model is None else model.kv_bytes_per_token
        return request.tokens * per_token / self.link_bytes_per_second

    @hookimpl
    def phase(self, instance: InstanceView) -> Phase:
        """A prompt while only its own model decodes comes at once, as that goes on with it;
        others alternate with turns."""
        running = {batch.model for batch in instance.batches if batch.runnable}
        mixed = self._chunk_tokens(instance.id, self._p_heavy) > 0 and running == {
            instance.groups[0].model
        }
        # One since the last turn began was mixed with it; if there are two, one has run alone.
        owed = instance.prefills_since_turn > mixed
        return Phase.DECODE if owed else Phase.PREFILL

    @hookimpl
    def batch(self, instance: InstanceView) -> BatchLimits:
        """As many as the model allows; prompts in chunks of S_P or S_D."""
        chunk_tokens = self._chunk_tokens(instance.id, self._p_heavy)
        return BatchLimits(requests=UNLIMITED, chunk_tokens=chunk_tokens)

    def _chunk_tokens(self, instance: InstanceId, heavy: frozenset[InstanceId] | None) -> int:
        """S_P on a P-heavy instance, S_D on others. A lone one, which no request can leave, has no
        use for small chunks: S_P, unless prompts are to be computed whole."""
        if heavy == frozenset() and self.d_chunk_tokens:
            return self.p_chunk_tokens
        return self.p_chunk_tokens if instance in (heavy or ()) else self.d_chunk_tokens

    @hookimpl
    def preempt(self, instance: InstanceView) -> float | None:
        """A turn with a prompt in it ends with the prompt; others are not ours to end."""
        return math.inf if instance.computing_tokens else None

    # --- decoding --------------------------------------------------------------------------------

    @hookimpl
    def round(self, instance: InstanceView) -> Sequence[PlannedTurn] | None:
        """Short turns for a lone model; how several share an instance is not TaiChi's."""
        return lone_turn(instance, self.turn_seconds)

    @hookimpl
    def decode(self, prefilled_on: InstanceId, instances: Sequence[InstanceView]) -> InstanceId:
        """In place on a D-heavy instance, else on the D-heavy one with the least memory in use
        (§3.3)."""
        heavy = self._heavy(instances)
        offered = [view for view in instances if view.id not in heavy] or instances
        if any(view.id == prefilled_on for view in offered):
            return prefilled_on
        best = min(offered, key=lambda view: (self._memory(view).use(), view.load, view.id))
        return best.id

    @hookimpl
    def flow(
        self,
        instance: InstanceView,
        requests: Sequence[DecodingView],
        others: Sequence[InstanceView],
    ) -> Sequence[Migration]:
        """Alg. 1: requests at risk flow back from a P-heavy instance; from a D-heavy one beyond
        its watermark the longest flow away."""
        heavy = self._heavy([instance, *others])
        sizes = {r.id: r.tokens * self._kv_bytes_per_token(instance, r.model) for r in requests}
        leaves_p = instance.id in heavy
        if leaves_p:
            leaving, limit = backflow(requests, self.alpha), 1.0
        else:
            used, room = self._memory(instance)
            excess = used - self.watermark * room
            leaving, limit = degrade(requests, excess, sizes, self.alpha), self.watermark
        if not leaving:
            return []
        targets = {view.id: view for view in others if (view.id in heavy) is not leaves_p}
        memory = {number: self._memory(view) for number, view in targets.items()}
        return distribute(
            leaving, sizes, memory, limit, lambda number, r: _takes(targets[number], r)
        )

    def _memory(self, view: InstanceView) -> KvRoom:
        """KV of all that decode here, on the device or not; room for it next to the largest model
        that works here. O(groups + batches)."""
        used = sum(
            [
                batch.kv_tokens * self._kv_bytes_per_token(view, batch.model)
                for batch in view.batches
            ]
        )
        working = {work.model for work in view.batches} | {work.model for work in view.groups}
        known = [self._models[model].weight_bytes for model in working if model in self._models]
        if not self._models:
            return KvRoom(used, view.kv_bytes + view.free_bytes)
        return KvRoom(used, view.total_bytes - max(known, default=0))

    def _kv_bytes_per_token(self, view: InstanceView, model: ModelName) -> float:
        """As known of the model, else the mean of what decodes on the instance."""
        known = self._models.get(model)
        if known is not None and known.kv_bytes_per_token:
            return known.kv_bytes_per_token
        tokens = sum([batch.kv_tokens for batch in view.batches])
        return view.kv_bytes / tokens if tokens else 0.0


class _Estimates:
    """Estimate(len, chunk, batch) on one instance: what a prompt costs while others decode of its
    model there."""

    def __init__(self, view: InstanceView, chunk_tokens: int, costs: Costs) -> None:
        self._view = view
        self._chunk_tokens = chunk_tokens
        self._costs = costs
        self._steps = {
            batch.model: costs.step_seconds(batch.model, batch.requests, batch.kv_tokens)
            for batch in view.batches
        }

    def prompt_seconds(self, model: ModelName, tokens: int) -> float:
        prefill = self._costs.prefill_seconds(model, tokens)
        step = self._steps.get(model)
        return (
            prefill if step is None else chunked_seconds(prefill, tokens, self._chunk_tokens, step)
        )

    def queued_seconds(self, model: ModelName) -> float:
        """Until a prompt of `model` that joins the queue begins: what is being computed, as if it
        had just begun, all that waits, and every switch to a model that is not resident."""
        view, running, seconds = self._view, self._view.current_model, 0.0
        if running is not None and view.computing_tokens:
            seconds = self.prompt_seconds(running, view.computing_tokens)
        for group in view.groups:
            if group.model != running and group.model not in view.resident:
                seconds += self._costs.switch_seconds(group.model)
            running, waiting = group.model, group.waiting
            seconds += waiting * self.prompt_seconds(running, group.tokens // waiting)
        if model != running and model not in view.resident:
            seconds += self._costs.switch_seconds(model)
        return seconds


def _queued_tokens(view: InstanceView) -> int:
    return view.computing_tokens + sum([group.tokens for group in view.groups])


def _takes(view: InstanceView, request: DecodingView) -> bool:
    """Whether the instance is meant for the request."""
    kinds = (InstanceClass.MIXED, InstanceClass(request.request_class.value))
    return view.instance_class in kinds and (view.models is None or request.model in view.models)
