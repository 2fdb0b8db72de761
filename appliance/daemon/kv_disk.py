"""Carries out what the machine orders of KV on disk, in order, on a thread of its own."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import TypeAlias

from appliance.memory.kv_files import KvDamaged, KvFiles
from appliance.vocabulary import DropSpilledKv, Event, KvRestored, KvSpilled, RestoreKv, SpillKv

log = logging.getLogger("appliance.daemon")

DiskCommand: TypeAlias = SpillKv | RestoreKv | DropSpilledKv


class KvDisk:
    """`perform` returns at once; what came of a command is reported on the thread."""

    def __init__(self, files: KvFiles) -> None:
        self._files = files
        self._orders: queue.SimpleQueue[tuple[DiskCommand, float] | None] = queue.SimpleQueue()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def start(self, report: Callable[[Event], None]) -> None:
        """`report` is called on the thread."""
        self._thread = threading.Thread(
            target=self._run, args=(report,), name="kv-disk", daemon=True
        )
        self._thread.start()
        way = "past" if self._files.direct else "through"
        log.info("KV cache may go to %s, %s the page cache", self._files.folder, way)

    def perform(self, command: DiskCommand) -> None:
        """Have a command carried out after those before it."""
        self._orders.put((command, time.perf_counter()))

    def stop(self) -> None:
        """End what is under way, drop the rest, and delete all files. Waits for the disk."""
        self._stopping = True
        self._orders.put(None)
        if self._thread is not None:
            self._thread.join()
        self._files.close()

    def _run(self, report: Callable[[Event], None]) -> None:
        while (order := self._orders.get()) is not None and not self._stopping:
            command, given = order
            began = time.perf_counter()
            if isinstance(command, DropSpilledKv):
                self._files.delete(command.request)
                continue
            outcome: type[KvSpilled | KvRestored]
            if isinstance(command, SpillKv):
                outcome, moved = KvSpilled, self._write(command)
            else:
                outcome, moved = KvRestored, self._read(command)
            report(
                outcome(
                    model=command.model,
                    request=command.request,
                    ok=moved is not None,
                    moved_bytes=moved or 0,
                    seconds=time.perf_counter() - began,
                    queued_seconds=began - given,
                )
            )

    def _write(self, command: SpillKv) -> int | None:
        """The bytes written; None if the disk refuses."""
        try:
            return self._files.write(command.request, command.host_offsets, command.block_bytes)
        except OSError as error:
            log.warning("KV of %s stays in the host cache: %s", command.request, error)
            return None

    def _read(self, command: RestoreKv) -> int | None:
        """The bytes read; None if they are not what was written."""
        try:
            return self._files.read(command.request, command.host_offsets, command.block_bytes)
        except (OSError, KvDamaged) as error:
            log.warning("KV of %s is computed again: %s", command.request, error)
            return None
