"""What is recorded: a store, a file of keys and a drop-in that change, step by step.

    python -m tests.power_cut.workload FOLDER

After each step, a line in FOLDER/acks says what is to be found from then on.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from appliance.access.keys import KeyFile, NewKey, make_key
from appliance.batches.files import FileStore
from appliance.batches.log import BatchLog, delete_log, load_all
from appliance.batches.records import (
    Batch,
    Begun,
    CancelAsked,
    Created,
    Ended,
    LineDone,
    Record,
    Status,
)
from appliance.batches.store import store_in
from appliance.config.admin_file import AdminFile
from appliance.platform.database import Database
from appliance.platform.durable import make_folder

NOW = 1_800_000_000.0
CREATED = Created(
    at=NOW,
    id="batch_1",
    owner="me",
    endpoint="/v1/completions",
    input_file_id="file-1",
    completion_window="24h",
    expires_at=NOW + 100,
)


def outcome(request: int) -> LineDone:
    entry = msgspec.Raw(json.dumps({"answer": request, "text": "x" * 3000}).encode())
    return LineDone(at=NOW, request=request, ok=True, entry=entry)


@contextmanager
def opened(folder: Path) -> Iterator[tuple[Database, FileStore]]:
    """As a daemon opens its batches at a start."""
    make_folder(folder / "batches")
    store = store_in(folder)
    store.open()
    try:
        files = FileStore(store, folder / "files", max_bytes=1 << 30, keep_seconds=3600.0)
        files.open()
        yield store, files
    finally:
        store.close()


def look(folder: Path) -> dict[str, Any]:
    """What a daemon finds in a folder that starts now."""
    with opened(folder) as (store, files):
        found: dict[str, Any] = {
            "files": {file.filename: files.path(file.id).read_text() for file in files.all()},
            "batches": {},
        }
        for batch in load_all(store, folder / "batches"):
            log = BatchLog(store, folder / "batches", batch.id)
            entries = [json.loads(log.entry(place))["answer"] for place in log.outcomes()]
            found["batches"][batch.id] = [batch.status, batch.completed, entries]
            log.close()
    found["keys"] = [key.name for key in KeyFile(folder / "keys.json").read()]
    found["models"] = AdminFile(folder / "appliance.toml").edit().text().count("[[model]]")
    return found


def steps(
    folder: Path, store: Database, files: FileStore
) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Each does something, and changes what is to be found."""
    log = BatchLog(store, folder / "batches", "batch_1")
    keys, admin = KeyFile(folder / "keys.json"), AdminFile(folder / "appliance.toml")
    ids: dict[str, str] = {}

    def upload(name: str) -> Callable[[dict[str, Any]], None]:
        def step(expected: dict[str, Any]) -> None:
            coming = files.begin("me")
            files.extend(coming, name.encode() * 2000)
            ids[name] = files.keep(coming, name, NOW).id
            expected["files"][name] = name * 2000

        return step

    def remove(name: str) -> Callable[[dict[str, Any]], None]:
        def step(expected: dict[str, Any]) -> None:
            files.delete(ids[name])
            del expected["files"][name]

        return step

    def record(*records: Record) -> Callable[[dict[str, Any]], None]:
        def step(expected: dict[str, Any]) -> None:
            log.append(records)
            life.extend(records)
            describe(expected)

        return step

    life: list[Record] = []

    def describe(expected: dict[str, Any], *, entries: bool = True) -> None:
        batch = Batch.of(life)
        assert batch is not None
        done = sorted(one.request for one in life if isinstance(one, LineDone)) if entries else []
        expected["batches"]["batch_1"] = [batch.status, batch.completed, done]

    def write_output(expected: dict[str, Any]) -> None:
        chunks = [log.entry(place) + b"\n" for place in log.outcomes()]
        files.write("file-output-1", "me", "output", chunks, NOW)
        expected["files"]["output"] = b"".join(chunks).decode()

    def end(expected: dict[str, Any]) -> None:
        batch = Batch.of(life)
        assert batch is not None
        ended: Ended = batch.ended(NOW, Status.CANCELLED, "file-output-1")
        record(ended)(expected)

    def finish(expected: dict[str, Any]) -> None:
        ended = life[-1]
        assert isinstance(ended, Ended)
        log.finish(ended)
        describe(expected, entries=False)

    def forget(expected: dict[str, Any]) -> None:
        delete_log(store, folder / "batches", "batch_1")
        del expected["batches"]["batch_1"]

    def add_key(name: str) -> Callable[[dict[str, Any]], None]:
        def step(expected: dict[str, Any]) -> None:
            keys.add(make_key(NewKey(name=name), NOW)[0])
            expected["keys"].append(name)

        return step

    def revoke_key(expected: dict[str, Any]) -> None:
        keys.remove("alice")
        expected["keys"].remove("alice")

    def add_model(name: str) -> Callable[[dict[str, Any]], None]:
        def step(expected: dict[str, Any]) -> None:
            edit = admin.edit()
            edit.put(name, {"name": name, "path": f"/models/{name}"})
            admin.write(edit.text())
            expected["models"] += 1

        return step

    yield from (upload("a"), upload("b"), add_key("alice"), add_model("small"))
    yield from (record(CREATED), record(Begun(at=NOW, total=9)), record(outcome(3)))
    yield from (record(outcome(0), outcome(1)), remove("a"), record(outcome(2)), add_key("bob"))
    yield from (record(CancelAsked(at=NOW)), write_output, end, finish, upload("c"), revoke_key)
    yield from (forget, add_model("large"), remove("c"))
    log.close()


def main() -> None:
    folder = Path(sys.argv[1])
    acks = os.open(folder / "acks", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    expected: dict[str, Any] = {"files": {}, "batches": {}, "keys": [], "models": 0}
    with opened(folder) as (store, files):
        os.write(acks, json.dumps(expected).encode() + b"\n")
        for step in steps(folder, store, files):
            step(expected)
            os.write(acks, json.dumps(expected).encode() + b"\n")


if __name__ == "__main__":
    main()
