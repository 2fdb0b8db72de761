"""The endpoints of an admin who gives organizations limits, and keys their organizations."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from litestar import Request, delete, get, put
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath
from litestar.response.base import ASGIResponse

from appliance.access.auth import Access
from appliance.access.organizations import Limits, Organization, make_organization
from appliance.api.admin.keys import ring_of, shown_key
from appliance.errors import OrganizationNotFound
from appliance.http.bodies import parse
from appliance.http.json import json_answer

log = logging.getLogger(__name__)

Done = TypeVar("Done")


class ShownOrganization(Organization, frozen=True, kw_only=True):
    """An organization, its limits and its keys by name; `live` are their requests in progress."""

    keys: list[str]
    live: int


class Organizations(msgspec.Struct, kw_only=True):
    """All organizations, in the order in which they were made."""

    organizations: list[ShownOrganization]


class KeyOrganization(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The organization that a key is to belong to; null: to none."""

    organization: str | None


class RemovedOrganization(msgspec.Struct, kw_only=True):
    """An organization that is none any more."""

    removed: str


def organization_routes(access: Access) -> list[HTTPRouteHandler]:
    """Where the appliance has no file of keys, they say so. What is changed holds from the next
    request on."""
    turn = asyncio.Lock()

    async def changed(change: Callable[[], Done]) -> Done:
        """One change at a time: another process may hold the file's lock, for one thread then."""
        async with turn:
            return await asyncio.to_thread(change)

    @get("/api/organizations", operation_id="organizations")
    async def organizations() -> ASGIResponse:
        return json_answer(Organizations(organizations=_all(access)))

    @get("/api/organizations/{name:str}", operation_id="organization")
    async def organization(name: FromPath[str]) -> ASGIResponse:
        return json_answer(_one(name, access))

    @put("/api/organizations/{name:str}", operation_id="setOrganization")
    async def set_organization(
        name: FromPath[str], request: Request[Any, Any, Any]
    ) -> ASGIResponse:
        file = ring_of(access).file
        wanted = make_organization(name, parse(await request.body(), Limits))
        await changed(lambda: file.set_organization(wanted))
        log.info("the organization %s has its limits", name)
        return json_answer(_one(name, access))

    @delete("/api/organizations/{name:str}", status_code=200, operation_id="removeOrganization")
    async def remove(name: FromPath[str]) -> ASGIResponse:
        file = ring_of(access).file
        await changed(lambda: file.remove_organization(name))
        log.info("the organization %s was removed", name)
        return json_answer(RemovedOrganization(removed=name))

    @put("/api/keys/{name:str}/organization", operation_id="assignKey")
    async def assign(name: FromPath[str], request: Request[Any, Any, Any]) -> ASGIResponse:
        file = ring_of(access).file
        wanted = parse(await request.body(), KeyOrganization).organization
        key = await changed(lambda: file.assign(name, wanted))
        ring_of(access).all()  # its counters are those of the organization from now on
        log.info("the key %s belongs to %s", name, wanted or "no organization")
        return json_answer(shown_key(key, access))

    return [organizations, organization, set_organization, remove, assign]


def _all(access: Access) -> list[ShownOrganization]:
    """Raises `ApiError` where there is no file of keys."""
    ring = ring_of(access)
    keys = ring.all()
    return [
        ShownOrganization(
            **msgspec.structs.asdict(each),
            keys=[key.name for key in keys if key.organization == each.name],
            live=access.live_of(each.name),
        )
        for each in ring.organizations()
    ]


def _one(name: str, access: Access) -> ShownOrganization:
    for each in _all(access):
        if each.name == name:
            return each
    raise OrganizationNotFound(name)
