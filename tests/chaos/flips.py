"""Single bits flipped in the files of a daemon that does not run."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from appliance.access.keys import KeyFile
from appliance.config.layers import directory
from appliance.config.loader import load_config
from appliance.errors import ConfigError, KeysError
from appliance.platform.checked_file import copy_of

CONTENTS = "the contents of files, which have no checksum: what is flipped there is served so"


@dataclass(frozen=True)
class Guarded:
    """A file that operators write, too. With a copy its damage is repaired. Without one it may keep
    the daemon from starting, which it says by name; what is damaged and still can be read is
    another file, as if they had written it."""

    path: Path
    read: Callable[[], object]
    """Raises `KeysError` or `ConfigError` where a start has to."""

    @property
    def readable(self) -> bool:
        try:
            self.read()
        except (KeysError, ConfigError):
            return False
        return True


@dataclass
class Flipped:
    """What was flipped in one pause of the daemon."""

    places: list[str] = field(default_factory=list)
    refused: list[tuple[Guarded, bytes]] = field(default_factory=list)
    """Files with which it has to refuse to start, as they were."""
    repaired: list[tuple[Path, bytes]] = field(default_factory=list)
    """Files whose copies it has to use, as they were."""
    stored: int = 0
    """Bits in what is stored of files and batches."""


class Files:
    """All files that a daemon has, but for the weights that are operators'."""

    def __init__(self, state: Path, config: Path, keys: Path) -> None:
        """Everything below `state` is the daemon's; files and batches are in `batches` there."""
        self._state = state
        self._stored = state / "batches"
        self._guarded = [Guarded(keys, KeyFile(keys).read)]
        self._config = config
        self.found: Counter[str] = Counter()
        """Bits by what was flipped: a folder of the state, or what an operator writes."""

    def flip(self, bits: int, dice: random.Random) -> Flipped:
        """Flip so many, each in a file of its own that is drawn: a folder first, so that those with
        few files are hit, too."""
        flipped = Flipped()
        for _ in range(bits):
            groups = self._groups()
            if not groups:
                break
            name = dice.choice(sorted(groups))
            self.found[name] += 1
            path = dice.choice(groups[name])
            guard = next((guard for guard in self._guards() if guard.path == path), None)
            whole = path.read_bytes()
            place = dice.randrange(8 * len(whole))
            flip_bit(path, place)
            flipped.places.append(f"bit {place} of {path.name} ({name})")
            if guard is None:
                flipped.stored += path.is_relative_to(self._stored)
            elif copy_of(path).exists():
                flipped.repaired.append((path, whole))
            elif guard.readable:
                path.write_bytes(whole)
                self.found[f"{name}: not noticed"] += 1
            else:
                flipped.refused.append((guard, whole))
        return flipped

    def _guards(self) -> list[Guarded]:
        drop_ins = sorted(directory(self._config).glob("*.toml"))
        return [
            *self._guarded,
            *(Guarded(path, lambda: load_config(self._config)) for path in drop_ins),
        ]

    def _groups(self) -> dict[str, list[Path]]:
        """Files with bits to flip, by where they are."""
        groups: dict[str, list[Path]] = {}
        for path in sorted(self._state.rglob("*")):
            if path.is_file() and path.stat().st_size and not is_content(path):
                groups.setdefault(str(path.relative_to(self._state).parent), []).append(path)
        for guard in self._guards():
            if guard.readable and guard.path.stat().st_size:
                groups.setdefault(guard.path.name, []).append(guard.path)
        return groups


def flip_bit(path: Path, place: int) -> None:
    """Flip the bit of this number."""
    with path.open("r+b") as stream:
        stream.seek(place // 8)
        (byte,) = stream.read(1)
        stream.seek(place // 8)
        stream.write(bytes([byte ^ 1 << place % 8]))


def flip_somewhere(paths: Sequence[Path], dice: random.Random) -> Path | None:
    """Flip a bit of one of these files; which one, or None if there is none with a bit."""
    for path in dice.sample(list(paths), len(paths)):
        try:
            size = path.stat().st_size
            if size:
                flip_bit(path, dice.randrange(8 * size))
                return path
        except (OSError, ValueError):  # it went away, or was cut short
            continue
    return None


def is_content(path: Path) -> bool:
    """Whether a file is one that a client uploaded or downloads: lines with a `custom_id`."""
    with path.open("rb") as stream:
        first = stream.readline(1 << 20)
    try:
        line = json.loads(first)
    except ValueError:
        return False
    return isinstance(line, dict) and "custom_id" in line
