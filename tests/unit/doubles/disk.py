"""A disk that carries out commands in order, against a world that knows what the host tier holds.

It fails the test when a command asks for what cannot be: KV that is not in its places, a file that
is not there. Writes and reads fail when the test says so.
"""

from __future__ import annotations

from collections import deque

from appliance.vocabulary import DropSpilledKv, Event, KvRestored, KvSpilled, RestoreKv, SpillKv
from tests.unit.doubles.instance import World


class DiskDouble:
    """`work` carries out the next command and returns what it reports."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.queue: deque[SpillKv | RestoreKv | DropSpilledKv] = deque()
        self.files: dict[str, list[tuple[str, int, int]]] = {}
        """request -> what its blocks hold."""
        self.refuses = False
        """Whether writes fail."""
        self.damages = False
        """Whether reads fail."""

    def order(self, command: SpillKv | RestoreKv | DropSpilledKv) -> None:
        self.queue.append(command)

    @property
    def busy(self) -> bool:
        return bool(self.queue)

    def work(self) -> list[Event]:
        command = self.queue.popleft()
        match command:
            case SpillKv():
                return [self._write(command)]
            case RestoreKv():
                return [self._read(command)]
            case DropSpilledKv():
                self.files.pop(command.request, None)
                return []

    def _write(self, command: SpillKv) -> Event:
        assert command.request not in self.files, "written twice"
        life = self.world.lives[command.request]
        content = [self.world.host[offset] for offset in command.host_offsets]
        expected = [(command.request, n, life.kv_tokens) for n in range(len(content))]
        assert content == expected, "foreign KV"
        assert len(content) == self.world.models[life.model].kv.blocks(life.kv_tokens)
        if not self.refuses:
            self.files[command.request] = content
        return KvSpilled(
            model=command.model,
            request=command.request,
            ok=not self.refuses,
            moved_bytes=len(content) * command.block_bytes,
            seconds=0.001,
        )

    def _read(self, command: RestoreKv) -> Event:
        content = self.files.pop(command.request)
        assert len(content) == len(command.host_offsets), "a place for every block"
        ok = not self.damages
        for offset, block in zip(command.host_offsets, content, strict=True):
            # What was read in part is there, too.
            self.world.write_kv(offset, command.block_bytes, block if ok else ("damaged", 0, 0))
        return KvRestored(
            model=command.model,
            request=command.request,
            ok=ok,
            moved_bytes=len(content) * command.block_bytes if ok else 0,
            seconds=0.001,
        )
