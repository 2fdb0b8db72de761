"""The seam between the admin API and the configuration of a running daemon."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from appliance.checkpoints.sources import Tell
from appliance.errors import Problem
from appliance.service.interface import ModelActivity
from appliance.vocabulary import ModelName


class Removal(msgspec.Struct, frozen=True, kw_only=True):
    """What ``DELETE /api/models/NAME`` has begun: the model is gone when `live` requests have
    ended, and its files then, if `files`."""

    model: ModelName
    live: int
    files: bool


class ConfigChange(msgspec.Struct, frozen=True, kw_only=True):
    """A key whose value on disk is not the one in force. Values are as a file has them; None for a
    key, or a model, that is not there. Of a certificate that was renewed in its file they are the
    beginnings of the file's SHA-256. `applies` is what it needs: ``reload`` or ``restart``."""

    key: str
    old: object
    new: object
    applies: str


class ConfigInForce(msgspec.Struct, frozen=True, kw_only=True):
    """The body of ``GET /api/config``: the files it was read from, and what it says, with what was
    applied since. What needs a restart is not in it."""

    files: tuple[str, ...]
    config: dict[str, object]


class ConfigCheck(msgspec.Struct, frozen=True, kw_only=True):
    """What a restart would read, against what is in force; with problems there are no changes."""

    ok: bool
    changes: tuple[ConfigChange, ...] = ()
    problems: tuple[Problem, ...] = ()


class ConfigReload(msgspec.Struct, frozen=True, kw_only=True):
    """What was applied, and what still waits for a restart."""

    applied: tuple[ConfigChange, ...]
    restart: tuple[ConfigChange, ...]


class Settings(Protocol):
    """The configuration, as far as an admin may look at it and change it."""

    def in_force(self) -> ConfigInForce: ...

    async def check(self) -> ConfigCheck:
        """Read the files as a restart would, and compare; changes nothing."""

    async def reload(self) -> ConfigReload:
        """Apply what can be applied while requests run. Raises `ConfigError`, `PolicyChoiceError`:
        nothing is applied then."""

    async def change_model(self, name: ModelName, keys: Mapping[str, object]) -> None:
        """Give keys of a model's table other values, now and after a restart. Raises
        `ModelNotFound`, `ConfigError`, `NotSaved`: nothing is changed then."""

    async def add_model(self, keys: Mapping[str, object]) -> ModelName:
        """Serve a model more, now and after a restart. `keys` are those of its table, and
        what is left out means the same as there. Its name.

        Raises `ModelExists`, `ConfigError`, `NotSaved`: nothing is changed then."""

    async def remove_model(self, name: ModelName, *, force: bool, files: bool) -> Removal:
        """Serve a model no more, now and after a restart: its requests may end before, but with
        `force`. With `files` its files are deleted then, if they lie in the folder of models and no
        other model has them; meanwhile no other can be added that does.

        Raises `ModelNotFound`, `ConfigError`, `NotSaved`: nothing is changed then."""

    async def add_adapter(
        self, model: ModelName, name: str, path: str, *, replace: bool = False
    ) -> ModelName:
        """Serve a model with a LoRA adapter more, now and after a restart: what clients call the
        two. With `replace` it takes the place of one of its name, if there is one.

        Raises `ModelNotFound`, `ModelExists`, `AdapterNotPlaced`, `ConfigError`, `NotSaved`:
        nothing is changed then."""

    async def remove_adapter(self, model: ModelName, name: str, *, force: bool) -> Removal:
        """Serve an adapter no more, now and after a restart: new requests for it are refused at
        once, and its place is free when those that are live have ended; with `force`, they are,
        also of one that was removed before.

        Raises `ModelNotFound`, `AdapterNotPlaced`, `ConfigError`, `NotSaved`: nothing is changed
        then."""

    def removal(self, name: ModelName) -> ModelActivity | None:
        """What there is of a model that the daemon has forgotten: it is leaving while its files are
        deleted. Raises `FilesLeft` if they cannot be."""

    async def pull_model(
        self, source: str, name: str, tell: Tell, *, peer: str = "", add: bool = True
    ) -> str:
        """Fetch a model into the folder of models, and `add` it; where it is. With a `peer`, the
        address of a box that the configuration names, `source` is a model there. `tell` is called
        in another thread. Raises `PullError`, `CheckpointError`, and what `add_model` raises."""
