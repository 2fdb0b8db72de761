"""Fetching a checkpoint, or a LoRA adapter, into the folder of models: from a directory, an
archive, a hub, or another box.

    SOURCE --files--> FOLDER/.NAME.part --verified, synced--> FOLDER/NAME

A file is in the part as a whole or not at all, so a pull that broke off goes on with the next one;
and a model is in the folder as a whole or not at all, so one that is there is not fetched again.
Weights are safetensors: what may run code when it is read (pickles) is never taken.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from appliance.checkpoints import delete
from appliance.checkpoints.adapters import (
    ADAPTER_CONFIG,
    ADAPTER_NAME,
    ADAPTER_WEIGHTS,
    check_adapter_config,
    full_name,
)
from appliance.checkpoints.checkpoint import CatalogEntry, read_checkpoint
from appliance.checkpoints.checksums import SUMS, read_sums
from appliance.checkpoints.families import check_family
from appliance.checkpoints.model_config import CONFIG, read_model_config
from appliance.checkpoints.peers.source import PARTS
from appliance.checkpoints.quantized.quantization import QUANTIZATION_FILE
from appliance.checkpoints.safetensors import read_header, verify_sums
from appliance.checkpoints.sources import (
    Progress,
    Source,
    Tell,
    Wanted,
    chosen,
    find_source,
    hub_source,
    is_taken,
)
from appliance.errors import CheckpointError, PullError
from appliance.platform.durable import sync
from appliance.units import human
from appliance.vocabulary import MODEL_NAME

_INDEX: Final = "model.safetensors.index.json"
ORIGIN: Final = ".origin"
"""In the part: what it is a part of. In the model: what it came from."""
NAME: Final = re.compile(MODEL_NAME)
"""As in the configuration."""

T = TypeVar("T")


Check = Callable[[str, Path, Tell], T]
"""What is to be found out of a folder that has a name, once it is whole; tells of it. Raises
`CheckpointError`."""


class Pulled(NamedTuple):
    """A checkpoint that is whole, and the name that it is to have."""

    name: str
    path: Path
    entry: CatalogEntry


def pull(
    source: str,
    folder: Path | None,
    name: str = "",
    *,
    link: bool = False,
    from_hub: bool = False,
    tell: Tell,
) -> Pulled:
    """Put what `source` names (see `sources`) into `folder`, as `name` or its own.

    With `link` it stays where it is, a directory, and is only verified. With `from_hub` no
    directory or archive is taken for `source`. `tell` hears how far it
    is, in the calling thread. Blocks for as long as it takes; what was fetched is kept if it
    breaks off. What was to be deleted stays if it is pulled again.

    Raises `PullError` for a source that is none or cannot be had, and for a name that is taken,
    `CheckpointError` if it is damaged or no checkpoint that can be served, `OSError`.
    """
    found = hub_source(source) if from_hub else find_source(source)
    return pull_found(found, source, folder, name, link=link, tell=tell)


def pull_found(
    found: Source, source: str, folder: Path | None, name: str = "", *, link: bool, tell: Tell
) -> Pulled:
    """The same of a source that was found, which errors call `source`."""
    model = name or found.name
    if not NAME.fullmatch(model):
        raise PullError(f"{model!r} cannot be a model's name: give another one")
    path, entry = _pull(_Pull(source, found, model), folder, _verified, link=link, tell=tell)
    return Pulled(model, path, entry)


def pull_adapter(
    source: str, folder: Path | None, base: str, name: str = "", *, link: bool = False, tell: Tell
) -> tuple[str, Path]:
    """The same with a LoRA adapter of the model `base`, which clients call ``base:name``. Whether
    it fits the base is found out when it is added. Returns its name and its folder."""
    found = find_source(source)
    own = name or found.name.rpartition("/")[2]
    if not ADAPTER_NAME.fullmatch(own):
        raise PullError(f"{own!r} cannot be an adapter's name: give another one")
    what = _Pull(source, found, full_name(base, own), adapter=True)
    path, _ = _pull(what, folder, _verified_adapter, link=link, tell=tell)
    return own, path


class _Pull(NamedTuple):
    """What is pulled, and what it is to be called."""

    text: str
    source: Source
    name: str
    adapter: bool = False


def _pull(
    what: _Pull, folder: Path | None, check: Check[T], *, link: bool, tell: Tell
) -> tuple[Path, T]:
    """Have it in the folder, or where it is, and checked."""
    if link:
        directory = what.source.directory
        if directory is None:
            raise PullError(f"{what.text} is no directory, which alone can be used in place")
        return directory, check(what.name, directory, tell)
    if folder is None:
        raise PullError("there is no folder for models: set catalog.folder, or give --dir")
    target = folder / folder_name(what.name)
    if target.exists():
        if not _came_from(what.text, what.source, target, tell):
            raise PullError(f"{target} is there already: give another name, or remove it first")
        delete.take_back(target)
        return target, check(what.name, target, tell)
    with _part(folder / f".{target.name}.part") as part:
        _fetch(what, part, tell)
        _drop_foreign_sums(part)
        found = check(what.name, part, tell)
        for left in (".hub", PARTS):
            shutil.rmtree(part / left, ignore_errors=True)
        sync(part)
        delete.take_back(target)  # of another that had the name
        part.rename(target)
    sync(folder)
    return target, found


def folder_name(model: str) -> str:
    """The name of a model's folder: a name has slashes, a folder has none."""
    return model.replace("/", "--")


@contextmanager
def _part(path: Path) -> Iterator[Path]:
    """The folder of what is not whole yet, for one pull at a time."""
    path.mkdir(parents=True, exist_ok=True)
    held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise PullError(
                f"another pull of the same name is under way in {path}: wait until it is over, "
                "then pull again"
            ) from error
        yield path
    finally:
        os.close(held)


def _fetch(what: _Pull, part: Path, tell: Tell) -> None:
    text, source = what.text, what.source
    if not _is_of(source, part):
        for old in part.iterdir():  # of another source, or of this one as it was
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        (part / ORIGIN).write_text(_origin(source), encoding="utf-8")
    listing = source.listing()
    taken, left_out = chosen(text, listing)
    if what.adapter and ADAPTER_CONFIG not in taken:
        raise PullError(f"{text} has no {ADAPTER_CONFIG}: that is no LoRA adapter")
    if ADAPTER_CONFIG in taken and CONFIG not in taken and not what.adapter:
        raise PullError(
            f"{text} has {ADAPTER_CONFIG} and no {CONFIG}: that is a LoRA adapter; pull it with "
            "--adapter-of MODEL"
        )
    for name in left_out:
        tell(Progress("left out", name))
    _drop_foreign_files(part, set(taken))
    needed = sum(listing[name] for name in taken)
    room = shutil.disk_usage(part).free + sum(
        file.stat().st_size for file in part.rglob("*") if file.is_file()
    )
    if needed > room:
        raise PullError(f"{text} takes {human(needed)}; {human(room)} are free on {part.parent}")
    # First what says whether it can be served, CONFIG last: the weights may take hours.
    first = [name for name in (ADAPTER_CONFIG, QUANTIZATION_FILE, CONFIG) if name in taken]
    for wanted in source.wanted([*first, *(name for name in taken if name not in first)]):
        _take(wanted, part, tell)
        if wanted.name == ADAPTER_CONFIG:
            check_adapter_config(part)
        elif wanted.name == CONFIG and not what.adapter:
            check_family(read_model_config(part))


def _origin(source: Source) -> str:
    return json.dumps(source.origin(), sort_keys=True)


def _is_of(source: Source, path: Path) -> bool:
    """Whether a part, or a model, is of this source."""
    record = path / ORIGIN
    return record.exists() and record.read_text(encoding="utf-8") == _origin(source)


def _came_from(text: str, source: Source, target: Path, tell: Tell) -> bool:
    """Whether a model is what pulling this source would make of it."""
    if not _is_of(source, target):
        return False
    taken, _ = chosen(text, source.listing())
    for wanted in source.wanted(taken):
        file = target / wanted.name
        if not file.is_file() or (wanted.name != SUMS and not _is(file, wanted)):
            return False  # some checksums may have been dropped
        tell(Progress("present", wanted.name, wanted.nbytes, wanted.nbytes))
    files = [file for file in target.rglob("*") if file.is_file()]
    return {file.relative_to(target).as_posix() for file in files} == {ORIGIN, *taken}


def _drop_foreign_files(part: Path, taken: set[str]) -> None:
    """Delete what an earlier pull took that the source has no more. Our own begins with a dot."""
    for path in sorted(part.rglob("*"), reverse=True):  # what is in a folder before the folder
        name = path.relative_to(part).as_posix()
        if name.startswith("."):
            continue
        if path.is_dir():
            with suppress(OSError):  # there is something in it
                path.rmdir()
        elif name not in taken:
            path.unlink()


def _take(wanted: Wanted, part: Path, tell: Tell) -> None:
    """Have one file in the part, whole and synced."""
    file = part / wanted.name
    if file.exists() and _is(file, wanted):
        tell(Progress("present", wanted.name, wanted.nbytes, wanted.nbytes))
        return
    done = 0

    def more(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if done > wanted.nbytes:
            raise PullError(f"{wanted.name} is longer than its {wanted.nbytes} bytes")
        if not nbytes:
            tell(Progress("waiting", wanted.name))
            return
        tell(Progress("fetching", wanted.name, done, wanted.nbytes))

    unfinished = part / ".unfinished"
    tell(Progress("fetching", wanted.name, 0, wanted.nbytes))
    wanted.write(unfinished, more)
    if done != wanted.nbytes:
        raise PullError(f"{wanted.name} is shorter than its {wanted.nbytes} bytes")
    if wanted.modified is not None:
        os.utime(unfinished, (wanted.modified, wanted.modified))
    sync(unfinished)
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished.replace(file)


def _is(file: Path, wanted: Wanted) -> bool:
    status = file.stat()
    same_time = wanted.modified in (None, int(status.st_mtime))
    return status.st_size == wanted.nbytes and same_time


def _verified(model: str, path: Path, tell: Tell) -> CatalogEntry:
    """Read all headers, and all files that have checksums. Raises `CheckpointError`."""
    tell(Progress("verifying"))
    entry = read_checkpoint(model, path)
    index = path / _INDEX
    if index.exists():
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = sorted(set(places.values()))
        tensors = {name: {t.name for t in read_header(path / name).tensors} for name in files}
        for tensor, file in places.items():
            if tensor not in tensors[file]:
                raise CheckpointError(f"{path / file} lacks {tensor}, which {index.name} names")
    verify_sums(path)
    return entry


def _verified_adapter(name: str, path: Path, tell: Tell) -> None:
    """The same of an adapter."""
    tell(Progress("verifying"))
    check_adapter_config(path)
    try:
        read_header(path / ADAPTER_WEIGHTS)
    except FileNotFoundError as error:
        raise PullError(f"{name} has no {ADAPTER_WEIGHTS}") from error
    verify_sums(path)


def _drop_foreign_sums(part: Path) -> None:
    """Of checksums, keep those of files that were not left out, so that a later comparison finds
    all files that they name."""
    try:
        sums = read_sums(part)
    except CheckpointError:
        return  # the comparison reports it
    kept = [one for one in sums if is_taken(one.file.relative_to(part).as_posix())]
    if len(kept) < len(sums):
        lines = [f"{one.expected}  {one.file.relative_to(part).as_posix()}\n" for one in kept]
        (part / SUMS).write_text("".join(lines), encoding="utf-8")
