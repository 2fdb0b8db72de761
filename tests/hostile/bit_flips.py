"""Single bits flipped at random in what the daemon keeps on disk of batches and files.

    python -m tests.hostile.bit_flips [--flips 1000000] [--seed 0]

Each is repaired, or costs one outcome, which is computed again, or sets the record aside; none
costs another record. Half of the flips are in logs of batches, half in descriptions of files.
"""

from __future__ import annotations

import argparse
import logging
import random
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path

from appliance.batches.files import SET_ASIDE, FileStore, StoredFile
from appliance.batches.log import BatchLog
from tests.unit.batches.test_records import check_flip, whole_life

NOW = 1_800_000_000.0
CONTENT = b'{"custom_id": "a"}\n'
IN_MEMORY = Path("/dev/shm")
"""Where the folder is made, if that is there: nothing here is about the disk itself."""


def flip_logs(folder: Path, flips: int, draw: random.Random) -> None:
    """Logs of a batch at each point of its life, and the short one of a batch that is over."""
    life = whole_life()
    lives = [life[:records] for records in range(1, len(life) + 1)] + [[life[0], life[-1]]]
    contents = []
    for number, records in enumerate(lives):
        path = folder / f"life-{number}.jsonl"
        log = BatchLog(path)
        log.append(records)
        log.close()
        contents.append(path.read_bytes())
    path = folder / "batch_1.jsonl"
    for _ in range(flips):
        number = draw.randrange(len(lives))
        check_flip(path, lives[number], contents[number], draw.randrange(8 * len(contents[number])))


def flip_descriptions(folder: Path, flips: int, draw: random.Random) -> Counter[str]:
    """One of three files has its description damaged; what became of it, counted."""
    store = FileStore(folder, max_bytes=1 << 20, keep_seconds=3600.0)
    store.open()
    files: list[StoredFile] = []
    for name in ("a", "b", "c"):
        upload = store.begin("owner")
        store.extend(upload, CONTENT)
        files.append(store.keep(upload, name, NOW))
    found: Counter[str] = Counter()
    for _ in range(flips):
        file = draw.choice(files)
        description = folder / f"{file.id}.json"
        whole = description.read_bytes()
        place = draw.randrange(8 * len(whole))
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        description.write_bytes(damaged)

        again = FileStore(folder, max_bytes=1 << 20, keep_seconds=3600.0)
        again.open()
        for other in files:
            if other is not file or again.find(file.id) is not None:
                assert again.find(other.id) == other
                assert again.path(other.id).read_bytes() == CONTENT
        if again.find(file.id) is None:
            found["set aside"] += 1
            aside = folder / SET_ASIDE
            assert (aside / description.name).read_bytes() == bytes(damaged)
            (aside / again.path(file.id).name).rename(again.path(file.id))
            (aside / description.name).unlink()
        else:
            found["read"] += 1
        description.write_bytes(whole)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flips", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.disable(logging.ERROR)  # a line for each
    draw = random.Random(options.seed)
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(dir=IN_MEMORY if IN_MEMORY.is_dir() else None))
    try:
        (folder / "files").mkdir()
        described = flip_descriptions(folder / "files", options.flips // 2, draw)
        flip_logs(folder, options.flips - options.flips // 2, draw)
    finally:
        shutil.rmtree(folder)
    seconds = time.monotonic() - began
    print(  # noqa: T201
        f"{options.flips} bits flipped in {seconds:.0f} s; descriptions: {dict(described)}"
    )


if __name__ == "__main__":
    main()
