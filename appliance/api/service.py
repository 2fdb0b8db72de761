"""The seam between the HTTP API and the appliance: what the API asks, what it is answered.

Everything here is called on the event loop and must return at once; only iterating over a
`Generation` waits, and what is async: verifying, and finding and loading policies.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

import msgspec

from appliance.engines.protocol import Produced, Sampling, Verdict
from appliance.policywords import PolicyChoice, PolicyReport
from appliance.tokens import Tokenizer
from appliance.vocabulary import FinishReason, InstanceId, ModelName, RequestClass, RequestId


class ModelNotFound(Exception):
    """The catalogue has no model of this name."""

    def __init__(self, model: ModelName) -> None:
        super().__init__(f"model {model!r} does not exist")
        self.model = model


class QueueFull(Exception):
    """No room for another request now; trying again after `retry_after_seconds` makes sense."""

    def __init__(self, retry_after_seconds: float) -> None:
        super().__init__("the queue is full, try again later")
        self.retry_after_seconds = retry_after_seconds


class GenerationFailed(Exception):
    """The appliance gave a request up. `code` is a stable word, `status` the HTTP status for it."""

    def __init__(self, code: str, message: str, status: int = 500) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.status = status


class NothingPrevious(Exception):
    """No other choice of policies came before the one that is active."""

    def __init__(self) -> None:
        super().__init__("there is no earlier choice of policies to go back to")


class PolicyNotActive(Exception):
    """A policy is not of those that decide."""

    def __init__(self, policy: str, message: str) -> None:
        super().__init__(message)
        self.policy = policy


class SubmitRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate. `id` is unique and shows the id that the client is given."""

    id: RequestId
    model: ModelName
    prompt: tuple[int, ...]
    sampling: Sampling
    request_class: RequestClass = RequestClass.INTERACTIVE


class Generation(Protocol):
    """The tokens of one submitted request, as they come."""

    @property
    def id(self) -> RequestId: ...

    def __aiter__(self) -> AsyncIterator[list[Produced]]:
        """Batches of one token or more: all that came since the last one was taken.

        Iterated at most once. Ends after the batch whose last token has `finished` set, or at
        once after `cancel`. Raises `GenerationFailed` when the appliance gives the request up.
        """

    def cancel(self, reason: FinishReason) -> None:
        """Nobody wants more tokens: the client left (`CANCELLED`) or a stop string came (`STOP`).

        Idempotent, and without effect on a generation that ended.
        """


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A catalogued model as clients see it. `created` is a Unix time in seconds."""

    id: ModelName
    created: int
    max_context_tokens: int
    owned_by: str = "appliance"
    state: str = "cold"
    """Where it stands on the instance where it stands best: a residency, or ``failed``."""


class Readiness(msgspec.Struct, frozen=True, kw_only=True):
    """Whether requests make progress; when not, why, in words for the operator."""

    ok: bool
    reasons: tuple[str, ...] = ()


class InstanceActivity(msgspec.Struct, frozen=True, kw_only=True):
    """What an instance does now. `pool_bytes` by owner: weights:<model>, kv:<model>, free."""

    instance: InstanceId
    role: str
    state: str
    """``starting``, ``up`` or ``lost``."""
    pid: int | None = None
    model: ModelName | None = None
    """The model that runs."""
    pool_bytes: dict[str, int] = {}
    pool_high_water_bytes: int = 0


class ModelActivity(msgspec.Struct, frozen=True, kw_only=True):
    """What a model does now. `residency` by instance id (a string, as JSON wants it)."""

    model: ModelName
    state: str
    residency: dict[str, str] = {}
    running: int = 0
    waiting: int = 0


class KvShapeActivity(msgspec.Struct, frozen=True, kw_only=True):
    """KV of one shape in one tier. `fragmentation` is unused / peak (Aegaeon §7.3)."""

    mapped_bytes: int
    """Whole slabs."""
    used_bytes: int
    cold_bytes: int
    """Prefix cache that nobody uses now."""
    peak_bytes: int
    fragmentation: float


class KvTierActivity(msgspec.Struct, frozen=True, kw_only=True):
    """KV in one tier, of all instances together. `shapes` by the bytes of a block."""

    fragmentation: float
    shapes: dict[str, KvShapeActivity]


class Activity(msgspec.Struct, frozen=True, kw_only=True):
    """The body of ``GET /api/status``."""

    version: str
    uptime_seconds: float
    instances: tuple[InstanceActivity, ...]
    models: tuple[ModelActivity, ...]
    kv: dict[str, KvTierActivity] = {}
    """By tier: ``device``, ``host``."""


class InstanceVerification(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the weights on one instance's device are those of their master images, by model.

    An instance that is down, or did not answer in time, has no verdicts.
    """

    instance: InstanceId
    answered: bool
    models: dict[ModelName, Verdict] = {}


class Service(Protocol):
    """The appliance, as far as the API needs it. The daemon implements it."""

    def models(self) -> list[ModelCard]:
        """All catalogued models, also cold ones, in the order of the catalogue."""

    def model(self, name: ModelName) -> ModelCard:
        """Raises `ModelNotFound`."""

    def tokenizer(self, name: ModelName) -> Tokenizer:
        """The tokenizer of a catalogued model. Raises `ModelNotFound`."""

    def submit(self, request: SubmitRequest) -> Generation:
        """Take a request in. Raises `ModelNotFound` and `QueueFull`."""

    def readiness(self) -> Readiness: ...

    def activity(self) -> Activity: ...

    async def verify(self) -> list[InstanceVerification]:
        """Have every instance compare its weights; ends when all have answered, or after a while.

        Requests wait while their instance compares.
        """

    def metrics(self) -> bytes:
        """Prometheus text exposition."""

    async def policies(self) -> PolicyReport: ...

    async def set_policy(self, choice: PolicyChoice) -> None:
        """Have other policies decide from now on; requests go on. Raises `PolicyChoiceError`."""

    async def rollback_policy(self) -> None:
        """Return to the choice before. Raises `NothingPrevious`, `PolicyChoiceError`."""

    def enable_policy(self, policy: str) -> None:
        """Have a policy asked again that failed too often. Raises `PolicyNotActive`."""
