"""Writes the hashes of the pins in requirements/: ``python packaging/pins.py UV``.

``make pins`` does so. A list names what pip installs, ``name==version`` a line. Below each are the
digests of all files of that version, for every platform and Python: pip takes no other file
(``--require-hashes``). The comment at the top of a list stays as it is. `UV` is the path of uv,
which asks the package index.
"""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

REQUIREMENTS: Final = Path(__file__).parents[1] / "requirements"
OLDEST_PYTHON: Final = "3.11.5"
"""For which there has to be a file of every version."""

BY_HAND: Final = "torch-cpu.txt"
"""A list that stays as it is: the index does not have the CPU build of torch."""


class Pin(NamedTuple):
    """One line of a list, and what follows it."""

    name: str
    version: str
    marker: str
    """When it is installed; nothing: always."""
    hashes: tuple[str, ...]
    """``sha256:…``, of all files of this version."""

    @property
    def line(self) -> str:
        return f"{self.name}=={self.version}" + (f" ; {self.marker}" if self.marker else "")


def read(path: Path) -> list[Pin]:
    """The pins of a list, in its order."""
    return list(_parsed(path.read_text(encoding="utf-8")))


def _parsed(text: str) -> Iterator[Pin]:
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip() and not line.startswith("#"):
            requirement, *hashes = (part.strip() for part in line.split("--hash="))
            pinned, _, marker = requirement.partition(";")
            name, _, version = pinned.strip().partition("==")
            yield Pin(name, version, marker.strip(), tuple(hashes))


def write(path: Path, uv: Path) -> None:
    """The list again, with hashes. Raises `CalledProcessError` if a version does not exist."""
    text = path.read_text(encoding="utf-8")
    command = [
        *(str(uv), "pip", "compile", "-", "--quiet", "--no-config", "--no-deps", "--universal"),
        *("--python-version", OLDEST_PYTHON, "--generate-hashes", "--no-annotate", "--no-header"),
    ]
    asked = "\n".join(pin.line for pin in _parsed(text))
    done = subprocess.run(command, input=asked, stdout=subprocess.PIPE, text=True, check=True)
    lines = [line for line in text.splitlines() if line.startswith("#")]
    for pin in _parsed(done.stdout):
        lines.append(" \\\n    --hash=".join((pin.line, *pin.hashes)))
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("uv", type=Path)
    for path in sorted(REQUIREMENTS.glob("*.txt")):
        if path.name != BY_HAND:
            write(path, parser.parse_args().uv)
