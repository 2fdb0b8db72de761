"""HTTP on the admin socket: the kernel says who is at the other end, and operators need no key."""

from __future__ import annotations

import http
import logging
from asyncio import BaseTransport
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from appliance.adminsocket import group_id, may_operate, peer_of
from appliance.api.auth import OPERATOR_MARK
from appliance.api.connections import Connection

log = logging.getLogger(__name__)


class OperatorProtocol(Connection):
    """HTTP on the admin socket: whoever is an operator gets the appliance, others a refusal."""

    gid: int | None = None

    def connection_made(self, transport: BaseTransport) -> None:
        super().connection_made(transport)
        peer = peer_of(transport.get_extra_info("socket"))
        if may_operate(peer, self.gid):
            self.app = _as_operator(self.app)
        else:
            log.warning("the process %d of user %d is no operator", peer.pid, peer.uid)
            self.app = _refuse


def protocol_for(group: str) -> type[OperatorProtocol]:
    """The protocol that also takes members of `group` for operators."""
    return type("GroupsProtocol", (OperatorProtocol,), {"gid": group_id(group)})


def _as_operator(app: Callable[..., Any]) -> Callable[..., Any]:
    async def marked(scope: Any, receive: Any, send: Any) -> None:
        scope[OPERATOR_MARK] = True
        await app(scope, receive, send)

    return marked


async def _refuse(scope: Any, receive: Any, send: Any) -> None:
    message = "not an operator: root, the daemon's user and members of api.admin_group are"
    body = msgspec.json.encode(
        {"error": {"message": message, "type": "invalid_request_error", "param": None,
                   "code": "permission_denied"}}
    )  # fmt: skip
    headers: Iterable[tuple[bytes, bytes]] = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    status = http.HTTPStatus.FORBIDDEN.value
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
