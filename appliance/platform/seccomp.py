"""A filter of system calls, which denies some of them to a process and to all that it starts.

The kernel's seccomp interprets the filter before every call. What it denies fails with `EPERM`. It
is a list of what is denied: vLLM and its libraries use too much for a list of what is allowed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Final, TypeAlias

_CALLS: Final[dict[str, tuple[int, int | None]]] = {
    # Other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    # Namespaces and mounts
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "setns": (308, 268),
    "unshare": (272, 97),
    "open_by_handle_at": (304, 265),
    # The kernel
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    # Its queues would carry calls past this filter.
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
}
"""Denied to all: the numbers for x86_64 and for aarch64 (None: it has no such call)."""
_PROGRAM_CALLS: Final[dict[str, tuple[int, int | None]]] = {
    "execve": (59, 221),
    "execveat": (322, 281),
    "fork": (57, None),
    "vfork": (58, None),
}
_SOCKET_CALLS: Final[dict[str, tuple[int, int | None]]] = {
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
}
_CLONE: Final = (56, 220)
_CLONE3: Final = (435, 435)

_MACHINES: Final = {"x86_64": (0, 0xC000003E, 317), "aarch64": (1, 0xC00000B7, 277)}
"""The column above, the kernel's number of the machine, and the number of the call `seccomp`."""

_SET_MODE_FILTER, _GET_ACTION_AVAILABLE = 1, 2
_ALL_THREADS, _SAME_SPEED = 1, 4  # Linux before 5.16 slowed branches of filtered processes down
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000
_X32_CALLS: Final = 0x40000000
"""From here on x86_64 has the same calls with other numbers."""
_CLONE_THREAD: Final = 0x00010000

_LOAD, _RETURN = 0x20, 0x06
_IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT = 0x15, 0x35, 0x45
_NUMBER_AT, _MACHINE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
"""In the kernel's `struct seccomp_data`."""

_Instruction: TypeAlias = tuple[int, int, int, int]
"""Operation, how many are skipped if it is true, how many if it is not, operand."""
_DENY: Final[_Instruction] = (_RETURN, 0, 0, _FAIL | errno.EPERM)


def filter_calls(*, programs: bool, sockets: bool) -> None:
    """Deny calls to this process from now on, in all its threads: those that no server needs, with
    `programs` false also those that start processes, with `sockets` false those that make or
    connect sockets. It must have given up new privileges. Without effect unless `has_filters`.
    Raises `OSError`."""
    if not has_filters():
        return
    machine = platform.machine()
    code = filter_code(machine, programs=programs, sockets=sockets)
    held = ctypes.create_string_buffer(code, len(code))
    described = struct.pack("@HP", len(code) // 8, ctypes.addressof(held))
    _, _, seccomp = _MACHINES[machine]
    thread = system_call(seccomp, _SET_MODE_FILTER, _ALL_THREADS | _SAME_SPEED, described)
    if thread:
        raise OSError(errno.EBUSY, f"thread {thread} has a filter of its own")


def has_filters() -> bool:
    """Whether the kernel has filters, and the calls of this machine are known here."""
    with suppress(KeyError, OSError):
        _, _, seccomp = _MACHINES[platform.machine()]
        system_call(seccomp, _GET_ACTION_AVAILABLE, 0, struct.pack("=I", _FAIL))
        return True
    return False


def filter_code(machine: str, *, programs: bool, sockets: bool) -> bytes:
    """The filter for a machine of this name (`uname -m`), as the kernel takes it."""
    column, number, _ = _MACHINES[machine]
    denied = _CALLS | ({} if programs else _PROGRAM_CALLS) | ({} if sockets else _SOCKET_CALLS)
    numbers = [call[column] for call in denied.values()]
    code = [*_denying(number, [one for one in numbers if one is not None])]
    if not programs:
        code += _only_threads(column)
    code.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *one) for one in code)


def _denying(machine: int, denied: Iterable[int]) -> Iterator[_Instruction]:
    yield from ((_LOAD, 0, 0, _MACHINE_AT), (_IF_EQUAL, 1, 0, machine), _DENY)
    yield from ((_LOAD, 0, 0, _NUMBER_AT), (_IF_AT_LEAST, 0, 1, _X32_CALLS), _DENY)
    for number in denied:
        yield from ((_IF_EQUAL, 0, 1, number), _DENY)


def _only_threads(column: int) -> Iterator[_Instruction]:
    """A filter cannot look into the arguments of clone3; libraries call clone if there is none."""
    yield from ((_IF_EQUAL, 0, 1, _CLONE3[column]), (_RETURN, 0, 0, _FAIL | errno.ENOSYS))
    yield from ((_IF_EQUAL, 0, 3, _CLONE[column]), (_LOAD, 0, 0, _FIRST_ARGUMENT_AT))
    yield from ((_IF_ANY_BIT, 1, 0, _CLONE_THREAD), _DENY)


def system_call(number: int, *arguments: int | bytes | None) -> int:
    """Make a call for which libc has no function. Raises `OSError`."""
    libc = ctypes.CDLL(None, use_errno=True)
    passed = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    result: int = libc.syscall(ctypes.c_long(number), *passed)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
