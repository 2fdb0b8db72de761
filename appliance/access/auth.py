"""Who asks: the key of a request, what it opens, and how many requests it may have."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
from litestar.enums import ScopeType
from litestar.middleware import ASGIMiddleware
from litestar.types import ASGIApp, Message, Receive, Scope, Send

from appliance.access.keys import Key, KeyRing
from appliance.access.keys import Scope as KeyScope
from appliance.access.organizations import Organization
from appliance.access.rate_limits import Bucket, Counts, LimitRefusal, Meter, OrganizationCounts
from appliance.http.cors import origin_allowed
from appliance.http.errors import ApiError, BadRequest
from appliance.observability.key_metrics import KeyMetrics, KeyUse
from appliance.service.front_paths import is_front_path
from appliance.service.interface import AskedSlo
from appliance.units import Address, Delay, Seconds
from appliance.vocabulary import ModelName

SLO_HEADER: Final = "x-slo"
_SLO_PARTS: Final[dict[str, type[Seconds]]] = {"ttft": Seconds, "tbt": Seconds, "gap": Delay}
OPERATOR_MARK: Final = "appliance.operator"
"""A key of an ASGI scope, which no client can set: the connection proved to be an operator's."""

_OPEN: Final = frozenset({"/livez", "/readyz", "/health", "/version", "/api/version", "/"})
_METRICS: Final = "/metrics"
_NEEDS_KEYS: Final = "set api.keys and send a key"
_CHANGE_ADAPTERS: Final = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
"""vLLM's, which read files and change what is served."""
_INFER: Final = frozenset(
    {
        # Ollama's; everything else below /api is an operator's.
        *("/api/tags", "/api/ps", "/api/show"),
    }
)

_OBSERVE: Final = frozenset({"/api/load", _METRICS})
"""What routers and scrapers read."""


@cache
def scope_of(path: str) -> KeyScope | None:
    """What a key needs for an endpoint, by the path of its route; None: no key is needed.

    What is not known is an operator's.
    """
    if path in _OPEN:
        return None
    if path in _CHANGE_ADAPTERS:
        return KeyScope.ADMIN
    if path in _OBSERVE:
        return KeyScope.OBSERVE
    infers = path in _INFER or path.startswith("/v1/") or is_front_path(path)
    return KeyScope.INFER if infers else KeyScope.ADMIN


class Unauthorized(ApiError):
    """401: no key, or none that is valid."""

    def __init__(self, message: str) -> None:
        headers = {"WWW-Authenticate": "Bearer"}
        super().__init__(401, message, code="invalid_api_key", headers=headers)


class Forbidden(ApiError):
    """403: a valid key that does not allow this."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(403, message, param=param, code="permission_denied")


class LimitMet(ApiError):
    """429: the key, or its organization, had enough for now."""

    def __init__(self, refusal: LimitRefusal, headers: Iterable[tuple[str, str]] = ()) -> None:
        self.retry_after_seconds = refusal.retry_after_seconds
        unit = {"concurrency": "requests at once"}.get(refusal.limit, f"{refusal.limit} per minute")
        seconds = max(1, math.ceil(refusal.retry_after_seconds))
        super().__init__(
            429,
            f"the limit of {_whose(refusal.organization)} is reached: {refusal.bound} {unit}; "
            f"try again in {seconds} s",
            code="rate_limit_exceeded",
            headers={**dict(headers), "Retry-After": str(seconds)},
        )


class BudgetSpent(ApiError):
    """429: the key, or its organization, has spent its tokens of this month, or too many of them
    for what is asked."""

    def __init__(
        self,
        budget: int,
        spent: int,
        needed: int,
        now: float,
        *,
        others_may_give_back: bool,
        organization: str = "",
    ) -> None:
        """`needed` is what the request may come to, and `now` Unix time. Others that are computed
        have reserved what they may need, and may give some of it back. Without an `organization`
        the budget is the key's own."""
        renewal = renewal_of(now)
        seconds = 1 if others_may_give_back else max(1, math.ceil(renewal.timestamp() - now))
        message = (
            f"the monthly budget of {_whose(organization)} is {budget} tokens, {spent} are spent, "
            f"and this request may need {needed}"
        )
        if others_may_give_back:
            message += "; others have reserved the rest: try again when they are over"
        elif spent < budget:
            message += f"; ask for fewer (max_tokens), or wait: it renews on {renewal:%Y-%m-%d} UTC"
        else:
            message += f"; it renews on {renewal:%Y-%m-%d} UTC"
        headers = {"Retry-After": str(seconds)}
        super().__init__(429, message, code="insufficient_quota", headers=headers)


def _whose(organization: str) -> str:
    """Of a limit, in a message to a client."""
    return f"the organization {organization!r} of this key" if organization else "this key"


def renewal_of(now: float) -> datetime:
    """When monthly budgets renew next: the first moment of the next month, in UTC."""
    date = datetime.fromtimestamp(now, UTC)
    return datetime(date.year + date.month // 12, date.month % 12 + 1, 1, tzinfo=UTC)


class Used(NamedTuple):
    """What a sequence that is over came to."""

    prompt_tokens: int
    output_tokens: int


class Credentials(NamedTuple):
    """What a request shows of who sends it. The names of `headers` are in lower case; without a
    `client` the address is unknown."""

    headers: Mapping[str, str]
    client: str | None = None
    operator: bool = False
    """Whether the connection proved to be an operator's."""

    @classmethod
    def of(cls, scope: Any) -> Credentials:
        headers: dict[str, str] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.decode("latin-1"), value.decode("latin-1"))
        client = scope.get("client")
        return cls(headers, None if client is None else client[0], bool(scope.get(OPERATOR_MARK)))


class Caller:
    """The sender of a request. Without a meter it needs no key: everything is allowed."""

    def __init__(
        self,
        meter: Meter | None = None,
        slo: AskedSlo | None = None,
        *,
        waits: bool = True,
        bill: list[Used] | None = None,
    ) -> None:
        """Unless it `waits`, it has no place among those who wait for room. With a `bill`, its
        sequences are written there, and count for its key only when they are charged."""
        self.meter = meter
        self.slo = AskedSlo() if slo is None else slo
        self.waits = waits
        self.bill = bill

    @property
    def key(self) -> Key | None:
        return None if self.meter is None else self.meter.key

    @property
    def organization(self) -> Organization | None:
        """The organization of the key."""
        meter = self.meter
        return None if meter is None or meter.organization is None else meter.organization.of

    def check_guides(self) -> None:
        """Raise `Forbidden` for a request with a guide, if the key has none."""
        if self.key is not None and not self.key.guides:
            raise Forbidden(
                "the API key may use no guides: ask without response_format (but of type text), "
                "structured_outputs, format, tools that must be called or are strict, and "
                "parallel_tool_calls = false"
            )

    @property
    def owner(self) -> str:
        """Of what is stored for it: the hash of its key, "" without one."""
        return "" if self.key is None else self.key.sha256

    def allows(self, model: ModelName) -> bool:
        """Whether it may know of a model."""
        return self.key is None or self.key.allows(model)


KEYLESS: Final = Caller()
"""The caller without a key: a client of an appliance without keys, and the appliance itself."""

current: ContextVar[Caller] = ContextVar("caller", default=KEYLESS)
"""Who asks, while a request is answered."""


class Access:
    """Whom the appliance answers. Without `keys` that is everybody who reaches it.

    `local`: without keys only what comes from this machine and was addressed to it as such, and no
    page of another site in a browser here, unless its origin is one of `origins` or of those
    that `appliance.http.cors` allows. Such a page could otherwise have its visitor's appliance do
    things.
    """

    def __init__(
        self,
        keys: KeyRing | None = None,
        *,
        local: bool = False,
        origins: Iterable[str] = (),
        open_metrics: bool = False,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`clock` measures rates, `wall_clock` tells the end of keys. With `open_metrics` the
        metrics need no key."""
        self.clock = clock
        self.wall_clock = wall_clock
        self.keys = keys
        self._local = local
        self._origins = tuple(origins)
        self._open_metrics = open_metrics
        self._operators_at: Path | None = None
        self._meters: dict[str, Meter] = {}
        self._organizations: dict[str, OrganizationCounts] = {}
        """By name, from the first request of one of its keys on."""
        self.metrics = KeyMetrics()
        """What keys have had; nothing where there are none."""
        self.several_keys = False
        """Whether more than one key may have answers computed."""
        if keys is not None:
            keys.on_change(self._follow)
            self._count({key.sha256: key for key in keys.all()})

    def caller(self, asking: Credentials, needed: KeyScope) -> Caller:
        """Who sent a request. Raises `Unauthorized` and `Forbidden`."""
        keys = self.keys
        if asking.operator:
            return _with_slo(asking, None)
        if keys is None:
            if self._local:
                self._check_local(asking)
            if needed is not KeyScope.INFER and self._operators_at is not None:
                raise Forbidden(
                    f"operators use the admin socket, {self._operators_at}; without API keys "
                    "api.local_operators lets every local client do what they do"
                )
            return _with_slo(asking, None)
        secret = _secret(asking.headers)
        if secret is None:
            raise Unauthorized("an API key is needed: Authorization: Bearer KEY, or x-api-key: KEY")
        key = keys.find(secret, self.wall_clock())
        if key is None:
            raise Unauthorized("the API key is not valid: unknown, revoked or expired")
        looks = needed is KeyScope.OBSERVE and KeyScope.ADMIN in key.scopes
        if needed not in key.scopes and not looks:
            raise Forbidden(f"the API key has not the scope {needed.value!r}")
        return _with_slo(asking, self._meter(key))

    def keep_operators_at(self, path: Path) -> None:
        """Operators have an admin socket. Without keys, others may only have answers computed."""
        self._operators_at = path

    def begin(self, caller: Caller) -> None:
        """Count another HTTP request of a caller, whose `end` is due later. Raises `LimitMet`."""
        meter = caller.meter
        if meter is not None and (refusal := meter.begin(self.clock())):
            self.metrics.refused(meter.key.name, refusal.named)
            raise LimitMet(refusal, self.rate_headers(caller))

    def end(self, caller: Caller) -> None:
        """A request that had begun is answered."""
        if caller.meter is not None:
            caller.meter.end()

    def rate_headers(self, caller: Caller) -> list[tuple[str, str]]:
        """OpenAI's headers that say how much of its limits, and its organization's, a caller has
        left."""
        meter, headers = caller.meter, []
        if meter is not None:
            now = self.clock()
            for name in ("requests", "tokens"):
                both = [getattr(counts, name) for counts in meter.counts()]
                buckets: list[Bucket] = [bucket for bucket in both if bucket is not None]
                if buckets:  # the one that ends first
                    least = min(buckets, key=lambda bucket: bucket.remaining(now))
                    headers += _headers(name, least, now)
        return headers

    def on_behalf_of(self, owner: str) -> Caller | None:
        """The caller for work that the appliance does later for the key of this hash, "" for one
        who needed none; None if that key is not valid any more."""
        if not owner:
            return KEYLESS
        key = None if self.keys is None else self.keys.known(owner, self.wall_clock())
        if key is None or KeyScope.INFER not in key.scopes:
            return None
        return Caller(self._meter(key), waits=False, bill=[])

    def count(self, caller: Caller) -> None:
        """Its bill counts: what was asked has an outcome, and is not asked again."""
        if caller.key is None or caller.bill is None:
            return
        for used in caller.bill:
            self.metrics.taken(caller.key.name)
            self.metrics.ended(caller.key.name, *used)
        caller.bill.clear()

    def use_of(self, key: Key) -> KeyUse | None:
        """What a key has had; None if no client has presented it since the daemon began."""
        meter = self._meters.get(key.sha256)
        if meter is None:
            return None
        return msgspec.structs.replace(self.metrics.use(key.name), live=meter.own.live)

    def live_of(self, organization: str) -> int:
        """Requests of an organization's keys that are being answered."""
        counts = self._organizations.get(organization)
        return 0 if counts is None else counts.live

    def is_open(self, path: str) -> bool:
        """Whether an endpoint needs no key."""
        return scope_of(path) is None or (path == _METRICS and self._open_metrics)

    def _check_local(self, asking: Credentials) -> None:
        """Raises `Forbidden` for what comes from another machine, however it got to our socket, and
        for what a browser sends for another site, also one whose name was made to mean this
        machine."""
        if asking.client is not None and not _is_local(asking.client):
            raise Forbidden(
                f"without API keys only this machine is answered, not {asking.client}: "
                f"{_NEEDS_KEYS}"
            )
        host, origin = asking.headers.get("host"), asking.headers.get("origin")
        if host is not None and not _is_local(host):
            raise Forbidden(
                f"without API keys only this machine is answered, not {host!r}: {_NEEDS_KEYS}, or "
                "ask localhost"
            )
        local = origin is None or _is_local(origin.partition("://")[2])
        if origin is not None and not local and not origin_allowed(origin, self._origins):
            raise Forbidden(
                f"without API keys no page of another site is answered: {origin!r} is not in "
                "api.origins"
            )

    @property
    def has_keys(self) -> bool:
        """Whether clients need a key."""
        return self.keys is not None

    def _meter(self, key: Key) -> Meter:
        meter = self._meters.get(key.sha256)
        if meter is None:
            counts = self._counts_of(key)
            meter = self._meters[key.sha256] = Meter(key, self.clock(), counts)
            self.metrics.know(key.name)
        elif meter.key is not key:
            meter.change(key, self.clock())
        return meter

    def _counts_of(self, key: Key) -> OrganizationCounts | None:
        """Those of the organization of a key."""
        assert self.keys is not None
        if (name := key.organization) is None:
            return None
        counts = self._organizations.get(name)
        if counts is None:
            held = self.keys.held_organizations[name]
            counts = self._organizations[name] = Counts(held, self.clock(), name)
        return counts

    def _follow_organizations(self, keys: Mapping[str, Key]) -> None:
        """Limits have changed, or keys belong to others, with what is being answered."""
        assert self.keys is not None
        known = self.keys.held_organizations
        for name, counts in list(self._organizations.items()):
            if name in known:
                counts.change(known[name], self.clock())
            else:
                del self._organizations[name]
        for sha256, meter in self._meters.items():
            meter.join(self._counts_of(keys[sha256]))

    def _count(self, keys: Mapping[str, Key]) -> None:
        self.several_keys = sum(KeyScope.INFER in key.scopes for key in keys.values()) > 1

    def _follow(self, keys: Mapping[str, Key]) -> None:
        """Nothing is counted any more for keys that are gone; for renamed ones it begins anew."""
        self._count(keys)
        for gone in self._meters.keys() - keys.keys():
            self.metrics.forget(self._meters.pop(gone).key.name)
        renamed = [
            meter for sha256, meter in self._meters.items() if meter.key.name != keys[sha256].name
        ]
        for meter in renamed:
            self.metrics.forget(meter.key.name)
        for meter in renamed:  # the name of one may have been another's
            meter.change(keys[meter.key.sha256], self.clock())
            self.metrics.know(meter.key.name)
        self._follow_organizations(keys)


class Authentication(ASGIMiddleware):
    """Finds out who asks before anything else is looked at, and holds keys to their requests."""

    scopes = (ScopeType.HTTP,)

    def __init__(self, access: Access) -> None:
        self._access = access

    async def handle(self, scope: Scope, receive: Receive, send: Send, next_app: ASGIApp) -> None:
        assert scope["type"] == ScopeType.HTTP  # what `scopes` says
        path = scope["path_template"]
        needed = scope_of(path)
        if needed is None or self._access.is_open(path):
            await next_app(scope, receive, send)
            return
        caller = self._access.caller(Credentials.of(scope), needed)
        asked = current.set(caller)
        try:
            if needed is not KeyScope.INFER or scope["method"] != "POST":
                await next_app(scope, receive, send)
            else:
                await self._counted(caller, scope, receive, send, next_app)
        finally:
            current.reset(asked)

    async def _counted(
        self, caller: Caller, scope: Any, receive: Receive, send: Send, next_app: ASGIApp
    ) -> None:
        access = self._access

        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start":
                limits = access.rate_headers(caller)
                headers = ((name.encode(), value.encode()) for name, value in limits)
                message["headers"] = [*message["headers"], *headers]
            await send(message)

        access.begin(caller)
        try:
            await next_app(scope, receive, tell)
        finally:
            access.end(caller)


def _headers(name: str, bucket: Bucket, now: float) -> list[tuple[str, str]]:
    return [
        (f"x-ratelimit-limit-{name}", str(bucket.per_minute)),
        (f"x-ratelimit-remaining-{name}", str(bucket.remaining(now))),
        (f"x-ratelimit-reset-{name}", _duration(bucket.full_in_seconds(now))),
    ]


def _duration(seconds: float) -> str:
    """As OpenAI writes it: 20ms, 7s, 1m30s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


def _secret(headers: Mapping[str, str]) -> str | None:
    """What the request presents: OpenAI's header, or Anthropic's."""
    bearer = headers.get("authorization")
    if bearer is not None:
        kind, _, secret = bearer.partition(" ")
        if kind.lower() == "bearer":
            return secret.strip()
    return headers.get("x-api-key")


@lru_cache(maxsize=64)
def _is_local(address: str) -> bool:
    """Whether ``host``, or ``host:port``, can only be this machine."""
    try:
        return Address.read(address).local
    except ValueError:
        return Address(f"{address}:0").local


def _with_slo(asking: Credentials, meter: Meter | None) -> Caller:
    header = asking.headers.get(SLO_HEADER)
    if header is None:
        return KEYLESS if meter is None else Caller(meter)
    if meter is not None and not meter.key.slo:
        raise Forbidden(f"{SLO_HEADER}: not allowed by the API key", SLO_HEADER)
    return Caller(meter, _asked_slo(header))


def _asked_slo(header: str) -> AskedSlo:
    """What ``ttft=2s, tbt=50ms, gap=1s`` says; any may be left out."""
    found: dict[str, float] = {}
    for part in header.split(","):
        name, _, value = part.partition("=")
        name = name.strip()
        if name not in _SLO_PARTS or name in found:
            raise BadRequest(
                f"{SLO_HEADER}: expected ttft=2s, tbt=50ms, gap=1s, or some of them", SLO_HEADER
            )
        try:
            found[name] = float(_SLO_PARTS[name].read(value.strip()))
        except ValueError as error:
            raise BadRequest(f"{SLO_HEADER}: {name}: {error}", SLO_HEADER) from error
    return AskedSlo(
        ttft_seconds=found.get("ttft"),
        tbt_seconds=found.get("tbt"),
        gap_seconds=found.get("gap"),
    )
