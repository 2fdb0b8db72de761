"""HTTP on the admin socket: the kernel says who is at the other end, and operators need no key."""

from __future__ import annotations

import logging
import socket
from asyncio import BaseTransport
from collections.abc import Callable
from typing import Any, ClassVar, Final

from appliance.access.auth import OPERATOR_MARK
from appliance.http.connections import Connection
from appliance.http.errors import ApiError
from appliance.platform.admin_socket import group_id, may_operate, peer_of

NO_OPERATOR: Final = "not an operator: root, the daemon's user and members of api.admin_group are"

log = logging.getLogger(__name__)


class OperatorProtocol(Connection):
    """HTTP on the admin socket: operators get the appliance, others a refusal."""

    for_operators: ClassVar = True
    gid: int | None = None

    @classmethod
    def admits(cls, connection: socket.socket) -> bool:
        """Only operators."""
        return may_operate(peer_of(connection), cls.gid)

    def connection_made(self, transport: BaseTransport) -> None:
        connection: socket.socket = transport.get_extra_info("socket")
        if self.admits(connection):
            self.app = _as_operator(self.app)
        else:
            peer = peer_of(connection)
            log.warning("the process %d of user %d is no operator", peer.pid, peer.uid)
            self.refusal = ApiError(403, NO_OPERATOR, code="permission_denied")
        super().connection_made(transport)


def protocol_for(group: str) -> type[OperatorProtocol]:
    """The protocol that also takes members of `group` for operators."""
    return type("GroupsProtocol", (OperatorProtocol,), {"gid": group_id(group)})


def _as_operator(app: Callable[..., Any]) -> Callable[..., Any]:
    async def marked(scope: Any, receive: Any, send: Any) -> None:
        scope[OPERATOR_MARK] = True
        await app(scope, receive, send)

    return marked
