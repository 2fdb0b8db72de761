"""What a child process may ask of the kernel: which files, which sockets, which processes.

Two mechanisms of Linux, which need no privileges and cannot be undone. Landlock allows files below
some folders. A seccomp filter denies system calls with `EPERM`. A kernel without one of them, or a
processor that is not listed here, leaves the process without that one: `missing` names them.
"""

from __future__ import annotations

import logging
import os
import struct
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from appliance.platform.children import forbid_core_dumps, forbid_new_privileges
from appliance.platform.seccomp import filter_calls, has_filters, system_call

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Sandbox:
    """What a process may do after `enter`, and all that it starts. By default it may do what
    a server has a reason to do: it debugs no process, mounts nothing, loads no code into the
    kernel, and dumps no core, which would hold prompts and keys."""

    reads: tuple[Path, ...] | None = None
    """Files, and folders with all below them, that it may open to read; None: any."""
    writes: tuple[Path, ...] | None = None
    """The same for writing, creating and deleting. What is open already stays open."""
    programs: bool = True
    """Whether it may start programs or fork. It may always start threads."""
    sockets: bool = True
    """Whether it may make, bind or connect sockets. It may always use those that it was given,
    accept connections of them, and make pairs."""

    def enter(self) -> None:
        """Give up everything else, for the thread that calls and those that it starts: call this
        before there are others. A warning is logged if the kernel refuses."""
        forbid_core_dumps()
        forbid_new_privileges()
        try:
            _restrict_files(self)
        except OSError as error:
            log.warning("this process may use more files than it should: %s", error)
        try:
            filter_calls(programs=self.programs, sockets=self.sockets)
        except OSError as error:
            log.warning("this process may make more system calls than it should: %s", error)


def missing() -> tuple[str, ...]:
    """What of the sandbox this machine does not have, in words for the log."""
    found = []
    if not landlock_version():
        found.append("Landlock (files are not restricted)")
    if not has_filters():
        found.append("seccomp (system calls are not restricted)")
    return tuple(found)


def interpreter_files() -> tuple[Path, ...]:
    """What Python and the libraries that it loads read while they work."""
    python = (sys.prefix, sys.base_prefix, sys.exec_prefix, *filter(None, sys.path))
    return tuple(map(Path, (*python, *_SYSTEM_FILES)))


def checkpoint_files(folder: Path) -> tuple[Path, ...]:
    """A model's folder, and what links in it lead to: the cache of a hub has files elsewhere."""
    inside = folder.rglob("*") if folder.is_dir() else ()
    links = {path.resolve() for path in inside if path.is_symlink()}
    return (folder, *sorted(links))


# --- files ----------------------------------------------------------------------------------------

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION: Final = 1
_PATH_BENEATH: Final = 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_FOLDER = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_CREATE_AND_REMOVE: Final = sum(1 << bit for bit in range(4, 13))
_WRITES: Final = ((1, _WRITE_FILE | _CREATE_AND_REMOVE), (2, 1 << 13), (3, 1 << 14), (5, 1 << 15))
"""From which version of Landlock on: moving to another folder, truncating, ioctl of devices."""
_OF_FILES: Final = _EXECUTE | _WRITE_FILE | _READ_FILE | 1 << 14 | 1 << 15
"""What may be allowed for a file; the rest is about folders."""
_TCP: Final = 0b11
_SCOPES: Final = 0b11
"""To signal processes outside, to connect to their abstract sockets."""

_SYSTEM_FILES: Final = (
    *("/usr", "/lib", "/lib64", "/proc", "/sys/devices/system"),
    *("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"),
    *("/etc/ld.so.cache", "/etc/localtime", "/etc/mime.types", "/etc/nsswitch.conf"),
    *("/etc/passwd", "/etc/group", "/etc/os-release", "/etc/ssl"),
)


def _restrict_files(sandbox: Sandbox) -> None:
    version = landlock_version()
    if not version:
        return
    reads = 0 if sandbox.reads is None else _READ_FILE | _READ_FOLDER
    writes = 0 if sandbox.writes is None else _writes(version)
    execute = 0 if sandbox.programs else _EXECUTE
    tcp = _TCP if version >= 4 and not sandbox.sockets else 0
    scopes = _SCOPES if version >= 6 and not sandbox.programs else 0
    if not (reads or writes or execute or tcp or scopes):
        return
    handled = struct.pack("=QQQ", reads | writes | execute, tcp, scopes)
    ruleset = system_call(_CREATE_RULESET, handled, len(handled), 0)
    try:
        _allow(ruleset, sandbox.reads or (), reads)
        _allow(ruleset, sandbox.writes or (), writes)
        system_call(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, places: Iterable[Path], rights: int) -> None:
    """What is not there is left out."""
    for place in places if rights else ():
        with suppress(FileNotFoundError, PermissionError, NotADirectoryError):
            opened = os.open(place, os.O_PATH | os.O_CLOEXEC)
            try:
                allowed = rights if place.is_dir() else rights & _OF_FILES
                rule = struct.pack("=Qi", allowed, opened)
                system_call(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0)
            finally:
                os.close(opened)


def _writes(version: int) -> int:
    return sum(rights for since, rights in _WRITES if version >= since)


@cache
def landlock_version() -> int:
    """0 without Landlock: it is not built, or not enabled."""
    with suppress(OSError):
        return system_call(_CREATE_RULESET, None, 0, _VERSION)
    return 0
