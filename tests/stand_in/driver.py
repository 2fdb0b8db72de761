"""The stand-in driver: builds it, loads it in the place of libcuda.so.1, and steers it.

The bindings look libcuda.so.1 up by its name, and the loader answers with a library of that name
that is loaded already. So one process sees either a real driver or this one, never both.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from enum import IntEnum
from pathlib import Path
from typing import Final, NamedTuple

SOURCE: Final = Path(__file__).with_name("cuda.c")
BUDGET: Final = 1 << 30


class Live(NamedTuple):
    """What exists in the driver, and was not given back."""

    handles: int
    mappings: int
    ranges: int
    pinned: int
    streams: int
    events: int
    contexts: int
    bytes: int
    """Physical memory, also of slabs that are released and still mapped."""


class Audit(NamedTuple):
    """What no program may do, though a driver may let it pass."""

    registered_twice: int = 0
    mapped_twice: int = 0
    freed_twice: int = 0
    """Given back once more, or what was never there."""
    used_after_free: int = 0
    unmapped_in_use: int = 0
    """While a copy in line, which the host has not waited for, reads or writes there."""
    unmapped_part: int = 0
    unmapped_nothing: int = 0
    unregistered_in_use: int = 0
    freed_mapped: int = 0
    """A range of addresses with something mapped in it."""


class Mapped(NamedTuple):
    """One mapping."""

    address: int
    nbytes: int
    handle: int
    """Which physical memory."""
    accessible: bool


class CudaCode(IntEnum):
    """Errors to inject, by the driver's numbers."""

    OUT_OF_MEMORY = 2
    ECC_UNCORRECTABLE = 214
    ILLEGAL_ADDRESS = 700
    MISALIGNED_ADDRESS = 716
    LAUNCH_FAILED = 719
    UNKNOWN = 999


class StandIn:
    """What tests can do to the driver that a program cannot."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.standin_calls.restype = ctypes.c_char_p
        library.standin_mapped.restype = library.standin_pageable.restype = ctypes.c_uint64

    def reset(self, budget_bytes: int = BUDGET) -> None:
        """Forget injected failures, a capture, a broken context and the list of calls."""
        self._library.standin_reset(ctypes.c_uint64(budget_bytes))

    def fail(self, name: str, nth: int, code: int) -> None:
        """The `nth` call of a name (of any, if ``*``) from now on returns an error.

        After one that breaks a context, such as an illegal address, all calls do.
        """
        self._library.standin_fail(name.encode(), nth, code)

    def lose(self, code: int) -> None:
        """The device is lost: all calls fail, also what waits for a stream."""
        self._library.standin_lose(code)

    def hold(self, stream: int) -> None:
        """Nothing given to this stream from now on is done until `let_go`; 0 is the default."""
        self._library.standin_hold(ctypes.c_void_p(stream), 1)

    def let_go(self, stream: int) -> None:
        self._library.standin_hold(ctypes.c_void_p(stream), 0)

    def live(self) -> Live:
        counts = (ctypes.c_uint64 * len(Live._fields))()
        self._library.standin_live(counts)
        return Live(*counts)

    def audit(self) -> Audit:
        """Faults since `pardon`."""
        counts = (ctypes.c_uint64 * len(Audit._fields))()
        self._library.standin_audit(counts)
        return Audit(*counts)

    def pardon(self) -> None:
        """Forget faults: of a test that shows what is one."""
        self._library.standin_pardon()

    def mapped(self) -> list[Mapped]:
        """All mappings, by address."""
        room = self.live().mappings
        numbers = (ctypes.c_uint64 * (4 * room))()
        count = int(self._library.standin_mapped(numbers, ctypes.c_uint64(room)))
        rows = [numbers[4 * i : 4 * i + 4] for i in range(count)]
        return sorted(Mapped(row[0], row[1], row[2], bool(row[3])) for row in rows)

    def pageable_copies(self) -> int:
        """Sides of copies since `reset` that lie in host memory that is not page-locked: CUDA does
        such copies through memory of its own, slower, and may have the caller wait."""
        return int(self._library.standin_pageable())

    def forget(self) -> None:
        """End the process that a broken context is of, as far as the driver sees: all that it had
        is gone, and so are the audit's notes. None of its threads may be left."""
        self._library.standin_forget()
        self.reset()
        self.pardon()

    def calls(self) -> list[str]:
        """Names of the calls since `reset`, in order."""
        return list(self._library.standin_calls().decode().split())


def build(source: Path, library: Path, *options: str) -> Path:
    """Compile C or C++ into a library. Raises `RuntimeError` with what the compiler said."""
    compiler = shutil.which("gcc" if source.suffix == ".c" else "g++")
    if compiler is None:
        raise RuntimeError("the tests compile C and C++: install gcc and g++")
    command = [compiler, "-O1", "-shared", "-fPIC", *options, "-o", str(library), str(source)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if built.returncode:
        raise RuntimeError(f"{source.name} does not compile:\n{built.stderr}")
    return library


@functools.cache
def stand_in() -> StandIn:
    """The driver of this process from now on."""
    with tempfile.TemporaryDirectory() as directory:
        path = build(
            SOURCE, Path(directory, "libcuda.so.1"), "-Wl,-soname,libcuda.so.1", "-lpthread", "-ldl"
        )
        driver = StandIn(ctypes.CDLL(str(path), mode=ctypes.RTLD_LOCAL))
        # While the file is there: the stand-in opens itself to look its own functions up.
        from appliance.memory.cuda.driver import call

        driver.reset()
        call("cuDeviceGet", 0)
        assert driver.calls() == ["cuDeviceGet"], "another CUDA driver is loaded in this process"
        return driver
