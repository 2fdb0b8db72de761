"""Single bits flipped at random in what the daemon keeps on disk.

    python -m tests.hostile.bit_flips [--flips 1000000] [--seed 0]

Each is repaired, or costs what is computed again, or is set aside or refused by name; none costs
another record, or keeps a daemon from starting. One flip in fifty is in the database or in an image
of weights, as a start reads all of those.
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

from appliance.access.keys import KeyFile, NewKey, make_key
from appliance.batches.files import FileStore, StoredFile
from appliance.batches.log import BatchLog, load_all
from appliance.batches.records import Batch
from appliance.batches.store import store_in
from appliance.config.admin_file import AdminFile
from appliance.config.layers import read_layers
from appliance.memory.host_tier import HostTier
from appliance.memory.kv_files import PAGE_BYTES, KvDamaged, KvFiles
from appliance.platform.database import Put
from appliance.vocabulary import ModelName
from tests.chaos.flips import flip_bit
from tests.unit.batches.test_records import LIFE, facts
from tests.unit.memory.test_images import Box

NOW: Final = 1_800_000_000.0
CONTENT: Final = b'{"custom_id": "a"}\n'
RARE: Final = 0.02
IN_MEMORY: Final = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Where folders are made, if that is there: nothing here is about the disk itself."""

Flips: TypeAlias = Callable[[random.Random], str]
"""Flips one bit; says what became of it. Raises `AssertionError` if more was lost than may be."""


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
        flip_bit(self._folder / name, draw.randrange(8 * len(state[name])))

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
        flip_bit(self._path, place)

        (batch,) = load_all(self._store, self._folder)

        assert batch.pending == [hit]
        flip_bit(self._path, place)
        self._store.write(self._rows)
        return "outcome computed again"


class KeyFlips:
    """In the file of keys: its copy is read."""

    def __init__(self, folder: Path) -> None:
        self._file = KeyFile(folder / "keys.json")
        for name in ("alice", "bob"):
            self._file.add(make_key(NewKey(name=name, models=(ModelName("m"),)), NOW)[0])
        self._content = self._file.path.read_bytes()
        self._keys = self._file.read()

    def __call__(self, draw: random.Random) -> str:
        self._file.path.write_bytes(flipped(self._content, draw))
        assert self._file.read_or_copy() == self._keys
        return "keys repaired"


class DropInFlips:
    """In the models that operators added: their copy is read."""

    def __init__(self, folder: Path) -> None:
        self._config = folder / "appliance.toml"
        self._config.write_text("")
        file = AdminFile(self._config)
        file.write('[[model]]\nname = "tiny"\npath = "/models/tiny"\nmax_queue = 8\n')
        self._path, self._content = file.path, file.path.read_bytes()
        self._document = read_layers(self._config).document

    def __call__(self, draw: random.Random) -> str:
        self._path.write_bytes(flipped(self._content, draw))
        assert read_layers(self._config).document == self._document
        return "drop-in repaired"


class SpillFlips:
    """In KV on disk: it is found, and the KV is computed again."""

    def __init__(self, folder: Path) -> None:
        self._host = HostTier.create(1 << 16)
        self._offsets = list(range(0, 1 << 16, PAGE_BYTES))
        self._files = KvFiles(folder / "kv", self._host)

    def __call__(self, draw: random.Random) -> str:
        self._files.write("r", self._offsets, PAGE_BYTES)
        (path,) = self._files.folder.glob("*.kv")
        flip_bit(path, draw.randrange(8 * path.stat().st_size))
        try:
            self._files.read("r", self._offsets, PAGE_BYTES)
        except KvDamaged:
            return "KV computed again"
        raise AssertionError(f"{path} was damaged unseen")


class ImageFlips:
    """In an image of weights: it is made anew from the checkpoint. `Box` compares all weights."""

    def __init__(self, folder: Path) -> None:
        self._box = Box(folder)
        self._box.first_start()
        self._path = self._box.shelf.path
        self._content = self._path.read_bytes()

    def __call__(self, draw: random.Random) -> str:
        self._path.write_bytes(flipped(self._content, draw))
        self._box.packed = 0
        self._box.fill(self._box.kept())
        return "image made anew" if self._box.packed else "image read; a gap was hit"


def flipped(content: bytes, draw: random.Random) -> bytes:
    damaged = bytearray(content)
    damaged[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    return bytes(damaged)


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
            found[draw.choice(rare if draw.random() < RARE else often)(draw)] += 1
    seconds = time.monotonic() - began
    print(f"{options.flips} bits flipped in {seconds:.0f} s: {dict(found)}")  # noqa: T201


def kinds(folder: Path) -> tuple[list[Flips], list[Flips]]:
    """Those that take milliseconds, and the others, each in a folder of its own."""
    made: list[Flips] = []
    for kind in (StoreFlips, ImageFlips, EntryFlips, KeyFlips, DropInFlips, SpillFlips):
        mine = folder / kind.__name__
        mine.mkdir()
        made.append(kind(mine))
    return made[:2], made[2:]


if __name__ == "__main__":
    main()
