"""What a run leaves behind: every token's time, in closed form, and what the instances did.

A *segment* is a run of tokens of one request: the k-th of them, counted from 1, came at
``start + elapsed(first, growth, k)`` (`closed_form`). So a run costs memory for each
stretch of decoding, not for each token.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

from appliance.lab.sim.extrapolation import Reach
from appliance.vocabulary import InstanceId, ModelName, RequestClass, RequestId, Slo


@dataclass(slots=True)
class Life:
    """The truth about a request. The machine is never shown `output_tokens`."""

    number: int
    id: RequestId
    model: ModelName
    request_class: RequestClass
    slo: Slo
    arrived: float
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    produced: int = 0
    outcome: str | None = None
    """Why it ended (a `FinishReason`, or the code of a `Reject`); None while it has not."""
    ended: float | None = None
    key: str = ""
    """Name of the API key that asks; empty if there is none."""

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV is computed once it is prefilled: all but the newest."""
        return self.prompt_tokens + self.produced - 1

    @property
    def remaining_tokens(self) -> int:
        return self.output_tokens - self.produced


class ComputeSpan(NamedTuple):
    """Something that an instance computed: a prompt, or a turn with the size of its batch."""

    instance: InstanceId
    model: ModelName
    began: float
    ended: float
    batch: int
    steps: int
    """0 for a prompt that was computed alone."""
    prompts: int
    """Those that were computed."""


class ModelSwitch(NamedTuple):
    """Another model became the one that runs; `waited` seconds went by for that alone (NaN where
    that is not known)."""

    instance: InstanceId
    model: ModelName
    at: float
    waited: float


@dataclass
class Recorder:
    """Filled by the instances while they run."""

    lives: list[Life] = field(default_factory=list)
    """In the order of arrival; a life's `number` is its index."""
    requests: array[int] = field(default_factory=lambda: array("q"))
    starts: array[float] = field(default_factory=lambda: array("d"))
    firsts: array[float] = field(default_factory=lambda: array("d"))
    growths: array[float] = field(default_factory=lambda: array("d"))
    counts: array[int] = field(default_factory=lambda: array("q"))
    """The segments, column by column, each request's in the order of time."""
    spans: list[ComputeSpan] = field(default_factory=list)
    switches: list[ModelSwitch] = field(default_factory=list)
    loads: int = 0
    prefetches: int = 0
    busy: dict[InstanceId, float] = field(default_factory=dict)
    """Seconds of computing."""
    reach: Reach = field(default_factory=Reach)
    """Where it asked more of profiles than they know."""

    def produced(self, life: Life, start: float, first: float, growth: float, count: int) -> None:
        """The request got `count` tokens: a segment."""
        life.produced += count
        self.requests.append(life.number)
        self.starts.append(start)
        self.firsts.append(first)
        self.growths.append(growth)
        self.counts.append(count)

    def computed(self, span: ComputeSpan, seconds: float) -> None:
        """An instance was at something; for `seconds` of that time it computed."""
        self.spans.append(span)
        self.busy[span.instance] = self.busy.get(span.instance, 0.0) + seconds
