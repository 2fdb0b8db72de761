"""The drop-in that changes of operators are written to, ``50-admin.toml``: read, edited, replaced.

An edit leaves the tables of other models as they are, comments included.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import tomlkit
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import AoT, InlineTable, Item, Table

from appliance.config.checked_text import read_whole_text, without_checksum, write_text
from appliance.config.layers import ADMIN_FILE, directory
from appliance.config.schema import Model, fields
from appliance.errors import NotSaved
from appliance.platform.checked_file import Damaged
from appliance.platform.durable import make_folder
from appliance.vocabulary import ModelName

HEADER: Final = (
    "# Written by the appliance when an operator changes a model; undone by deleting it.\n\n"
)


class AdminEdit:
    """The tables of models in the drop-in, while they are edited."""

    def __init__(self, document: tomlkit.TOMLDocument) -> None:
        self._document = document
        rows = document.setdefault("model", tomlkit.aot())
        if not isinstance(rows, AoT):  # written by hand as an array: in the form of all others
            document["model"] = tomlkit.aot()
            for row in rows:
                self.put(row["name"], row)

    def merge(self, name: ModelName, keys: Mapping[str, object]) -> None:
        """Have the model's table say these keys; tables in it are merged."""
        place = self._place(name)
        if place is None:
            self.put(name, {"name": name, **keys})
        else:
            _merge(self._rows()[place], keys)

    def put(self, name: ModelName, row: Mapping[str, object]) -> None:
        """Have the model's table say this and nothing else."""
        self.drop(name)
        table = tomlkit.table()
        _merge(table, row)
        self._rows().append(table)

    def drop(self, name: ModelName) -> None:
        """Say nothing of the model."""
        place = self._place(name)
        if place is not None:
            del self._rows()[place]

    def text(self) -> str:
        """The drop-in as it is to be."""
        if not self._rows():
            return HEADER.rstrip("\n") + "\n"
        return tomlkit.dumps(self._document)

    def _rows(self) -> AoT:
        rows = self._document["model"]
        assert isinstance(rows, AoT)
        return rows

    def _place(self, name: ModelName) -> int | None:
        names = [row.get("name") for row in self._rows()]
        return names.index(name) if name in names else None


class AdminFile:
    """The drop-in of a configuration file."""

    def __init__(self, config: Path) -> None:
        self.path = directory(config) / ADMIN_FILE

    def edit(self) -> AdminEdit:
        """What operators changed so far. Raises `NotSaved` if it cannot be read, or has keys that
        the appliance does not write: the operator wrote the file then."""
        try:
            document = tomlkit.parse(without_checksum(read_whole_text(self.path)))
        except FileNotFoundError:
            document = tomlkit.parse(HEADER)
        except (OSError, UnicodeDecodeError, TOMLKitError, Damaged) as error:
            raise NotSaved(f"{self.path} cannot be read ({error})") from error
        rows = document.get("model", [])
        if document.keys() - {"model"} or any(row.keys() - fields(Model).keys() for row in rows):
            raise NotSaved(
                f"{self.path} has keys that the appliance does not write: "
                "move them to a drop-in of another name"
            )
        return AdminEdit(document)

    def write(self, text: str) -> None:
        """Replace the file, whole or not at all. Raises `NotSaved`."""
        try:
            make_folder(self.path.parent)
            write_text(self.path, text, 0o644)
        except OSError as error:
            raise NotSaved(f"{self.path} cannot be written ({error})") from error


def _merge(table: Table | InlineTable, keys: Mapping[str, object]) -> None:
    for key, value in keys.items():
        known = table.get(key)
        if isinstance(known, Table | InlineTable) and isinstance(value, Mapping):
            _merge(known, value)
        else:
            table[key] = _item(value)


def _item(value: object) -> Item:
    if isinstance(value, Mapping):
        table = tomlkit.inline_table()
        _merge(table, value)
        return table
    return tomlkit.item(list(value) if isinstance(value, tuple) else value)
