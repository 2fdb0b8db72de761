"""The daemon's calls that a worker answers in threads of their own, while its main thread computes:
guides are compiled, and the map of the pool is drawn.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import NoReturn

from appliance.engines.protocol import Engine, GuideRefused
from appliance.memory.arena import Arena
from appliance.memory.slab_maps import pool_map
from appliance.memory.swapper import Swapper
from appliance.vocabulary import InstanceId, ModelName
from appliance.worker import frames
from appliance.worker.mailbox import Mailbox
from appliance.worker.outbox import Send

GUIDE_THREADS = 4

log = logging.getLogger("appliance.worker")


class Background:
    """Takes the calls from the mailbox. The threads end with the process."""

    def __init__(
        self,
        instance: InstanceId,
        engines: Mapping[ModelName, Engine],
        arena: Arena,
        swapper: Swapper,
        mailbox: Mailbox,
        send: Send,
    ) -> None:
        """`engines` are those that are built now."""
        self._instance = instance
        self._engines = engines
        self._arena = arena
        self._swapper = swapper
        self._mailbox = mailbox
        self._send = send

    def start(self) -> None:
        """Answer from now on. A guide that takes long holds up no other while a thread is left."""
        for _ in range(GUIDE_THREADS):
            threading.Thread(target=self._prepare_guides, name="guides", daemon=True).start()
        threading.Thread(target=self._tell_slabs, name="slabs", daemon=True).start()

    def _prepare_guides(self) -> NoReturn:
        while True:
            self.prepare_guide(self._mailbox.guides.get())

    def prepare_guide(self, message: frames.PrepareGuide) -> None:
        """Compile a guide. Nothing is done for a model that is not built: its requests bring
        their guides."""
        engine = self._engines.get(message.model)
        refused: str | None = None
        try:
            if engine is not None:
                engine.prepare(message.body)
        except GuideRefused as error:
            refused = str(error)
        except Exception as error:  # a defect must not end the thread
            log.exception("a guide of %s could not be compiled", message.model)
            refused = f"{type(error).__name__}: {error}"
        self._send([frames.GuidePrepared(self._instance, message.number, refused)])

    def _tell_slabs(self) -> NoReturn:
        while True:
            self._mailbox.slabs_asked.wait()
            self._mailbox.slabs_asked.clear()
            try:
                slabs = pool_map(self._arena, self._swapper)
            except Exception:  # a defect must not end the thread; the daemon's wait has an end
                log.exception("the map of the pool could not be drawn")
            else:
                self._send([frames.SlabsReported(self._instance, slabs)])
