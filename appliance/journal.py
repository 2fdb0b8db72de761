"""The record of a run: the machine's events, their times and its commands. One JSON line each.

The first line describes the machine. Replaying the rest through a fresh one must give the same
commands; where it does not, policy, time or randomness leaked into the decisions.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import msgspec

from appliance.errors import IllegalTransition, LedgerError
from appliance.memory.ledger import DiskLedger, HostLedger
from appliance.policies.loader import load_stack
from appliance.policies.stack import PolicyStack
from appliance.scheduling.cost_model import FIRST_GUESS_LOAD_BYTES_PER_SECOND, CostModel
from appliance.scheduling.machine import Machine
from appliance.service.policy_report import Missed, PolicyChoice, PolicyChosen, PolicyEnabled
from appliance.vocabulary import AnyCommand, AnyEvent, Command, Event, ModelSpec, Word


class Setup(Word, frozen=True, kw_only=True):
    """What a machine is made of."""

    models: tuple[ModelSpec, ...]
    instances: int
    host_bytes: int
    slab_bytes: int
    kv_floor_slabs: int = 0
    """Slabs of the host tier that weights never take."""
    disk_bytes: int = 0
    """Room for KV on disk."""
    load_bytes_per_second: float = FIRST_GUESS_LOAD_BYTES_PER_SECOND
    """At which weights are expected to load until some were."""
    policy: PolicyChoice

    def stack(
        self,
        *,
        budget_seconds: float | None = None,
        observe: Callable[[str, float], None] | None = None,
    ) -> PolicyStack:
        """Its policies, as `load_stack` makes them. Raises what that raises."""
        return load_stack(self.policy, budget_seconds=budget_seconds, observe=observe)

    def machine(self, stack: PolicyStack | None = None) -> Machine:
        """A fresh machine, on these policies or its own. Raises what `stack` raises."""
        host = HostLedger(self.host_bytes, self.slab_bytes, self.kv_floor_slabs)
        disk = DiskLedger(self.disk_bytes)
        costs = CostModel(self.models, load_bytes_per_second=self.load_bytes_per_second)
        return Machine(self.models, self.instances, host, stack or self.stack(), costs, disk)


class Entry(Word, frozen=True):
    """One event, when it was handled, and the commands that followed; `missed` are the questions
    that policies had no answer to in time."""

    now: float
    event: AnyEvent | PolicyChosen | PolicyEnabled
    commands: list[AnyCommand]
    missed: tuple[Missed, ...] = ()


class Difference(Word, frozen=True):
    """Line `line` of the journal (from 1), on `event`, was answered otherwise in the replay."""

    line: int
    event: Event
    recorded: Sequence[Command]
    replayed: Sequence[Command]


class Journal:
    """Writes a run to a file, buffered; a context manager that closes it.

    The file of an earlier run is kept next to it, with ``.previous`` after its name.
    """

    def __init__(self, path: Path, setup: Setup, *, max_bytes: int | None = None) -> None:
        if path.exists():
            path.replace(path.with_name(f"{path.name}.previous"))
        self._encoder = msgspec.json.Encoder()
        self._room = math.inf if max_bytes is None else max_bytes
        self._file: BinaryIO = path.open("wb")
        self._write(setup)

    def record(
        self, now: float, event: Event, commands: list[Command], missed: Sequence[Missed] = ()
    ) -> None:
        """Raises `OSError` if the journal has `max_bytes`, or the disk does not take more: it ends
        there. What was written can be replayed."""
        line: dict[str, object] = {"now": now, "event": event, "commands": commands}
        self._write(line | {"missed": missed} if missed else line)

    def flush(self) -> None:
        """Have other processes see all of it. Raises `OSError`."""
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _write(self, line: object) -> None:
        data = self._encoder.encode(line) + b"\n"
        self._room -= len(data)
        if self._room < 0:
            raise OSError(errno.EFBIG, "it is as large as journal.max_size allows")
        self._file.write(data)


def read(path: Path) -> tuple[Setup, Iterator[Entry]]:
    """What a journal says. Raises `msgspec.DecodeError` for a line of another form.

    A last line that was cut off, as a killed daemon leaves it, is passed over.
    """
    with path.open("rb") as file:
        setup = msgspec.json.decode(file.readline(), type=Setup)
    return setup, _entries(path)


def _entries(path: Path) -> Iterator[Entry]:
    decoder = msgspec.json.Decoder(Entry)
    with path.open("rb") as file:
        file.readline()
        for line in file:
            if line.endswith(b"\n"):
                yield decoder.decode(line)


class Replay:
    """A fresh machine that gets another one's events, and has its policies changed as that
    one had. What policies missed then they miss again: they are not asked."""

    def __init__(self, setup: Setup) -> None:
        """Raises `PolicyError` if the policies cannot be loaded."""
        self.stack = setup.stack()
        self.machine = setup.machine(self.stack)

    def step(self, entry: Entry) -> list[Command]:
        """The commands that follow from an entry here. Raises what `Machine.handle` raises."""
        match entry.event:
            case PolicyChosen(choice=choice):
                self.stack = load_stack(choice)
                self.stack.expect(entry.missed)
                return self.machine.set_policy(self.stack, entry.now)
            case PolicyEnabled(policy=policy):
                self.stack.enable(policy)
                return []
            case event:
                self.stack.expect(entry.missed)
                return self.machine.handle(event, entry.now)


def replay(path: Path) -> tuple[int, list[Difference]]:
    """Number of events replayed, and every line where the commands differ from the recorded.

    After a difference the recorded events may contradict the machine; the replay ends there.
    """
    setup, entries = read(path)
    again = Replay(setup)
    count = 0
    differences: list[Difference] = []
    for line, entry in enumerate(entries, start=2):
        try:
            replayed = again.step(entry)
        except (IllegalTransition, LedgerError):
            if not differences:
                raise
            break
        count += 1
        if replayed != entry.commands:
            found = Difference(
                line=line, event=entry.event, recorded=entry.commands, replayed=replayed
            )
            differences.append(found)
    return count, differences
