"""``SHA256SUMS``: the checksums that may come with a checkpoint's files, in sha256sum's format."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Final, NamedTuple

from appliance.errors import CheckpointError

SUMS: Final = "SHA256SUMS"

_CHUNK_BYTES: Final = 1 << 20
_DIGITS: Final = frozenset("0123456789abcdef")


class Checksum(NamedTuple):
    """A file and the SHA-256 that it should have, in lower-case hexadecimal digits."""

    file: Path
    expected: str

    def check(self) -> None:
        """Read the whole file. Raises `CheckpointError` if it differs, `OSError` if it cannot be
        read."""
        digest = hashlib.sha256()
        with self.file.open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
        if digest.hexdigest() != self.expected:
            raise CheckpointError(
                f"{self.file} is corrupt: its SHA-256 is not the one in {SUMS}; "
                "fetch the file again"
            )


def read_sums(directory: Path) -> list[Checksum]:
    """What the ``SHA256SUMS`` of a directory lists; nothing if there is none.

    Raises `CheckpointError` for a line that is not a checksum and a file below the directory, and
    `OSError` if it cannot be read.
    """
    listing = directory / SUMS
    if not listing.exists():
        return []
    try:
        lines = listing.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{listing} is not a list of checksums; write it again") from error
    return list(_read_lines(listing, lines))


def _read_lines(listing: Path, lines: list[str]) -> Iterator[Checksum]:
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        expected, _, name = line.partition(" ")
        # The second character between them tells text from binary, which are the same here.
        relative = PurePath(name[1:])
        outside = not relative.name or relative.is_absolute() or ".." in relative.parts
        if len(expected) != 64 or not _DIGITS.issuperset(expected.lower()) or outside:
            raise CheckpointError(
                f"{listing}:{number} is not a checksum and a file of its folder; correct the line"
            )
        yield Checksum(listing.parent / relative, expected.lower())
