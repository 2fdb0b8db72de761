"""Folders and files that look like a model, but not in a format that is read: what they are, and
what to do about it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from appliance.errors import CheckpointError, RemediedCheckpointError

GGUF: Final = "GGUF is not supported"
_POINTER: Final = b"version https://git-lfs.github.com/spec/"
_POINTER_BYTES: Final = 1024
"""No pointer of git-LFS is larger."""
_TEXTS: Final = frozenset({".json", ".jinja", ".txt", ".model"})
"""Files of a model that are read whatever its weights are."""
_PICKLES: Final = frozenset({".bin", ".pt", ".pth", ".ckpt"})


class UnreadableModel(RemediedCheckpointError):
    """What is there, and how to get what is read."""


def refuse_other_formats(path: Path) -> None:
    """Raises `CheckpointError` for a path that is no folder, `UnreadableModel` for a model in a
    format that is not read, and for a file that git-LFS was to put there."""
    if path.suffix == ".gguf" and path.is_file():
        raise _gguf(path)
    if path.is_file():
        raise UnreadableModel(f"{path} is a file", "give the directory that it is in")
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory")
    files = [file for file in sorted(path.iterdir()) if file.is_file()]
    for file in files:  # weights are looked at where they are read
        if file.suffix in _TEXTS:
            refuse_pointer(file)
    kinds = {file.suffix: file for file in reversed(files)}
    if ".safetensors" in kinds:
        return
    if ".gguf" in kinds:
        raise _gguf(kinds[".gguf"])
    if pickles := _PICKLES & kinds.keys():
        raise UnreadableModel(
            f"{path} has its weights as {' and '.join(sorted(pickles))} files only, which may run "
            "code when they are read",
            "convert them to safetensors, or pull a copy of the model in that format",
        )


def refuse_pointer(file: Path) -> None:
    """Raises `UnreadableModel` for a file with git-LFS's few lines in place of the content."""
    try:
        if not file.is_file() or file.stat().st_size > _POINTER_BYTES:
            return
        # A pipe may have taken its place by now, and would be waited for.
        fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            pointer = os.read(fd, len(_POINTER)) == _POINTER
        finally:
            os.close(fd)
    except OSError:
        return  # reported where it is read
    if pointer:
        raise UnreadableModel(
            f"{file} is a git-LFS pointer, not the file itself",
            "run `git lfs pull` in its directory",
        )


def _gguf(file: Path) -> UnreadableModel:
    return UnreadableModel(f"{file}: {GGUF}", "convert or pull safetensors")
