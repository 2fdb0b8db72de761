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
from pathlib import Path
from typing import Final, NamedTuple

SOURCE: Final = Path(__file__).with_name("cuda.c")
BUDGET: Final = 1 << 30


class Live(NamedTuple):
    """What exists in the driver, and nobody has given back."""

    handles: int
    mappings: int
    ranges: int
    pinned: int
    streams: int
    events: int
    contexts: int


class StandIn:
    """What tests can do to the driver that a program cannot."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.standin_calls.restype = ctypes.c_char_p

    def reset(self, budget_bytes: int = BUDGET) -> None:
        """Forget injected failures, a broken context and the list of calls."""
        self._library.standin_reset(ctypes.c_uint64(budget_bytes))

    def fail(self, name: str, nth: int, code: int) -> None:
        """The `nth` call of a name from now on returns an error."""
        self._library.standin_fail(name.encode(), nth, code)

    def hold(self, stream: int) -> None:
        """Nothing given to this stream from now on is done until `let_go`; 0 is the default."""
        self._library.standin_hold(ctypes.c_void_p(stream), 1)

    def let_go(self, stream: int) -> None:
        self._library.standin_hold(ctypes.c_void_p(stream), 0)

    def live(self) -> Live:
        counts = (ctypes.c_uint64 * len(Live._fields))()
        self._library.standin_live(counts)
        return Live(*counts)

    def forget(self) -> None:
        """Write off what a broken context has lost."""
        self._library.standin_forget()

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
