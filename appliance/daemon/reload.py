"""The configuration of a running daemon: compared with the files, applied, and written back to.

What is in force is what the daemon was started with, with what was applied since. A change of an
operator is written to a drop-in of its own before it is applied, and only if the whole
configuration with it can be used.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from appliance.checkpoints import delete
from appliance.checkpoints.adapters import full_name
from appliance.checkpoints.peers.source import PeerSource
from appliance.checkpoints.pull import Pulled, folder_name, pull_found
from appliance.checkpoints.sources import Source, Tell, find_source
from appliance.config.admin_file import AdminEdit, AdminFile
from appliance.config.auto import with_models
from appliance.config.diff import (
    TERMS,
    TLS,
    as_written,
    changes,
    complete,
    exchanging_models,
    joining_models,
)
from appliance.config.groups import differing_ranks, instances_of
from appliance.config.layers import ignored_rows, read_layers
from appliance.config.loader import absolute_path, load_config
from appliance.config.remotes import peer_source, remote_models
from appliance.config.schema import Adapter, Catalog, Config, Model
from appliance.config.sizing import kv_floor_slabs, read_model
from appliance.config.toml_lines import dotted
from appliance.daemon.daemon import Daemon
from appliance.daemon.served_model import ServedModel, served_model, terms_of
from appliance.errors import CheckpointError, ConfigError, FilesLeft, NotSaved, Problem, PullError
from appliance.platform import logs
from appliance.platform.tls import LiveTls, Pair, TlsProblem, read_pair
from appliance.service.event_log import NoticeKind
from appliance.service.interface import (
    AdapterNotPlaced,
    GenerationFailed,
    ModelActivity,
    ModelExists,
    ModelNotFound,
)
from appliance.service.remote_models import RemoteModel
from appliance.service.settings import (
    ConfigChange,
    ConfigCheck,
    ConfigInForce,
    ConfigReload,
    Removal,
)
from appliance.service.threads import in_own_thread
from appliance.vocabulary import ModelName

SHOWN_DIGITS: Final = 12
"""Characters of a digest, enough to tell two apart."""

log = logging.getLogger("appliance.daemon")


@dataclass
class _Deletion:
    """Of the files of a model that is removed; with a `failure` it is over."""

    folder: Path
    task: asyncio.Task[None]
    """Held here, as the loop does not."""
    failure: str = ""


class LiveConfig:
    """Implements `appliance.service.settings.Settings` for a daemon made from `config`, which was
    read from `path`. `tls` is what its server speaks, if it does."""

    def __init__(
        self,
        daemon: Daemon,
        config: Config,
        path: Path,
        tls: LiveTls | None = None,
        created: int = 0,
    ) -> None:
        """`created` is when models of other servers came, as lists say it (Unix time)."""
        self._daemon = daemon
        self._running = config
        self._path = path.absolute()
        self._tls = tls
        self._created = created
        self._admin = AdminFile(self._path)
        self._changing = asyncio.Lock()
        self._deletions: dict[ModelName, _Deletion] = {}
        """Of the files of models that are being removed, or that were."""

    def in_force(self) -> ConfigInForce:
        try:
            files = tuple(str(file) for file in read_layers(self._path).paths)
        except ConfigError:  # what is in force was read before they were spoiled
            files = (str(self._path),)
        return ConfigInForce(files=files, config=as_written(self._running))

    async def check(self) -> ConfigCheck:
        try:
            found = await self._read()
            pair = await asyncio.to_thread(tls_pair, found, self._path)
        except ConfigError as error:
            return ConfigCheck(ok=False, problems=error.problems)
        return ConfigCheck(ok=True, changes=self._changes(found, pair))

    async def reload(self) -> ConfigReload:
        async with self._changing:
            found = await self._read()
            pair = await asyncio.to_thread(tls_pair, found, self._path)
            wanted = self._changes(found, pair)
            joining = [
                model.name for model in joining_models(self._running, found) if self._is_free(model)
            ]
            served, kv_floor = await asyncio.to_thread(_described, found, joining)
            remotes = await asyncio.to_thread(remote_models, found, self._created)
            await self._apply(found)
            self._apply_tls(found, pair)
            await self._exchange_adapters(found)
            self._join(found, served, kv_floor)
            self._leave(found)
            self._apply_remotes(found, remotes)
            left = self._changes(found, pair)
        for warning in await asyncio.to_thread(ignored_rows, self._path):
            log.warning("%s", warning)
        applied = tuple(change for change in wanted if change not in left)
        log.info(
            "configuration reloaded: %d changes applied, %d wait for a restart",
            len(applied),
            len(left),
        )
        self._daemon.feed.tell(
            NoticeKind.CONFIG_RELOADED,
            applied=[change.key for change in applied],
            restart=[change.key for change in left],
        )
        return ConfigReload(applied=applied, restart=left)

    async def change_model(self, name: ModelName, keys: Mapping[str, object]) -> None:
        async with self._changing:
            self._daemon.remotes.check_here(name)
            if self._daemon.model(name).base:  # adapters have no terms of their own
                raise ModelNotFound(name)
            edit = self._admin.edit()
            edit.merge(name, keys)
            found = await self._read(edit)
            await self._write(edit)
            self._apply_models(found, {name})

    async def add_model(self, keys: Mapping[str, object]) -> ModelName:
        async with self._changing:
            name = str(keys["name"])
            if any(model.name == name for model in self._running.models):
                raise ModelExists(name)
            if self._daemon.remotes.find(name) is not None:
                raise ModelExists(name)
            self._check_stays(name, Path(absolute_path(self._path.parent, str(keys["path"]))))
            for further in (*_adapter_paths(keys), *_head_paths(keys)):
                self._check_stays(name, Path(absolute_path(self._path.parent, further)))
            edit = self._admin.edit()
            edit.drop(name)
            row = self._whole_row(keys)
            if await asyncio.to_thread(self._is_elsewhere, name, edit.text()):
                row = complete(row)
            edit.put(name, row)
            found = await self._read(edit)
            if found.devices != self._running.devices:
                raise NotSaved(
                    "[devices] of the files waits for a restart, and whether a model fits depends "
                    "on it: restart first, or take that change back"
                )
            described = await asyncio.to_thread(_described, found, [name])
            self._daemon.catalogue.check_free(name)
            await self._write(edit)
            self._join(found, *described)
            return name

    async def add_adapter(
        self, model: ModelName, name: str, path: str, *, replace: bool = False
    ) -> ModelName:
        async with self._changing:
            row, full = self._row(model), full_name(model, name)
            _check_room(row, full)
            known = {one.name: one for one in row.adapters}
            if name in known and not replace:
                raise ModelExists(full)
            added = Adapter(name=name, path=absolute_path(self._path.parent, path))
            self._check_stays(full, Path(added.path))
            edit, found = await self._with_adapters(model, {**known, name: added}.values())
            save = partial(self._write, edit)
            await self._daemon.adapters.put(model, name, added.path, replace=replace, save=save)
            self._keep_adapters(model, _adapters_of(found, model))
            log.info("adapter %s was added", full)
            return full

    async def remove_adapter(self, model: ModelName, name: str, *, force: bool) -> Removal:
        async with self._changing:
            row, full = self._row(model), full_name(model, name)
            others = [one for one in row.adapters if one.name != name]
            there = self._daemon.catalogue.find(model).worker.adapters
            if not any(one.name == name for one in there):
                raise ModelNotFound(full)
            _check_room(row, full)
            if len(others) < len(row.adapters):  # else it is leaving already
                edit, found = await self._with_adapters(model, others)
                await self._write(edit)
                self._keep_adapters(model, _adapters_of(found, model))
                log.info("adapter %s is removed", full)
            live = self._daemon.adapters.remove(model, name)
            if force:
                self._daemon.end_adapter(full)
            return Removal(model=full, live=0 if force else live, files=False)

    async def remove_model(self, name: ModelName, *, force: bool, files: bool) -> Removal:
        async with self._changing:
            self._daemon.remotes.check_here(name)
            activity = self._daemon.model_activity(name)
            row = next((model for model in self._running.models if model.name == name), None)
            if row is None:  # it is being removed already
                self._daemon.catalogue.remove(name, force=force)
                live = activity.running + activity.waiting
                pending = name in self._deletions
                return Removal(model=name, live=0 if force else live, files=pending)
            others = tuple(model for model in self._running.models if model.name != name)
            if not others:
                remedy = "add another one first"
                where = (str(self._admin.path), 1, "model")
                raise ConfigError([Problem(*where, f"{name} is the last model", remedy)])
            edit = self._admin.edit()
            edit.drop(name)
            found = await self._read(edit)
            if any(model.name == name for model in found.models):
                edit.put(name, {"name": name, "enabled": False})
                await self._read(edit)
            folder = self._folder_of(row) if files else None
            read = [model for model in found.models if model.name != name]
            if folder is not None and any(_has(model, folder) for model in [*others, *read]):
                folder = None
            if folder is not None:
                await asyncio.to_thread(delete.intend, folder)
            try:
                await self._write(edit)
            except NotSaved:
                if folder is not None:
                    await asyncio.to_thread(delete.take_back, folder)
                raise
            gone = self._daemon.catalogue.remove(name, force=force)
            self._running = msgspec.structs.replace(self._running, models=others)
            log.info("model %s is removed", name)
            if folder is not None:
                task = asyncio.create_task(self._delete(name, folder, gone))
                self._deletions[name] = _Deletion(folder, task)
            live = 0 if force else activity.running + activity.waiting
            return Removal(model=name, live=live, files=folder is not None)

    async def finish_deletions(self) -> None:
        """Delete the files that an earlier daemon was to delete, if they still exist."""
        if folder := self._running.catalog.folder:
            models = self._running.models
            wanted = lambda left: any(_has(model, left.resolve()) for model in models)  # noqa: E731
            await asyncio.to_thread(delete.finish, Path(folder), wanted)

    def removal(self, name: ModelName) -> ModelActivity | None:
        deletion = self._deletions.get(name)
        if deletion is None:
            return None
        if deletion.failure:
            raise FilesLeft(name, deletion.failure)
        return ModelActivity(model=name, state="removing")

    async def pull_model(
        self, source: str, name: str, tell: Tell, *, peer: str = "", add: bool = True
    ) -> str:
        configured = self._running.catalog.folder
        folder = Path(configured) if configured else None
        try:
            find = partial(_found, self._running.catalog, source, peer)
            found = await in_own_thread(find, "pull")
            wanted = name or found.name
            if add:
                self._check_may_add(wanted)
            if folder is not None:
                self._check_stays(wanted, folder / folder_name(wanted))
            pulled = await in_own_thread(
                partial(_pulled, found, source, folder, wanted, tell), "pull"
            )
        except OSError as error:
            raise PullError(f"{source} cannot be pulled: {error}") from error
        if add:
            await self.add_model({"name": pulled.name, "path": str(pulled.path)})
        return str(pulled.path)

    def _check_may_add(self, wanted: ModelName) -> None:
        """Before it costs a download."""
        if any(model.name == wanted for model in self._running.models):
            raise ModelExists(wanted)
        if numbers := differing_ranks(self._running.devices):
            wrong = (
                f"groups of {numbers} ranks divide a model's weights differently, and a pull "
                "cannot name groups"
            )
            remedy = (
                "use `appliance pull --group NAME`, or add the model with POST /api/models and its "
                "groups"
            )
            raise ConfigError([Problem(str(self._admin.path), 1, "model.groups", wrong, remedy)])

    def _row(self, name: ModelName) -> Model:
        """What is in force of a model that is served here. Raises `ModelNotFound`."""
        self._daemon.remotes.check_here(name)
        self._daemon.catalogue.find(name)
        return next(model for model in self._running.models if model.name == name)

    async def _with_adapters(
        self, name: ModelName, adapters: Collection[Adapter]
    ) -> tuple[AdminEdit, Config]:
        """An edit that gives a model these adapters, and the configuration with it. Raises
        `ConfigError`, `NotSaved`."""
        edit = self._admin.edit()
        edit.merge(name, {"adapter": [as_written(one) for one in adapters]})
        return edit, await self._read(edit)

    def _keep_adapters(self, name: ModelName, adapters: tuple[Adapter, ...]) -> None:
        """These are in force of a model."""
        replace = msgspec.structs.replace
        models = self._running.models
        self._keep(
            tuple(replace(one, adapters=adapters) if one.name == name else one for one in models)
        )

    async def _exchange_adapters(self, found: Config) -> None:
        """Serve the models with the adapters that were read, those that may be exchanged; the log
        tells of one that cannot be yet."""
        read = {model.name: model for model in found.models}
        for model in self._running.models:
            if model.name not in exchanging_models(self._running, found):
                continue
            in_force = {one.name: one for one in model.adapters}
            wanted = {one.name: one for one in read[model.name].adapters}
            try:
                for name in in_force.keys() - wanted.keys():
                    self._daemon.adapters.remove(model.name, name)
                    del in_force[name]
                for name, one in wanted.items():
                    if in_force.get(name) != one:
                        full = full_name(model.name, name)
                        self._check_stays(full, Path(one.path))
                        await self._daemon.adapters.put(model.name, name, one.path, replace=True)
                        in_force[name] = one
                in_force = wanted  # in their order
            except (
                AdapterNotPlaced, CheckpointError, ModelExists, ModelNotFound, NotSaved
            ) as error:  # fmt: skip
                log.warning("the adapters of %s are not exchanged yet: %s", model.name, error)
            self._keep_adapters(model.name, tuple(in_force.values()))

    def _whole_row(self, keys: Mapping[str, object]) -> dict[str, Any]:
        """A new model's keys, as every file can have them."""
        return {**keys, "path": absolute_path(self._path.parent, str(keys["path"]))}

    def _is_elsewhere(self, name: ModelName, text: str) -> bool:
        """Whether other files than the drop-in, which says `text`, have a table of this name."""
        rows = read_layers(self._path, {self._admin.path: text}).document.get("model")
        if not isinstance(rows, list):
            return False  # or nothing that can be read: reported for the file as a whole
        return any(isinstance(row, dict) and row.get("name") == name for row in rows)

    def _folder_of(self, model: Model) -> Path | None:
        """Where its files are, if that is in the folder of models."""
        folder, path = self._running.catalog.folder, Path(model.path).resolve()
        inside = bool(folder) and path.parent == Path(folder).resolve()
        return path if inside else None

    def _check_stays(self, name: ModelName, path: Path) -> None:
        """Raises `ModelExists`, `NotSaved` if the name, or the files, are about to go."""
        deleting = {of: one for of, one in self._deletions.items() if not one.failure}
        if name in deleting:
            raise ModelExists(name, removing=True)
        for of, deletion in deleting.items():
            if path.resolve().is_relative_to(deletion.folder):
                raise NotSaved(f"{path} is being deleted with {of}")

    def _is_free(self, model: Model) -> bool:
        """Whether neither the name nor the files are about to go; the log says so if they are."""
        try:
            self._daemon.catalogue.check_free(model.name)
            for folder in _folders(model):
                self._check_stays(model.name, folder)
        except (ModelExists, NotSaved) as error:
            log.warning("%s is not added yet: %s", model.name, error)
            return False
        return True

    async def _delete(self, name: ModelName, folder: Path, gone: asyncio.Event) -> None:
        """Delete a model's files when no process reads them any more or will read them."""
        await gone.wait()
        try:
            async with self._changing:
                found = await self._read()
                for model in (*self._running.models, *found.models):
                    if _has(model, folder):
                        raise OSError(f"{model.name} has it")  # by a file that was changed
                await asyncio.to_thread(delete.set_aside, folder)
            await asyncio.to_thread(delete.delete, folder)
        except FileNotFoundError:  # it was deleted by hand
            await asyncio.to_thread(delete.take_back, folder)
            del self._deletions[name]
        except (OSError, ConfigError) as error:
            log.error("%s cannot be deleted: %s", folder, error)
            await asyncio.to_thread(delete.take_back, folder)
            self._deletions[name].failure = f"{folder} cannot be deleted: {error}"
        else:
            log.info("%s was deleted", folder)
            del self._deletions[name]

    async def _read(self, edit: AdminEdit | None = None) -> Config:
        """The configuration, as if the edit were written. Reading checkpoints takes time: a thread
        does that."""
        pending = None if edit is None else {self._admin.path: edit.text()}
        return await asyncio.to_thread(
            load_config, self._path, pending=pending, running=self._running
        )

    async def _write(self, edit: AdminEdit) -> None:
        await asyncio.to_thread(self._admin.write, edit.text())

    def _changes(self, found: Config, pair: Pair | None) -> tuple[ConfigChange, ...]:
        """What `found`, with the pair that it names, says otherwise than is in force."""
        return (*_renewal(self._running, self._tls, found, pair), *changes(self._running, found))

    # --- applying --------------------------------------------------------------------------------

    async def _apply(self, found: Config) -> None:
        """All that can be applied; policies first, as only they can fail."""
        before = self._daemon.limits
        self._daemon.limits = msgspec.structs.replace(
            before,
            queue=found.api.max_queue,
            progress_seconds=float(found.api.progress_deadline_seconds),
            policy_seconds=float(found.policy.budget_seconds),
        )
        if found.policy != self._running.policy:
            try:
                await self._daemon.set_policy(found.policy.choice)
            except BaseException:
                self._daemon.limits = before
                raise
            terms = found.policy.autopilot_terms(self._running.journal.path)
            self._daemon.autopilot.configure(terms, found.policy.choice)
        replace = msgspec.structs.replace
        api = replace(
            self._running.api,
            max_queue=found.api.max_queue,
            progress_deadline_seconds=found.api.progress_deadline_seconds,
        )
        written = replace(self._running.log, level=found.log.level)
        if found.log.level != self._running.log.level:
            logs.set_level(found.log.level)
        self._running = replace(self._running, api=api, log=written, policy=found.policy)
        self._apply_models(found, {model.name for model in self._running.models})

    def _apply_tls(self, found: Config, pair: Pair | None) -> None:
        """Make handshakes with the pair that was read. HTTP stays HTTP, and HTTPS HTTPS."""
        if pair is None or self._tls is None:
            return
        self._tls.pair = pair
        api = msgspec.structs.replace(
            self._running.api,
            tls_certificate=found.api.tls_certificate,
            tls_key=found.api.tls_key,
        )
        self._running = msgspec.structs.replace(self._running, api=api)

    def _apply_remotes(self, found: Config, models: Sequence[RemoteModel]) -> None:
        """Have other servers answer for these, whose names no model of this box has."""
        here = {model.name for model in self._running.models}
        self._daemon.remotes.change(one for one in models if one.name not in here)
        remotes = tuple(one for one in found.remotes if one.name not in here)
        self._running = msgspec.structs.replace(self._running, remotes=remotes)

    def _apply_models(self, found: Config, names: set[ModelName]) -> None:
        """Serve these models on the terms that were read, those of them that were."""
        read = {model.name: model for model in found.models if model.name in names}
        models = []
        for model in self._running.models:
            new = read.get(model.name, model)
            if terms_of(new) != terms_of(model):
                self._daemon.catalogue.change(model.name, terms_of(new))
            if new.load and not model.load:
                _load(self._daemon, model.name)
            terms = {key: getattr(new, key) for key in TERMS}
            models.append(msgspec.structs.replace(model, **terms))
        self._running = msgspec.structs.replace(self._running, models=tuple(models))

    def _join(self, found: Config, models: Sequence[ServedModel], kv_floor: int) -> None:
        """Serve these, too, of the models that were read."""
        names = {served.spec.name for served in models}
        for served in models:
            self._daemon.catalogue.add(served, kv_floor)
            self._deletions.pop(served.spec.name, None)  # one that failed
            log.info("model %s was added", served.spec.name)
        self._running = with_models(self._running, found, names)

    def _leave(self, found: Config) -> None:
        """Serve those no more that were not read, once their requests have ended; unless nothing
        else would be served."""
        read = {model.name for model in found.models}
        stay = tuple(model for model in self._running.models if model.name in read)
        if not stay:
            return
        for model in self._running.models:
            if model.name not in read:
                self._daemon.catalogue.remove(model.name, force=False)
                log.info("model %s is removed", model.name)
        self._keep(stay)

    def _keep(self, models: tuple[Model, ...]) -> None:
        self._running = msgspec.structs.replace(self._running, models=models)


def _check_room(model: Model, full: ModelName) -> None:
    """Raises `AdapterNotPlaced` unless adapters may come and go while the model serves."""
    if not model.max_loras:
        raise AdapterNotPlaced(
            f"{full} cannot come or go while {model.name} serves, as its max_loras is 0: set "
            "it to the number of adapters that it is to have room for, and restart, or remove "
            "the model and add it again"
        )


def _renewal(
    running: Config, tls: LiveTls | None, found: Config, pair: Pair | None
) -> Iterator[ConfigChange]:
    """Of a certificate in the same file; another file is a change of its key."""
    if pair is None or tls is None:
        return
    if found.api.tls_certificate != running.api.tls_certificate:
        return
    old, new = tls.pair.digest, pair.digest
    if old != new:
        yield ConfigChange(
            key=dotted(TLS[0]),
            old=f"sha256:{old[:SHOWN_DIGITS]}",
            new=f"sha256:{new[:SHOWN_DIGITS]}",
            applies="reload",
        )


def _load(daemon: Daemon, name: ModelName) -> None:
    """Load a model that is to be loaded from now on; the log tells of one that cannot be."""
    try:
        daemon.load_model(name)
    except GenerationFailed as error:
        log.warning("%s is not loaded: %s", name, error.message)


def tls_pair(config: Config, file: Path) -> Pair | None:
    """The certificate of a configuration with its key; None if it has none. Raises `ConfigError`,
    which names `file`, if they were spoiled after the configuration was checked."""
    if not config.api.tls_certificate:
        return None
    found = read_pair(config.api.tls_certificate, config.api.tls_key)
    if isinstance(found, TlsProblem):
        where = (str(file), 1, f"api.{found.key}")
        raise ConfigError([Problem(*where, found.wrong, found.remedy)])
    return found


def _described(found: Config, names: Collection[ModelName]) -> tuple[list[ServedModel], int]:
    """These models as the daemon serves them, and the slabs of the host tier that KV needs with all
    that were read. Raises `CheckpointError`."""
    entries = [read_model(model, found.devices) for model in found.models]
    described = []
    for model, entry in zip(found.models, entries, strict=True):
        if model.name not in names:
            continue
        described.append(served_model(model, entry, instances_of(model, found.devices)))
    return described, kv_floor_slabs(found, entries)


def _found(catalog: Catalog, source: str, peer: str) -> Source:
    """What is pulled, for which files are looked at. Raises `PullError`."""
    return peer_source(catalog, source, peer) if peer else find_source(source)


def _pulled(found: Source, source: str, folder: Path | None, name: ModelName, tell: Tell) -> Pulled:
    """Pull it, with a connection if it is of another box."""
    with found if isinstance(found, PeerSource) else nullcontext():
        return pull_found(found, source, folder, name, link=False, tell=tell)


def _has(model: Model, folder: Path) -> bool:
    """Whether any of its files, or of its adapters' and its head's, are in the folder."""
    return any(of.resolve().is_relative_to(folder) for of in _folders(model))


def _adapters_of(found: Config, name: ModelName) -> tuple[Adapter, ...]:
    return next(model.adapters for model in found.models if model.name == name)


def _folders(model: Model) -> list[Path]:
    further = [*(adapter.path for adapter in model.adapters), model.speculate.path]
    return [Path(path) for path in (model.path, *further) if path]


def _adapter_paths(keys: Mapping[str, object]) -> list[str]:
    """Of a new model's keys, which were not checked yet."""
    adapters = keys.get("adapter", ())
    rows = adapters if isinstance(adapters, list | tuple) else ()
    return [
        row["path"] for row in rows if isinstance(row, dict) and isinstance(row.get("path"), str)
    ]


def _head_paths(keys: Mapping[str, object]) -> list[str]:
    """The same of a head that drafts its tokens."""
    asked = keys.get("speculate", {})
    path = asked.get("path") if isinstance(asked, Mapping) else None
    return [path] if isinstance(path, str) and path else []
