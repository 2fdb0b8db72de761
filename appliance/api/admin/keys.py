"""The endpoints of an admin who lists API keys, makes them, and revokes them.

A key is shown by the answer that made it, and by nothing else: neither it nor its hash is in a
list, in a log or in a journal.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from litestar import Request, delete, get, post
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath
from litestar.response.base import ASGIResponse

from appliance.access.auth import Access
from appliance.access.keys import Key, KeyRing, NewKey, Scope, make_key
from appliance.errors import KeyNotFound, nearest
from appliance.http.bodies import parse
from appliance.http.errors import ApiError
from appliance.http.json import json_answer
from appliance.observability.key_metrics import KeyUse
from appliance.service.interface import Inference, ModelNotFound
from appliance.vocabulary import ModelName, RequestClass

log = logging.getLogger(__name__)

Done = TypeVar("Done")


class ShownKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key and what it allows; `use` is null for a key that no client has presented since
    the daemon began."""

    name: str
    created_unix_seconds: float
    expires_unix_seconds: float | None
    expired: bool
    scopes: tuple[Scope, ...]
    models: tuple[ModelName, ...]
    """Empty: every model."""
    classes: tuple[RequestClass, ...]
    slo: bool
    guides: bool
    requests_per_minute: int | None
    tokens_per_minute: int | None
    tokens_per_month: int | None
    concurrency: int | None
    organization: str | None
    """Whose limits hold for it as well."""
    use: KeyUse | None


class MadeKey(ShownKey, frozen=True, kw_only=True):
    """A key that was made: this is the only time that `key`, what a client presents, is shown."""

    key: str


class Keys(msgspec.Struct, kw_only=True):
    """All keys, in the order in which they were made."""

    keys: list[ShownKey]


class RevokedKey(msgspec.Struct, kw_only=True):
    """A key that is none any more; `admin_keys` are those of the scope `admin` that are left. With
    none of them only the admin socket opens what operators ask."""

    revoked: str
    admin_keys: int


def key_routes(service: Inference, access: Access) -> list[HTTPRouteHandler]:
    """Where the appliance has no file of keys, they say so. What is changed holds from the next
    request on."""
    turn = asyncio.Lock()

    async def changed(change: Callable[[], Done]) -> Done:
        """One change at a time: another process may hold the file's lock, for one thread then."""
        async with turn:
            return await asyncio.to_thread(change)

    @get("/api/keys", operation_id="keys")
    async def keys() -> ASGIResponse:
        return json_answer(Keys(keys=[shown_key(key, access) for key in ring_of(access).all()]))

    @get("/api/keys/{name:str}", operation_id="key")
    async def key(name: FromPath[str]) -> ASGIResponse:
        for each in ring_of(access).all():
            if each.name == name:
                return json_answer(shown_key(each, access))
        raise KeyNotFound(name)

    @post("/api/keys", status_code=201, operation_id="createKey")
    async def create(request: Request[Any, Any, Any]) -> ASGIResponse:
        file = ring_of(access).file
        wanted = parse(await request.body(), NewKey)
        _check_models(wanted, service)
        made, secret = make_key(wanted, access.wall_clock())
        await changed(lambda: file.add(made))
        log.info("the key %s was made", made.name)
        body = MadeKey(**_fields(made, access), key=secret)
        return json_answer(body, 201, {"Cache-Control": "no-store"})

    @delete("/api/keys/{name:str}", status_code=200, operation_id="revokeKey")
    async def revoke(name: FromPath[str]) -> ASGIResponse:
        ring = ring_of(access)
        await changed(lambda: ring.file.remove(name))
        log.info("the key %s was revoked", name)
        now = access.wall_clock()
        left = [each for each in ring.all() if Scope.ADMIN in each.scopes and not each.expired(now)]
        return json_answer(RevokedKey(revoked=name, admin_keys=len(left)))

    return [keys, key, create, revoke]


def shown_key(key: Key, access: Access) -> ShownKey:
    """A key as an admin is shown it."""
    return ShownKey(**_fields(key, access))


def _fields(key: Key, access: Access) -> dict[str, Any]:
    hidden = ("sha256", "created_seconds", "expires_seconds")
    return {
        **{name: getattr(key, name) for name in Key.__struct_fields__ if name not in hidden},
        "created_unix_seconds": key.created_seconds,
        "expires_unix_seconds": key.expires_seconds,
        "expired": key.expired(access.wall_clock()),
        "use": access.use_of(key),
    }


def ring_of(access: Access) -> KeyRing:
    """Raises `ApiError` where there is no file of keys."""
    if access.keys is None:
        message = (
            "this appliance has no keys: api.keys is not set; "
            'add keys = "keys.json" to [api], and restart it'
        )
        raise ApiError(404, message, code="not_configured")
    return access.keys


def _check_models(wanted: NewKey, service: Inference) -> None:
    """Raises `ApiError` for a model that there is not."""
    for name in dict.fromkeys(wanted.models):
        try:
            service.model(name)
        except ModelNotFound as error:
            known = [card.id for card in service.models()]
            message = f"models: there is no model {name[:100]!r}; {nearest(name[:100], known)}"
            raise ApiError(422, message, param="models", code="model_not_found") from error
