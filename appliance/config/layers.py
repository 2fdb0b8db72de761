"""A configuration file and its drop-ins as one document, in which every key knows its place.

Next to ``appliance.toml`` a directory ``appliance.toml.d`` may hold more ``*.toml``, read in the
order of their names; what a later one says holds. Tables are merged key by key, and ``[[model]]``
by name: a row with the name of an earlier one changes it, any other adds a model. A row that the
appliance wrote to change a model (`ADMIN_FILE`) is ignored if no file has that model any more.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from appliance.config.checked_text import read_text
from appliance.config.toml_errors import explain
from appliance.config.toml_lines import KeyPath, LineMap
from appliance.errors import ConfigError, Problem

ADMIN_FILE: Final = "50-admin.toml"
"""The drop-in that changes of operators are written to."""


class Layers:
    """The files that were read, and what they say together."""

    def __init__(self) -> None:
        self.document: dict[str, Any] = {}
        self.paths: list[Path] = []
        self._lines: list[LineMap] = []
        self._origins: dict[KeyPath, tuple[int, KeyPath]] = {}
        """Where the last merged value is: the file, and its path there."""
        self.ignored: list[str] = []
        """The rows that were left out, each as a warning."""

    def place(self, key: KeyPath) -> tuple[Path, int]:
        """The file and the line of a key, or of what is nearest around it."""
        layer, path = self._origin(key)
        return self.paths[layer], self._lines[layer].line(path)

    def _origin(self, key: KeyPath) -> tuple[int, KeyPath]:
        for length in range(len(key), 0, -1):
            if key[:length] in self._origins:
                layer, path = self._origins[key[:length]]
                return layer, (*path, *key[length:])
        return 0, key

    def add(self, path: Path, text: str, document: dict[str, Any]) -> None:
        """What this file says holds from now on."""
        self.paths.append(path)
        self._lines.append(LineMap(text))
        if len(self.paths) == 1:
            self.document = document
        else:
            self._merge(self.document, document, (), ())

    def _merge(
        self, known: dict[str, Any], more: dict[str, Any], at: KeyPath, there: KeyPath
    ) -> None:
        for key, value in more.items():
            before: Any = known.get(key)
            if isinstance(value, dict) and isinstance(before, dict):
                self._merge(before, value, (*at, key), (*there, key))
            elif not at and key == "model" and _rows(value) and _rows(before):
                for index, row in enumerate(value):
                    self._merge_model(before, row, index)
            else:
                known[key] = value
                self._origins[*at, key] = (len(self.paths) - 1, (*there, key))

    def _merge_model(self, rows: list[dict[str, Any]], row: dict[str, Any], index: int) -> None:
        """Change the row of the same name, or add it."""
        there: KeyPath = ("model", index)
        for place, known in enumerate(rows):
            if "name" in row and known.get("name") == row["name"]:
                self._merge(known, row, ("model", place), there)
                return
        rows.append(row)
        self._origins["model", len(rows) - 1] = (len(self.paths) - 1, there)

    def leave_out_leftovers(self) -> None:
        """Leave out the rows of `ADMIN_FILE` that only change a model, where no file has it."""
        rows: Any = self.document.get("model")
        if not _rows(rows):
            return
        origins = [self._origin(("model", place)) for place in range(len(rows))]
        kept = []
        for place, (row, (layer, path)) in enumerate(zip(rows, origins, strict=True)):
            if (
                {"path", "remote"} & row.keys()
                or "name" not in row
                or self.paths[layer].name != ADMIN_FILE
            ):
                kept.append(place)
                continue
            self.ignored.append(
                f"{self.paths[layer]}:{self._lines[layer].line(path)}: model {row['name']}: "
                "ignored, as no file has this model any more; delete the table here, or put the "
                "model's own back"
            )
        if len(kept) < len(rows):
            self._keep_rows(kept)

    def _keep_rows(self, kept: list[int]) -> None:
        """Of the models, in this order; their places are found as before."""
        rows = self.document["model"]
        self.document["model"] = [rows[place] for place in kept]
        old: list[KeyPath] = [("model", place) for place in range(len(rows))]
        moved: dict[KeyPath, KeyPath] = {old[place]: old[new] for new, place in enumerate(kept)}
        origins = {**{key: self._origin(key) for key in old}, **self._origins}
        self._origins = {
            (*moved.get(key[:2], key[:2]), *key[2:]): origin
            for key, origin in origins.items()
            if key[:2] in moved or key[:2] not in old
        }


def directory(path: Path) -> Path:
    """Where the drop-ins of a configuration file are."""
    return path.with_name(f"{path.name}.d")


def read_layers(path: Path, pending: Mapping[Path, str] | None = None) -> Layers:
    """Read a configuration file and its drop-ins; `pending` are texts of drop-ins to read as if
    they were written. Raises `ConfigError` for the first file that cannot be read."""
    pending = pending or {}
    layers = Layers()
    found = {*directory(path).glob("*.toml"), *pending}
    for file in [path, *sorted(found, key=lambda found: found.name)]:
        try:
            text = pending[file] if file in pending else read_text(file)
            document = tomllib.loads(text)
        except (OSError, UnicodeDecodeError) as error:
            wrong = f"cannot be read ({error})"
            raise ConfigError(
                [Problem(str(file), 1, "(file)", wrong, "give the path of a TOML file")]
            ) from error
        except tomllib.TOMLDecodeError as error:
            raise ConfigError([Problem(str(file), *explain(text, error))]) from error
        layers.add(file, text, document)
    layers.leave_out_leftovers()
    return layers


def ignored_rows(path: Path) -> list[str]:
    """Warnings of rows that are ignored in what is read of this configuration file. Raises
    `ConfigError`."""
    return read_layers(path).ignored


def _rows(value: object) -> bool:
    return isinstance(value, list) and all([isinstance(row, dict) for row in value])
