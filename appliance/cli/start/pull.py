"""``appliance pull``: fetch a model into the folder of models."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click
import httpx
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as Bars
from rich.table import Column

from appliance.checkpoints.adapters import full_name
from appliance.checkpoints.peers.source import PeerSource
from appliance.checkpoints.pull import pull_adapter as fetch_adapter
from appliance.checkpoints.pull import pull_found
from appliance.checkpoints.sources import Progress, Source, Tell, find_source
from appliance.client import (
    ANSWER_SECONDS,
    KEY_VARIABLE,
    call,
    checked,
    connect,
    fail,
    get,
    own_key,
    unreachable,
    url_option,
)
from appliance.config.schema import Model, choices, fields
from appliance.errors import CheckpointError, PullError
from appliance.units import human


@click.command()
@click.argument("source")
@click.option("--name", default="", help="What clients call it; by default as SOURCE is called.")
@click.option(
    "--dir", "folder", type=click.Path(file_okay=False, path_type=Path),
    help="The folder of models; by default the daemon's (catalog.folder).",
)  # fmt: skip
@click.option(
    "--adapter-of", "base", metavar="MODEL",
    help="It is a LoRA adapter of MODEL, which has room for it (max_loras).",
)  # fmt: skip
@click.option(
    "--from", "peer", metavar="URL",
    help="SOURCE is a model of the box at URL, http(s)://HOST:PORT, which offers its files to keys "
    "with the scope admin ($APPLIANCE_API_KEY).",
)  # fmt: skip
@click.option("--link", is_flag=True, help="Use the directory SOURCE where it is; copy nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, a line for each step.")
@click.option("--no-add", is_flag=True, help="Do not have the daemon serve it.")
@click.option(
    "--max-context", type=click.IntRange(min=1),
    help="Longest prompt and answer, tokens; by default what it reads, or what has room.",
)  # fmt: skip
@click.option(
    "--dtype", type=click.Choice(choices(fields(Model)["dtype"].type)),
    help="What it is computed in; by default the stored type, bfloat16 for float32.",
)  # fmt: skip
@click.option("--tool-parser", help="vLLM's parser of its tool calls, such as hermes.")
@click.option(
    "--group", "groups", multiple=True, metavar="NAME",
    help="A group of instances that may serve it; repeat it for others. By default all.",
)  # fmt: skip
@url_option
def pull(
    source: str,
    name: str,
    folder: Path | None,
    base: str | None,
    peer: str | None,
    link: bool,
    as_json: bool,
    no_add: bool,
    max_context: int | None,
    dtype: str | None,
    tool_parser: str | None,
    groups: tuple[str, ...],
    url: str,
) -> None:
    """Fetch a model, or a LoRA adapter, from SOURCE: a directory, an archive (.tar, .tar.gz, .tgz,
    .zip), ORG/MODEL[@REVISION] of a hub, or with --from a model of another box.

    The running daemon serves it then, and after a restart. It is verified, and is in the folder of
    models as a whole or not at all. A pull that breaks off goes on where it stopped when it is
    repeated; one that is there already is not fetched again."""
    if peer is not None and (link or base is not None):
        fail(f"--from fetches models: leave {'--link' if link else '--adapter-of'} out", 2)
    if folder is None and not link:
        configured = get(url, "/api/config")["config"]["catalog"]["folder"]
        folder = Path(configured) if configured else None
    terms = {"max_context": max_context, "dtype": dtype, "tool_parser": tool_parser}
    chosen: dict[str, Any] = {key: value for key, value in terms.items() if value is not None}
    if groups:
        chosen["groups"] = list(groups)
    if base is not None:
        if chosen:
            option = next(iter(chosen)).replace("groups", "group").replace("_", "-")
            fail(f"--{option} is the model's, not an adapter's", 2)
        _pull_adapter(source, name, base, folder, url, link=link, as_json=as_json, no_add=no_add)
        return
    with failing(source), _found(source, peer) as (found, text):
        if not no_add:
            _check_free(url, name or found.name)
            _check_groups(url, groups)
        with telling(as_json) as tell:
            pulled = pull_found(found, text, folder, name, link=link, tell=tell)
    if not no_add:
        call("POST", url, "/api/models", {"name": pulled.name, "path": str(pulled.path), **chosen})
    _report(pulled.name, pulled.path, as_json=as_json, added=not no_add)


@contextmanager
def _found(source: str, peer: str | None) -> Iterator[tuple[Source, str]]:
    """What is pulled, and what errors call it."""
    if peer is None:
        yield find_source(source), source
        return
    key = own_key() or ""
    with PeerSource(peer, source, key, key_from=f"${KEY_VARIABLE}") as found:
        yield found, found.address


def _pull_adapter(
    source: str,
    name: str,
    base: str,
    folder: Path | None,
    url: str,
    *,
    link: bool,
    as_json: bool,
    no_add: bool,
) -> None:
    """What costs much comes last: whether the model has room is asked first."""
    if not no_add:
        facts = get(url, f"/api/models/{quote(base)}")["facts"]
        if len(facts["adapters"]) >= facts["max_loras"] or not facts["max_lora_rank"]:
            fail(
                f"{base} has no room for another adapter: {len(facts['adapters'])} of "
                f"{facts['max_loras']} places are taken; see max_loras in docs/adapters.md"
            )
    with failing(source), telling(as_json) as tell:
        own, path = fetch_adapter(source, folder, base, name, link=link, tell=tell)
    if not no_add:
        call("POST", url, f"/api/models/{quote(base)}/adapters", {"name": own, "path": str(path)})
    _report(full_name(base, own), path, as_json=as_json, added=not no_add)


def _check_groups(url: str, chosen: tuple[str, ...]) -> None:
    """Ends the command if the daemon would refuse the model for its groups."""
    found = get(url, "/api/config")["config"]["devices"].get("group", [])
    ranks = {group["name"]: group.get("tensor_parallel", 1) for group in found}
    for name in chosen:
        if name not in ranks:
            known = ", ".join(ranks) or "none"
            fail(f"there is no group {name!r}; groups of the daemon: {known}")
    numbers = sorted({ranks[name] for name in chosen or ranks})
    if len(numbers) > 1:
        fail(
            f"groups of {' and '.join(map(str, numbers))} ranks divide its weights differently: "
            "name groups of one number of ranks with --group"
        )


@contextmanager
def failing(source: str) -> Iterator[None]:
    """Ends the command if the source cannot be pulled."""
    try:
        yield
    except (PullError, CheckpointError) as error:
        fail(str(error))
    except OSError as error:
        fail(f"{source} cannot be pulled: {error}")


def _report(name: str, path: Path, *, as_json: bool, added: bool) -> None:
    if as_json:
        _print_line({"status": "success", "model": name, "path": str(path)})
        return
    click.echo(f"{name} is in {path}{', and is served' * added}")


def _check_free(url: str, name: str) -> None:
    """End the command if the daemon would not add a model of this name, before it is fetched."""
    path = f"/api/models/{quote(name)}"
    try:
        with connect(url) as client:
            response = client.get(path, timeout=ANSWER_SECONDS)
    except httpx.TransportError as error:
        unreachable(url, error)
    if response.status_code != httpx.codes.NOT_FOUND:
        checked(response)
        fail(f"a model {name!r} is in the catalogue already: give another name, or remove it first")


@contextmanager
def telling(as_json: bool, *, err: bool = False) -> Iterator[Tell]:
    """Tells of progress: bars on a terminal, else a line for each file, or for each step. To
    standard error, if `err`."""
    if as_json:
        yield lambda progress: _print_line(progress._asdict())
    elif (sys.stderr if err else sys.stdout).isatty():
        columns = (
            TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True)),
            BarColumn(bar_width=16),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        with Bars(*columns, console=Console(stderr=err), expand=True) as bars:
            yield _Bars(bars)
    else:
        yield partial(_print_file, err=err)


class _Bars:
    """A bar for each file."""

    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}
        self._last: Progress | None = None

    def __call__(self, progress: Progress) -> None:
        last, self._last = self._last, progress
        if progress == last:
            return  # it still waits
        if not progress.total_bytes:
            self._bars.console.print(_said(progress))
            return
        if progress.file not in self._tasks:
            task = self._bars.add_task(progress.file, total=progress.total_bytes)
            self._tasks[progress.file] = task
        self._bars.update(self._tasks[progress.file], completed=progress.done_bytes)


def _print_file(progress: Progress, *, err: bool) -> None:
    if progress.done_bytes == progress.total_bytes:
        click.echo(_said(progress), err=err)


def _said(progress: Progress) -> str:
    size = f" ({human(progress.total_bytes)})" if progress.total_bytes else ""
    status = "fetched" if progress.status == "fetching" else progress.status
    return f"{status} {progress.file}{size}".rstrip()


def _print_line(line: dict[str, object]) -> None:
    click.echo(json.dumps(line))
