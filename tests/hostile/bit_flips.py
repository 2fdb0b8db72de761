"""Single bits flipped at random in what the daemon keeps on disk.

    python -m tests.hostile.bit_flips [--flips 1000000] [--seed 0]

Each is repaired, or costs what is computed again, or is set aside or refused by name; none costs
another record, or keeps a daemon from starting. One flip in fifty is in the database, whose start
reads all of it.
"""

from __future__ import annotations

import argparse
import logging
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeAlias

from appliance.batches.files import FileStore, StoredFile
from appliance.batches.log import BatchLog, load_all
from appliance.batches.records import Batch
from appliance.batches.store import store_in
from appliance.platform.database import Put
from tests.unit.batches.test_records import LIFE, facts

NOW: Final = 1_800_000_000.0
CONTENT: Final = b'{"custom_id": "a"}\n'
DATABASE_SHARE: Final = 0.02
IN_MEMORY: Final = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Where folders are made, if that is there: nothing here is about the disk itself."""

Flips: TypeAlias = Callable[[random.Random], str]
"""Flips one bit; says what became of it. Raises `AssertionError` if more was lost than may be."""


def flip(path: Path, place: int) -> None:
    """Flip a bit of a file."""
    with path.open("r+b") as file:
        file.seek(place // 8)
        (byte,) = file.read(1)
        file.seek(place // 8)
        file.write(bytes([byte ^ 1 << place % 8]))


class StoreFlips:
    """In the database of a batch with three outcomes and three files, or in its logs: as a kill
    leaves them, and as a stop does."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._states: list[dict[str, bytes]] = []
        store = store_in(folder)
        store.open()
        files = FileStore(store, folder / "files", max_bytes=1 << 20, keep_seconds=3600.0)
        files.open()
        for name in "abc":
            files.write(f"file-{name}", "owner", name, [CONTENT], NOW)
        log = BatchLog(store, folder, "batch_1")
        log.append(LIFE)
        log.close()
        self._remember()
        store.close()
        self._remember()
        batch, self._files = self._start()
        self._facts = facts(batch)

    def __call__(self, draw: random.Random) -> str:
        state = draw.choice(self._states)
        shutil.rmtree(self._folder)
        for name, content in state.items():
            path = self._folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        name = draw.choice([name for name in state if ".sqlite" in name and state[name]])
        flip(self._folder / name, draw.randrange(8 * len(state[name])))

        batch, files = self._start()

        assert facts(batch) == self._facts
        assert files == self._files
        aside = (self._folder / "set-aside").exists()
        return "database repaired, copy set aside" if aside else "database repaired"

    def _start(self) -> tuple[Batch, list[StoredFile]]:
        store = store_in(self._folder)
        store.open()
        try:
            (batch,) = load_all(store, self._folder)
            files = FileStore(store, self._folder / "files", max_bytes=1 << 20, keep_seconds=1.0)
            files.open()
            return batch, files.all()
        finally:
            store.close()

    def _remember(self) -> None:
        found = [path for path in self._folder.rglob("*") if path.is_file()]
        self._states.append(
            {str(path.relative_to(self._folder)): path.read_bytes() for path in found}
        )


class EntryFlips:
    """In the entries of a batch: each costs one outcome, which is computed again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._store = store_in(folder)
        self._store.open()
        self._log = BatchLog(self._store, folder, "batch_1")
        self._log.append(LIFE)
        (self._path,) = folder.glob("*.entries")
        self._rows = [
            Put(table, row) for table in ("records", "outcomes") for row in self._store.rows(table)
        ]

    def __call__(self, draw: random.Random) -> str:
        place = draw.randrange(8 * self._path.stat().st_size)
        (hit,) = (
            outcome.request
            for outcome in self._log.outcomes()
            if outcome.offset <= place // 8 < outcome.offset + outcome.size
        )
        flip(self._path, place)

        (batch,) = load_all(self._store, self._folder)

        assert batch.pending == [hit]
        flip(self._path, place)
        self._store.write(self._rows)
        return "outcome computed again"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flips", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.disable(logging.ERROR)  # a line for each
    draw = random.Random(options.seed)
    began = time.monotonic()
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as name:
        rare, often = kinds(Path(name))
        for _ in range(options.flips):
            found[draw.choice(rare if draw.random() < DATABASE_SHARE else often)(draw)] += 1
    seconds = time.monotonic() - began
    print(f"{options.flips} bits flipped in {seconds:.0f} s: {dict(found)}")  # noqa: T201


def kinds(folder: Path) -> tuple[list[Flips], list[Flips]]:
    """Those that take milliseconds, and the others, each in a folder of its own."""
    made: list[Flips] = []
    for kind in (StoreFlips, EntryFlips):
        mine = folder / kind.__name__
        mine.mkdir()
        made.append(kind(mine))
    return made[:1], made[1:]


if __name__ == "__main__":
    main()
