"""Packed weights on disk, from outside: one start leaves them, the next one reads them."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from appliance.config.loader import load_config
from appliance.demo.checkpoints import make_checkpoints, write_config
from appliance.demo.run import free_port, running_daemon
from appliance.demo.traffic import burst, send
from tests.patience import PATIENCE_SECONDS

MODELS = ["llama-a", "qwen2-a"]
"""The writer goes last where processors are busy."""


class Box:
    """A configuration with a folder for images, and some chats."""

    def __init__(self, folder: Path, instances: int, ranks: int) -> None:
        make_checkpoints(folder, MODELS)
        self.images = folder / "images"
        self.file = write_config(
            folder, MODELS, instances=instances, bind=f"127.0.0.1:{free_port()}"
        )
        text = self.file.read_text()
        added = f'[devices]\nimages = "images"\ntensor_parallel = {ranks}\n'
        self.file.write_text(text.replace("[devices]\n", added))
        self.files = len(MODELS) * ranks
        self.chats = burst(MODELS, 1)

    def start(self) -> tuple[list[list[int]], str]:
        """Start a daemon, ask it, wait until all images are there, end it; answers and log."""
        with running_daemon(self.file, load_config(self.file)) as (url, _):
            answers = asyncio.run(send(url, self.chats, lambda _: None))
            assert [answer.error for answer in answers] == [None] * len(answers)
            deadline = time.monotonic() + PATIENCE_SECONDS
            while len(self.written()) < self.files:
                assert time.monotonic() < deadline, f"no images but {self.written()}"
                time.sleep(0.05)  # the daemon is another process: ask again and again
        log = self.file.with_name("daemon.log").read_text(errors="replace")
        return [answer.tokens for answer in answers], log

    def written(self) -> dict[str, int]:
        """When each of the whole images was written."""
        return {path.name: path.stat().st_mtime_ns for path in self.images.glob("*.packed")}


def test_instances_share_their_images(tmp_path: Path) -> None:
    """One image for each model, however many instances there are."""
    box = Box(tmp_path, instances=2, ranks=1)
    box.start()
    assert len(box.written()) == len(MODELS)


def test_a_second_start_reads_what_the_first_left(tmp_path: Path) -> None:
    """One image for each model and rank. The next start keeps those that are right, packs one anew
    that is not, removes images that no model wants, and answers the same."""
    box = Box(tmp_path, instances=1, ranks=2)
    tokens, log = box.start()
    first = box.written()
    assert len(first) == box.files
    assert str(box.images) not in log

    damaged = min(first)
    whole = (box.images / damaged).read_bytes()
    os.truncate(box.images / damaged, len(whole) - 1)
    (box.images / "gone-0123456789abcdef.packed").write_bytes(
        (box.images / max(first)).read_bytes()
    )
    (box.images / f"{damaged}.part").write_bytes(b"from a crash")

    again, log = box.start()
    assert again == tokens
    second = box.written()
    assert [line for line in log.splitlines() if "packing anew" in line] != []
    assert all(damaged in line for line in log.splitlines() if "packing anew" in line)
    assert second.keys() == first.keys()
    assert {name for name in first if first[name] != second[name]} == {damaged}
    assert (box.images / damaged).read_bytes() == whole
    assert sorted(path.name for path in box.images.iterdir()) == sorted(first)
