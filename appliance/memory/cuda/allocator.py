"""What torch's allocator asks of us: memory of the pool, and to take it back.

Both are called from within torch, which knows one error only, that there is no memory. So all
others are logged here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from appliance.memory.arena import PoolExhausted
from appliance.memory.cuda.driver import call, relaxed_capture
from appliance.memory.runtime import RuntimeMemory

log = logging.getLogger("appliance.memory")


class RuntimeAllocator:
    """Gives out runtime memory, also while graphs are captured. Used from one thread."""

    def __init__(self, runtime: RuntimeMemory, capturing: Callable[[], bool]) -> None:
        """`capturing` tells whether this thread captures a graph now."""
        self._runtime = runtime
        self._capturing = capturing
        self._leaving: list[int] = []
        """Addresses that torch has given back, which the device may still use."""

    def take(self, nbytes: int) -> int | None:
        """Address of `nbytes` bytes, or None if there are none."""
        try:
            with relaxed_capture():
                try:
                    return self._runtime.take(nbytes)
                except PoolExhausted:
                    if self._capturing() or not self._leaving:
                        raise
                    self.let_go()
                    return self._runtime.take(nbytes)
        except (PoolExhausted, ValueError, OSError) as error:
            log.error("torch gets no memory: %s", error)
            return None

    def give(self, address: int) -> None:
        """Take memory back, at once if no graph is captured."""
        self._leaving.append(address)
        if self._capturing():
            return  # to wait for the device would spoil the graph
        try:
            self.let_go()
        except ValueError:
            log.exception("torch gives back what is not its own")
        except OSError as error:
            # `let_go` tries again.
            log.error("what torch gives back cannot be taken yet: %s", error)

    def let_go(self) -> None:
        """Give back to the pool what torch has given back, once the device is done with it.

        Raises `OSError`, after which it can be called again, and `ValueError` for what was never
        given out.
        """
        if not self._leaving:
            return
        with relaxed_capture():
            call("cuCtxSynchronize")
            while self._leaving:
                address = self._leaving.pop()
                try:
                    self._runtime.give(address)
                except OSError:
                    self._leaving.append(address)
                    raise
