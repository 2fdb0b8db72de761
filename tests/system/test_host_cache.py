"""The host cache, from outside: one copy for the whole box, and models that have no room in it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path

from appliance import journal
from appliance.checkpoints.checkpoint import read_checkpoint
from appliance.config.loader import load_config
from appliance.config.sizing import kv_floor_slabs
from appliance.demo.checkpoints import write_config
from appliance.demo.recipes import RECIPES
from appliance.demo.run import free_port, running_daemon
from appliance.demo.traffic import ChatRequest, send
from appliance.vocabulary import ModelLoaded, StoreWeights
from tests.patience import PATIENCE_SECONDS
from tests.system.conftest import Appliance, memfds

SLAB = 512 << 10


def test_one_copy_for_two_instances(
    checkpoints: Path,
    chats: list[ChatRequest],
    expected: dict[ChatRequest, list[int]],
    tmp_path: Path,
) -> None:
    """Both workers have the master images they loaded from in memory, and they are the same pages:
    all processes together hold the bytes of the host cache once."""
    names = ["llama-a", "qwen2-a"]
    mine = [chat for chat in chats if chat.model in names][:4]
    file = _config(checkpoints, tmp_path, names, "64MiB")
    config = load_config(file)
    weights = {name: _weight_bytes(checkpoints, name) for name in names}
    with running_daemon(file, config) as (url, pid):
        appliance = Appliance(url, pid, config, tmp_path / "journal")
        answers = asyncio.run(send(url, mine, lambda _: None))
        assert [answer.tokens for answer in answers] == [expected[chat] for chat in mine]
        _wait_for_log(tmp_path / "daemon.log", "page-locked")
        (cache,) = memfds(pid, "appliance-host")
        workers = appliance.worker_pids()
        sizes = {who: _host_cache_sizes(who) for who in (pid, *workers)}
        once = cache.st_blocks * 512
        for who, (rss, pss) in sizes.items():
            name = "daemon" if who == pid else "worker"
            print(f"{name} {who}: Rss {rss:,} Pss {pss:,} of {once:,} bytes")  # noqa: T201
        assert sizes[pid][0] >= sum(weights.values()), "the daemon filled them all"
        assert sum(rss for rss, _ in sizes.values()) > 1.5 * once
        # The kernel rounds every page's share down.
        assert 0.98 * once < sum(pss for _, pss in sizes.values()) <= once
        held = {stat.st_ino for who in (pid, *workers) for stat in memfds(who, "appliance-host")}
        assert held == {cache.st_ino}
    # Which of the two models a worker is given depends on who is first with what.
    for instance, worker in enumerate(workers):
        loaded = _loaded(tmp_path / "journal", instance)
        assert sizes[worker][0] >= min(weights[name] for name in loaded), "it sees what it loaded"


def test_models_without_room_come_from_their_files(
    checkpoints: Path,
    chats: list[ChatRequest],
    expected: dict[ChatRequest, list[int]],
    tmp_path: Path,
) -> None:
    """With room for two of six master images every model is served, with the same tokens; a pinned
    one stays, and what has no image is read from its files."""
    names = [recipe.name for recipe in RECIPES]
    pinned, mine = "qwen2-a", chats[:12]
    file = _config(checkpoints, tmp_path, names, "512MiB", pin=pinned)
    config = load_config(file)
    entries = [read_checkpoint(m.name, Path(m.path), m.dtype) for m in config.models]
    images = sorted((entry.weight_bytes for entry in entries), reverse=True)
    room = kv_floor_slabs(config, entries) + sum(-(-size // SLAB) for size in images[:2])
    file = _config(checkpoints, tmp_path, names, f"{room * 512}KiB", pin=pinned)
    config = load_config(file)
    with running_daemon(file, config) as (url, pid):
        appliance = Appliance(url, pid, config, tmp_path / "journal")
        answers = asyncio.run(send(url, mine, lambda _: None))
        assert [answer.error for answer in answers] == [None] * len(mine)
        assert [answer.tokens for answer in answers] == [expected[chat] for chat in mine]
        (cache,) = memfds(pid, "appliance-host")
        assert cache.st_blocks * 512 <= room * SLAB
        metrics = appliance.metrics()
        assert ("appliance_host_bytes", "") in metrics
        read = [_bytes_read(worker) for worker in appliance.worker_pids()]
    assert "devices.host_cache has no room for the weights of" in _log(tmp_path)
    stored, loads = _stores_and_loads(tmp_path / "journal")
    print(f"loads: {dict(loads)}; bytes read by the workers: {read}")  # noqa: T201
    assert len({offsets for offsets, _ in stored[pinned] if offsets}) == 1, "it never moves"
    assert sum(fill for _, fill in stored[pinned]) == 1, "it is never dropped"
    assert loads["files"] > 0
    assert loads["images"] > 0
    # Each image once, and something from the files again.
    assert sum(read) > sum(images)


def _config(
    checkpoints: Path, folder: Path, names: list[str], host_cache: str, pin: str = ""
) -> Path:
    """A configuration in `folder`, with a journal, for checkpoints that lie elsewhere."""
    text = write_config(
        checkpoints,
        names,
        host_cache=host_cache,
        bind=f"127.0.0.1:{free_port()}",
        policy="aegaeon",  # it switches in every round, whichever model could wait
    ).read_text()
    if pin:
        line = f'name = "{pin}"\n'
        assert line in text
        text = text.replace(line, f"{line}pin = true\n")
    file = folder / "appliance.toml"
    file.write_text(f"{text}\n[journal]\npath = 'journal'\n")
    return file


def _weight_bytes(checkpoints: Path, name: str) -> int:
    return read_checkpoint(name, checkpoints / name, "float32").weight_bytes


def _log(folder: Path) -> str:
    return (folder / "daemon.log").read_text(errors="replace")


def _wait_for_log(log: Path, words: str) -> None:
    """The daemon is another process: ask again and again."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while words not in log.read_text(errors="replace"):
        assert time.monotonic() < deadline, f"the log never said {words!r}"
        time.sleep(0.05)


def _host_cache_sizes(pid: int) -> tuple[int, int]:
    """Rss and Pss of a process's mappings of the host cache, bytes."""
    sums: Counter[str] = Counter()
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            inside = "/memfd:appliance-host" in line
        elif inside and line.startswith(("Rss:", "Pss:")):
            key, size, _ = line.split()
            sums[key] += int(size) * 1024
    return sums["Rss:"], sums["Pss:"]


def _bytes_read(pid: int) -> int:
    """By system calls that read, since the process began."""
    for line in Path(f"/proc/{pid}/io").read_text().splitlines():
        if line.startswith("rchar:"):
            return int(line.split()[1])
    raise AssertionError("the kernel tells no rchar")


def _loaded(path: Path, instance: int) -> set[str]:
    """The models whose weights an instance has had."""
    _, entries = journal.read(path)
    loads = (entry.event for entry in entries if isinstance(entry.event, ModelLoaded))
    return {load.model for load in loads if load.instance == instance}


def _stores_and_loads(
    path: Path,
) -> tuple[dict[str, list[tuple[tuple[int, ...], bool]]], Counter[str]]:
    """What became of each model's image (places, whether they were filled), and how many loads
    came from an image or from files."""
    _, entries = journal.read(path)
    stored: dict[str, list[tuple[tuple[int, ...], bool]]] = {}
    attached: dict[tuple[int, str], bool] = {}
    loads: Counter[str] = Counter()
    for entry in entries:
        if isinstance(entry.event, ModelLoaded):
            key = (entry.event.instance, entry.event.model)
            loads["images" if attached[key] else "files"] += 1
        for command in entry.commands:
            if isinstance(command, StoreWeights):
                stored.setdefault(command.model, []).append((command.host_offsets, command.fill))
                attached[command.instance, command.model] = bool(command.host_offsets)
    return stored, loads
