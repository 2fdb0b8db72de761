"""The operator's way in: a Unix socket whose peers the kernel vouches for, so it needs no key."""

from __future__ import annotations

import errno
import grp
import os
import socket
import stat
import struct
from pathlib import Path
from typing import Any, Final, NamedTuple

from appliance.errors import ApplianceError
from appliance.user_folders import state_folder

NAME: Final = "admin.sock"
AUTO: Final = "auto"
UNIX: Final = "unix:"
"""How an address begins that is a socket's path."""
SYSTEM_DIRECTORY: Final = "/run/appliance"

DEFAULT_PORT: Final = 11500
"""Where a daemon listens by default."""

_MODE: Final = 0o660
_SO_PEERGROUPS: Final = 59
"""Linux's; the standard library does not name it."""
_GROUPS_BYTES: Final = 1024
"""The most that Python asks the kernel for: 256 groups."""
_CREDENTIALS: Final = struct.Struct("=iII")


class AdminSocketError(ApplianceError):
    """The socket cannot be made, or is another daemon's."""


def automatic_path() -> Path | None:
    """Where a daemon listens by default: in the runtime directory that it or its user was
    given, if there is one."""
    given = os.environ.get("RUNTIME_DIRECTORY", "").partition(":")[0]
    if given:
        return Path(given, NAME)
    users = os.environ.get("XDG_RUNTIME_DIR", "")
    return Path(users, "appliance", NAME) if users else None


def admin_path(configured: str) -> Path | None:
    """Where a daemon listens of which `api.admin_socket` is this; None for nowhere."""
    if configured == AUTO:
        return automatic_path()
    return Path(configured) if configured else None


def own_path(port: int) -> Path | None:
    """Where a daemon listens that `appliance run` started at a TCP port; None for a user without a
    home directory."""
    try:
        return state_folder() / f"daemon-{port}.sock"
    except ApplianceError:
        return None


def running_socket() -> Path | None:
    """The admin socket of a daemon on this machine that this user may use, if there is one."""
    paths = automatic_path(), own_path(DEFAULT_PORT), Path(SYSTEM_DIRECTORY, NAME)
    return next((path for path in paths if path is not None and is_listening(path)), None)


def is_listening(path: Path) -> bool:
    """Whether a daemon listens on an admin socket that this user may use."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def open_socket(path: Path, group: str = "") -> socket.socket:
    """A socket that listens at `path`, for this user and `group`.

    What a daemon left behind that is gone is replaced. Raises `AdminSocketError`.
    """
    gid = group_id(group)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        _make_way(path)
        previous = os.umask(0o777 & ~_MODE)
        try:
            listener.bind(str(path))
        finally:
            os.umask(previous)
        if gid is not None:
            os.chown(path, -1, gid)
        listener.listen()
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise AdminSocketError(f"api.admin_socket: {path}: {reason}") from error
    except AdminSocketError:
        listener.close()
        raise
    return listener


def group_id(group: str) -> int | None:
    """The number of a group; None for no group. Raises `AdminSocketError`."""
    if not group:
        return None
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise AdminSocketError(f"api.admin_group: there is no group {group!r}") from None


def _make_way(path: Path) -> None:
    """Remove a socket on which no process listens any more."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise AdminSocketError(f"api.admin_socket: {path} is there already, and is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError as error:
            if error.errno != errno.ECONNREFUSED:
                raise
            path.unlink(missing_ok=True)
            return
    raise AdminSocketError(f"api.admin_socket: another daemon listens at {path}")


class Peer(NamedTuple):
    """The process at the other end, as the kernel knows it since it connected."""

    pid: int
    uid: int
    gids: frozenset[int]


def peer_of(connection: Any) -> Peer:
    """Of a connected Unix socket, or what an event loop gives for one."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    try:
        groups = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_BYTES)
    except OSError:  # more groups, or an older kernel: the first one is known
        groups = b""
    others = (number for (number,) in struct.iter_unpack("=I", groups))
    return Peer(pid, uid, frozenset({gid, *others}))


def may_operate(peer: Peer, gid: int | None) -> bool:
    """Root, the daemon's own user, and members of the group."""
    return peer.uid in (0, os.geteuid()) or (gid is not None and gid in peer.gids)
