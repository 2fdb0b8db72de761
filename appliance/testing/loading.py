"""Finds the policies to test: installed ones by name, others in a folder or by module and class."""

from __future__ import annotations

import importlib
import sys
import tomllib
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import NamedTuple

from appliance.errors import PolicyError, nearest
from appliance.hookspecs import ENTRY_POINTS


class Found(NamedTuple):
    """A policy's class, its name, and where it was found."""

    name: str
    kind: type
    source: str


def find(target: str) -> list[Found]:
    """The policies of a package's folder, of ``module:Class``, or of an installed name.

    A folder goes before a name. Raises `PolicyError`, with the traceback as its cause, when there
    is none or it cannot be imported.
    """
    folder = Path(target)
    if folder.is_dir():
        return _in_folder(folder)
    if ":" in target:
        sys.path.insert(0, str(Path.cwd()))
        return [_load(EntryPoint(target, target, ENTRY_POINTS), target)]
    installed = {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}
    if target not in installed:
        raise PolicyError(
            f"{target} is no folder, no MODULE:CLASS and no installed policy;"
            f" {nearest(target, sorted(installed))}"
        )
    entry = installed[target]
    version = "" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
    return [_load(entry, version)]


def _in_folder(folder: Path) -> list[Found]:
    """What its pyproject.toml says that it brings."""
    path = folder / "pyproject.toml"
    try:
        project = tomllib.loads(path.read_text(encoding="utf-8"))
        entries = dict(project["project"]["entry-points"][ENTRY_POINTS])
    except OSError as error:
        raise PolicyError(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PolicyError(f"{path}: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise PolicyError(f'{path} has no [project.entry-points."{ENTRY_POINTS}"]') from error
    source = folder / "src"
    sys.path.insert(0, str((source if source.is_dir() else folder).resolve()))
    importlib.invalidate_caches()
    return [
        _load(EntryPoint(name, str(value), ENTRY_POINTS), str(folder))
        for name, value in entries.items()
    ]


def _load(entry: EntryPoint, source: str) -> Found:
    try:
        kind = entry.load()
    except Exception as error:  # importing it runs a stranger's code
        raise PolicyError(f"policy {entry.name} cannot be imported: {error!r}") from error
    if not isinstance(kind, type):
        raise PolicyError(f"policy {entry.name}: {entry.value} is not a class")
    return Found(entry.name, kind, source)
