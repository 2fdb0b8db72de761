"""Other servers in the configuration, checked: tables `[[model]]` with `remote`, which are read
apart, and boxes to pull from."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any, Final

import httpx

from appliance.checkpoints.adapters import full_name
from appliance.checkpoints.peers.source import PeerSource
from appliance.config.problems import ProblemReport
from appliance.config.schema import Catalog, Config
from appliance.config.tables.remote import Remote
from appliance.config.toml_lines import KeyPath
from appliance.errors import ApplianceError, PullError
from appliance.service.remote_models import RemoteModel
from appliance.vocabulary import Task

MAX_SECRET_BYTES: Final = 4096
_SCHEMES: Final = ("http", "https")
_EXAMPLE: Final = 'write it as "http://HOST:PORT", or "https://HOST/v1"'


class SecretUnusable(ApplianceError):
    """A file of a key that cannot be used; the message says why, and shows nothing of it."""


def split_rows(document: dict[str, Any], report: ProblemReport) -> list[Any]:
    """Take the rows with `remote` out of the models of a document; `report` knows what rows the
    others are."""
    rows = document.get("model")
    if not isinstance(rows, list):
        return []
    elsewhere = [n for n, row in enumerate(rows) if isinstance(row, dict) and "remote" in row]
    if not elsewhere:
        return []
    here = [n for n in range(len(rows)) if n not in set(elsewhere)]
    report.rows, report.remote_rows = here, elsewhere
    document["model"] = [rows[n] for n in here]
    return [rows[n] for n in elsewhere]


def check_remotes(config: Config, report: ProblemReport) -> None:
    """Report addresses that are none, and names that mean another model."""
    names: dict[str, str] = {}
    for model in config.models:
        adapters = (full_name(model.name, one.name) for one in model.adapters)
        for name in (model.name, *model.aliases, *adapters):
            names.setdefault(name, model.name)
    for index, remote in enumerate(config.remotes):
        at = ("remote", index)
        if wrong := wrong_address(remote.remote):
            report.add((*at, "remote"), wrong, _EXAMPLE)
        for key, mine in (("name", (remote.name,)), ("aliases", remote.aliases)):
            for name in mine:
                if name in names:
                    wrong = f"{name} is a name of {names[name]} already"
                    report.add((*at, key), wrong, "have each name mean one model")
                names.setdefault(name, remote.name)
    _check_peers(config, report)


def _check_peers(config: Config, report: ProblemReport) -> None:
    """Report addresses of boxes that are none, and a key for none."""
    for peer in config.catalog.peers:
        if wrong := wrong_address(peer, "peer_key_file"):
            report.add(("catalog", "peers"), wrong, 'write it as "http://HOST:PORT"')
    if config.catalog.peer_key_file and not config.catalog.peers:
        report.add(("catalog", "peer_key_file"), "there are no peers", "add peers, or leave it out")


def check_secrets(config: Config, report: ProblemReport) -> None:
    """Report files of keys that cannot be used."""
    files: list[tuple[KeyPath, str]] = [
        (("remote", index, "remote_key_file"), remote.remote_key_file)
        for index, remote in enumerate(config.remotes)
    ]
    files.append((("catalog", "peer_key_file"), config.catalog.peer_key_file))
    for key, file in files:
        try:
            read_secret(file)
        except SecretUnusable as error:
            report.add(
                key,
                str(error),
                "put the key alone on the first line of a file that the daemon's user can read",
            )


def shared_secrets(config: Config) -> list[str]:
    """Warnings of files of keys that others than their owners have access to."""
    files = [
        (f"model.{remote.name}.remote_key_file", remote.remote_key_file)
        for remote in config.remotes
    ]
    files.append(("catalog.peer_key_file", config.catalog.peer_key_file))
    return [
        f"{key}: others than its owner can read or write {file}; `chmod 600` it"
        for key, file in files
        if file and _is_shared(Path(file))
    ]


def peer_source(catalog: Catalog, model: str, url: str) -> PeerSource:
    """A model of another box. Raises `PullError` for a box that is not named."""
    known = [peer.rstrip("/") for peer in catalog.peers]
    if url.rstrip("/") not in known:
        raise PullError(
            f"from: {url[:200]!r} is no box that this one may pull from (catalog.peers: "
            f"{', '.join(known) or 'none'}); add it there and restart, or use "
            "`appliance pull --from` on this machine"
        )
    try:
        key = read_secret(catalog.peer_key_file)
    except SecretUnusable as error:
        raise PullError(f"catalog.peer_key_file: {error}; mend it") from error
    return PeerSource(url, model, key, key_from="catalog.peer_key_file", field="from")


def remote_models(config: Config, created: int) -> tuple[RemoteModel, ...]:
    """The models of other servers, with the keys that these want. Raises `SecretUnusable`."""
    return tuple(_remote_model(remote, created) for remote in config.remotes)


def read_secret(file: str) -> str:
    """The key in a file; "" without one. Raises `SecretUnusable`."""
    if not file:
        return ""
    try:
        # A pipe would be waited for until something is written to it.
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as opened:
            if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
                raise SecretUnusable(f"{file} is no file")
            data = opened.read(MAX_SECRET_BYTES + 1)
    except OSError as error:
        raise SecretUnusable(f"{file} cannot be read: {error.strerror}") from error
    lines = data.strip().splitlines()
    if len(data) > MAX_SECRET_BYTES or len(lines) != 1:
        raise SecretUnusable(f"{file} is not one line of at most {MAX_SECRET_BYTES} bytes")
    if not all(0x20 < byte < 0x7F for byte in lines[0]):
        raise SecretUnusable(f"{file} has a space in its line, or what is not ASCII")
    return lines[0].decode("ascii")


def _remote_model(remote: Remote, created: int) -> RemoteModel:
    return RemoteModel(
        name=remote.name,
        aliases=remote.aliases,
        address=_base(remote.remote),
        called=remote.remote_model or remote.name,
        key=read_secret(remote.remote_key_file),
        connect_seconds=float(remote.remote_connect_timeout),
        silence_seconds=float(remote.remote_timeout),
        max_context=remote.max_context,
        max_queue=remote.max_queue,
        task=Task(remote.task),
        created=created,
    )


def _base(address: str) -> str:
    """What the path of an endpoint is put behind: it ends with ``/v1``, or as it was written."""
    url = address.rstrip("/")
    return url if httpx.URL(url).path.strip("/") else f"{url}/v1"


def wrong_address(address: str, key_field: str = "remote_key_file") -> str:
    """What is wrong with the address of a server; "" if nothing is."""
    try:
        url = httpx.URL(address)
    except (httpx.InvalidURL, ValueError) as error:
        return f"is no URL: {error}"
    if url.scheme not in _SCHEMES or not url.host:
        return f"{address!r} is no address of an HTTP server"
    if url.userinfo:
        return f"has a user or a password: a key belongs into {key_field}"
    if url.query or url.fragment:
        return f"{address!r} has more than a path"
    return ""


def _is_shared(file: Path) -> bool:
    try:
        return bool(file.stat().st_mode & 0o077)
    except OSError:
        return False
