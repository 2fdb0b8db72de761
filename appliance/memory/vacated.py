"""Vacated slabs: they have no owner any more, and still lie under the address of the last one.

Unmapping takes a GPU's driver a good third of what a link takes to copy as much, and nothing needs
it before the slab is mapped elsewhere or its old address gets another. So a few are unmapped at
once, and many by a thread that ends with the last of them; a mapping that needs such a slab sooner
unmaps it first:

    vacate    | in line: run, run, run | being unmapped |   the thread, without the arena's lock
                      ^ a mapping takes out what it needs    ^ a mapping waits for that
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from appliance.memory.vmm import Vmm

AT_ONCE_SLABS: Final = 8
"""So many are unmapped by the thread that vacates them: it would take as long to start another."""

RUN_SLABS: Final = 32
"""What is unmapped by one call, which a mapping may have to wait for: half a millisecond on an H200
with slabs of 2 MiB."""

log = logging.getLogger("appliance.memory.vacated")


class VacatedSlabs:
    """Used with `changed` held, which is the arena's lock; `cleared` hears of each slab that lies
    under no address any more, with it held, too."""

    def __init__(
        self,
        vmm: Vmm,
        changed: threading.Condition,
        cleared: Callable[[int], None],
        at_once_slabs: int = AT_ONCE_SLABS,
    ) -> None:
        self._vmm = vmm
        self._changed = changed
        self._cleared = cleared
        self._at_once = at_once_slabs
        self._slabs: dict[int, int] = {}  # by address
        self._addresses: dict[int, int] = {}  # by slab
        self._line: deque[int] = deque()  # addresses; those that were cleared since count for none
        self._busy: frozenset[int] = frozenset()  # addresses that the thread is unmapping
        self._thread: threading.Thread | None = None

    def __contains__(self, slab: int) -> bool:
        return slab in self._addresses

    def addresses(self) -> dict[int, int]:
        """The slabs by their old addresses."""
        return dict(self._slabs)

    def add(self, slabs: Mapping[int, int]) -> None:
        """These, by address, have no owner any more. What the system refuses to unmap is tried
        again before the slab or the address is used."""
        self._slabs.update(slabs)
        self._addresses.update((slab, address) for address, slab in slabs.items())
        if len(slabs) <= self._at_once:
            try:
                self.clear(slabs)
            except OSError as error:
                _log_refusal(error)
            return
        self._line.extend(sorted(slabs))
        if self._thread is not None:
            return
        thread = threading.Thread(target=self._unmap_all, name="unmap", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the system has no room for another thread
            _log_refusal(error)
        else:
            self._thread = thread

    def clear_for(self, addresses: Iterable[int], slabs: Iterable[int]) -> None:
        """Before these slabs are mapped under these addresses. Raises `OSError`."""
        self.clear([*addresses, *(self._addresses[slab] for slab in slabs if slab in self)])

    def clear_within(self, address: int, nbytes: int) -> None:
        """Before this range is given back. Raises `OSError`."""
        self.clear([place for place in self._slabs if address <= place < address + nbytes])

    def clear(self, addresses: Iterable[int]) -> None:
        """Unmap what is left of these. Raises `OSError`, with some unmapped perhaps."""
        wanted = set(addresses)
        while wanted := wanted & self._slabs.keys():
            for first, count in self._runs(sorted(wanted - self._busy)):
                self._vmm.unmap(first, count)
                self._forget(range(first, first + count * self._vmm.slab_bytes))
            if wanted & self._busy:
                self._changed.wait()

    def settle(self) -> None:
        """Return when nothing is in line: what is left then was refused."""
        self._changed.wait_for(lambda: self._thread is None)

    def _forget(self, places: range) -> None:
        """They are unmapped."""
        for address in places[:: self._vmm.slab_bytes]:
            slab = self._slabs.pop(address)
            del self._addresses[slab]
            self._cleared(slab)

    def _unmap_all(self) -> None:
        """The thread."""
        with contextlib.suppress(OSError):  # what is broken shows with the first run
            self._vmm.adopt_thread()
        while True:
            with self._changed:
                places = self._next_run()
                if not places:
                    self._thread = None
                    self._changed.notify_all()
                    return
            unmapped = False
            try:
                self._vmm.unmap(places.start, len(places) // self._vmm.slab_bytes)
                unmapped = True
            except Exception as error:  # mappings wait for this thread: it must go on
                _log_refusal(error)
            with self._changed:
                self._busy = frozenset()
                if unmapped:
                    self._forget(places)
                self._changed.notify_all()

    def _next_run(self) -> range:
        """The bytes of the first run in line, which is busy from now on; empty if there is none."""
        size, start, count = self._vmm.slab_bytes, 0, 0
        while self._line and count < RUN_SLABS:
            address = self._line[0]
            if address in self._slabs:
                if count and address != start + count * size:
                    break
                start = start if count else address
                count += 1
            self._line.popleft()
        places = range(start, start + count * size)
        self._busy = frozenset(places[::size])
        return places

    def _runs(self, addresses: list[int]) -> Iterator[tuple[int, int]]:
        """Address and slabs of every stretch of neighbours."""
        start = 0
        for i, address in enumerate(addresses, 1):
            if i == len(addresses) or addresses[i] != address + self._vmm.slab_bytes:
                yield addresses[start], i - start
                start = i


def _log_refusal(error: Exception) -> None:
    log.warning("slabs stay mapped until they are used again: %s", error)
