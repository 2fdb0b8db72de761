"""The problems of a configuration's files, each with its file, its line, its key and its remedy."""

from __future__ import annotations

from typing import Any

from appliance.config.layers import Layers
from appliance.config.toml_lines import KeyPath, dotted
from appliance.errors import Problem


class ProblemReport:
    """Collects the problems of the files that were read."""

    def __init__(self, layers: Layers) -> None:
        self.layers = layers
        self.problems: list[Problem] = []
        self.rows: list[int] | None = None
        """Which rows of the file the models are, once some of them are left out."""
        self.remote_rows: list[int] = []
        """Which rows those with `remote` are; their keys begin with that word."""

    def at(self, key: KeyPath, wrong: str, remedy: str, needed_bytes: int = 0) -> Problem:
        """The problem with a key, where the file has it."""
        key = self._in_files(key)
        path, line = self.layers.place(key)
        return Problem(str(path), line, dotted(key) or "(file)", wrong, remedy, needed_bytes)

    def written(self, key: KeyPath) -> Any:
        """What the files say for a key that they have."""
        value: Any = self.layers.document
        for part in self._in_files(key):
            value = value[part]
        return value

    def _in_files(self, key: KeyPath) -> KeyPath:
        if self.rows is not None and key[0] == "model" and len(key) > 1:
            return ("model", self.rows[int(key[1])], *key[2:])
        if key[0] == "remote":
            return ("model", self.remote_rows[int(key[1])], *key[2:])
        return key

    def concerns(self, table: str) -> bool:
        """Whether there is a problem with a key of this table."""
        return any(problem.key.startswith(f"{table}.") for problem in self.problems)

    def add(self, key: KeyPath, wrong: str, remedy: str, needed_bytes: int = 0) -> None:
        """What is wrong with a key of `Config`, and what to do about it."""
        self.problems.append(self.at(key, wrong, remedy, needed_bytes))
