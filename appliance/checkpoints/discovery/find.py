"""The checkpoints in directories: a directory that is one, else those in it and one level below.

A directory is taken for a checkpoint if it has a `config.json`, or weights. Whether the checkpoint
can be served is found out by those that read it (`appliance.config.starter`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from appliance.checkpoints import delete
from appliance.checkpoints.adapters import ADAPTER_CONFIG
from appliance.checkpoints.discovery.names import SNAPSHOTS, hub_folder, name_of
from appliance.checkpoints.model_config import CONFIG
from appliance.checkpoints.other_formats import GGUF
from appliance.errors import ApplianceError

LEVELS: Final = 2
"""How deep below a directory that was given checkpoints are looked for: ``ORG/MODEL``."""


class FoundModel(NamedTuple):
    """A checkpoint, and the name that it is served under."""

    name: str
    path: Path


class LeftOut(NamedTuple):
    """What looks like a model and is not served: why, and what to do."""

    path: Path
    wrong: str
    remedy: str
    clash: str = ""
    """The name that another checkpoint has as well, if that is the reason."""

    def __str__(self) -> str:
        named = "" if str(self.path) in self.wrong else f"{self.path}: "
        line = f"not served: {named}{self.wrong}; {self.remedy}"
        return line.encode(errors="backslashreplace").decode()


class Found(NamedTuple):
    """All of some directories, in the order of their names there."""

    models: tuple[FoundModel, ...]
    left_out: tuple[LeftOut, ...]
    looked_in: tuple[Path, ...] = ()
    """The directories, as they were given."""


class NotFound(ApplianceError):
    """A directory cannot be looked through, or names of models clash; the message has the
    remedy."""


def find_models(
    directories: Iterable[Path],
    named: Mapping[str, Path] | None = None,
    *,
    leave_out_clashes: bool = False,
) -> Found:
    """The checkpoints in `directories`, and those that are `named` each. A checkpoint that is
    named is not served under its directory's name as well. Raises `NotFound`, also for a name of
    several checkpoints, unless these are to be left out."""
    models = [FoundModel(name, _given(path)) for name, path in (named or {}).items()]
    left_out: list[LeftOut] = []
    directories = tuple(directories)
    seen = {model.path.resolve() for model in models}
    for directory in directories:
        for found in _look_at(_directory(directory)):
            if found.path.resolve() in seen:
                continue
            seen.add(found.path.resolve())
            if isinstance(found, FoundModel):
                models.append(found)
            else:
                left_out.append(found)
    if leave_out_clashes:
        models, clashing = _without_clashes(models)
        left_out += clashing
    else:
        _refuse_clashes(models)
    return Found(tuple(models), tuple(left_out), directories)


def _directory(path: Path) -> Path:
    """As an absolute path; links in it stay, as they may be names. Raises `NotFound`."""
    directory = Path(os.path.abspath(os.path.expanduser(path)))  # noqa: PTH100, PTH111
    with _readable(directory):
        if directory.suffix == ".gguf" and directory.is_file():
            raise NotFound(f"{path}: {GGUF}; convert or pull safetensors")
        if not directory.is_dir():
            raise NotFound(f"{path} is not a directory; give a directory with checkpoints in it")
    return directory


def _given(path: Path) -> Path:
    """The checkpoint in a directory that has a name of its own."""
    directory = _directory(path)
    if not is_text(str(directory)):
        raise NotFound(f"{_shown(directory)}: {_NO_TEXT}; {_RENAME}")
    with _readable(directory):
        return _snapshot(directory) or directory


def _look_at(directory: Path) -> Iterator[FoundModel | LeftOut]:
    with _readable(directory):
        yield from _checkpoints(directory, "", LEVELS)


@contextmanager
def _readable(directory: Path) -> Iterator[None]:
    """Raises `NotFound` for a directory that was given and cannot be read."""
    try:
        yield
    except OSError as error:
        wrong = f"{_shown(directory)} cannot be read ({error.strerror})"
        raise NotFound(f"{wrong}; make it readable") from None


def _checkpoints(folder: Path, below: str, levels: int) -> Iterator[FoundModel | LeftOut]:
    """What `folder` is, or has in it down to so many levels. Raises `OSError` if it cannot be
    read."""
    if (snapshot := _snapshot(folder)) is not None:
        yield _called(snapshot, below)
        return
    files = {file.name: file.suffix for file in folder.iterdir() if _is_file(file)}
    if ADAPTER_CONFIG in files and CONFIG not in files:
        yield LeftOut(
            folder,
            "is a LoRA adapter, not a model",
            f"add it to its model with `appliance pull {folder} --adapter-of MODEL`",
        )
        return
    if CONFIG in files or ".safetensors" in files.values():
        if not _is_going(folder):
            yield _called(folder, below)
        return
    for name in sorted(name for name, suffix in files.items() if suffix == ".gguf"):
        yield LeftOut(folder / name, GGUF, "convert or pull safetensors")
    if levels:
        yield from _children(folder, levels)


def _children(folder: Path, levels: int) -> Iterator[FoundModel | LeftOut]:
    """Of the directories in `folder`, which is no checkpoint."""
    below = "" if levels == LEVELS else folder.name
    for child in sorted(folder.iterdir()):
        if child.name.startswith("."):
            continue
        try:
            if child.is_dir():
                yield from _checkpoints(child, below, levels - 1)
        except OSError as error:
            yield LeftOut(child, f"cannot be read ({error.strerror})", "make it readable")


def _called(folder: Path, below: str) -> FoundModel | LeftOut:
    if not is_text(str(folder)):
        return LeftOut(folder, _NO_TEXT, _RENAME)
    if name := name_of(folder, below):
        return FoundModel(name, folder)
    return LeftOut(
        folder, "its name has no letter or digit of ASCII", f"name it: --model NAME={folder}"
    )


def _is_file(path: Path) -> bool:
    """Whether it is a file, or leads to one. A link that leads to where nothing can be read is
    none."""
    return os.path.isfile(path)  # noqa: PTH113


_NO_TEXT: Final = "its path is not UTF-8"
_RENAME: Final = "rename it"


def _shown(path: Path) -> str:
    """As text, whatever bytes are in it."""
    return str(path).encode(errors="backslashreplace").decode()


def is_text(path: str) -> bool:
    """Whether a configuration, which is UTF-8, can name the path."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def _snapshot(folder: Path) -> Path | None:
    """The snapshot that a folder of huggingface_hub's cache has checked out: that of `main`, else
    the newest one. None for other folders, and without a snapshot."""
    if hub_folder(folder) != folder:
        return None
    snapshots = folder / SNAPSHOTS
    main = folder / "refs" / "main"
    if main.is_file():
        revision = snapshots / main.read_text(encoding="utf-8", errors="replace").strip()
        if revision.parent == snapshots and revision.is_dir():
            return revision
    there = [one for one in snapshots.iterdir() if one.is_dir()]
    return max(there, key=lambda one: (one.stat().st_mtime_ns, one.name), default=None)


def _is_going(folder: Path) -> bool:
    """Whether `appliance rm` is to delete its files."""
    try:
        return delete.is_marked(folder)
    except OSError:
        return False


def _without_clashes(models: Iterable[FoundModel]) -> tuple[list[FoundModel], list[LeftOut]]:
    """The models with names of their own, and the others."""
    by_name: dict[str, list[Path]] = {}
    for model in models:
        by_name.setdefault(model.name, []).append(model.path)
    unique = [FoundModel(name, paths[0]) for name, paths in by_name.items() if len(paths) == 1]
    clashing = [
        LeftOut(path, f"{name} is the name of {path} and of {others}", "rename one of them", name)
        for name, paths in by_name.items()
        for path in paths
        if (others := ", ".join(str(other) for other in paths if other != path))
    ]
    return unique, clashing


def _refuse_clashes(models: Iterable[FoundModel]) -> None:
    """Raises `NotFound` for a name of several checkpoints."""
    known: dict[str, Path] = {}
    wrong = []
    for name, path in models:
        if name in known:
            wrong.append(
                f"{name} is the name of {known[name]} and of {path}; give one of them another "
                f"name: --model NAME={path}"
            )
        known.setdefault(name, path)
    if wrong:
        raise NotFound("\n".join(wrong))
