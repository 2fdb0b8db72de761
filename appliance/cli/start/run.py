"""`appliance run`: chat with a model, which is pulled, served and loaded if it is not yet."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import click
import httpx

from appliance.checkpoints.discovery.find import Found, FoundModel, find_models
from appliance.checkpoints.pull import NAME
from appliance.checkpoints.pull import pull as fetch
from appliance.checkpoints.sources import HUB, Progress
from appliance.cli.start.chat import answer, converse
from appliance.cli.start.folders import models_folder
from appliance.cli.start.own_daemon import operators_url, own_address, start_own_daemon
from appliance.cli.start.pull import failing, telling
from appliance.client import (
    CONNECT_SECONDS,
    call,
    checked,
    connect,
    event_lines,
    fail,
    unreachable,
    url_option,
)
from appliance.config.starter import NothingToServe, Terms, write_starter
from appliance.errors import ApplianceError, ConfigError

_LATEST = ":latest"
LIST_SECONDS = 120.0
"""For the names of the models, by a daemon that has much else to do."""


@click.command()
@click.argument("model")
@click.argument("prompt", required=False)
@click.option("--max-tokens", type=click.IntRange(min=1), help="Longest answer, in tokens.")
@click.option("--temperature", type=float, help="0 for the most likely tokens.")
@url_option
def run(
    model: str, prompt: str | None, max_tokens: int | None, temperature: float | None, url: str
) -> None:
    """Chat with MODEL: one PROMPT, standard input, or a conversation on a terminal.

    ORG/MODEL[@REVISION] of a hub is pulled if it is not served. If no daemon answers at an address
    of this machine, one is started there that serves the models of this user, and goes on."""
    talks = prompt is None and sys.stdin.isatty()
    text = "" if talks else sys.stdin.read() if prompt is None else prompt
    if not talks and not text.strip():
        raise click.UsageError("the prompt is empty")
    options = {"max_tokens": max_tokens, "temperature": temperature}
    body = {
        "model": _have(url, model),
        **{key: value for key, value in options.items() if value is not None},
    }
    if talks:
        converse(url, body)
    else:
        answer(url, body, [{"role": "user", "content": text}])


def _have(url: str, model: str) -> str:
    """Have the model served at `url`; its name there. Ends the command if that cannot be."""
    hub = HUB.fullmatch(model)
    name = hub["name"] if hub else model
    if not NAME.fullmatch(name):
        fail(
            f"{model!r} cannot be the name of a model: give one of `appliance list`, or ORG/MODEL "
            "of a hub; directories are served by `appliance serve DIR`",
            2,
        )
    try:
        served = _served(url)
    except httpx.ConnectError as error:  # no process listens there
        _serve_own(url, model, name, error)
        return name
    except httpx.TransportError as error:
        fail(f"{url} is in use, and no daemon answers there ({error}); try again, or give --url")
    if hub and not _has(served, name):
        _pull_there(url, model)
    elif hub:
        _tell_of_revision(name, hub["revision"])
    return name  # if there is no such model, the daemon says so


def _served(url: str) -> set[str]:
    """Names of the models of the daemon. Raises `httpx.TransportError` if none answers."""
    limits = httpx.Timeout(LIST_SECONDS, connect=CONNECT_SECONDS)
    with connect(url) as client:
        response = checked(client.get("/v1/models", timeout=limits))
    try:
        return {row["id"] for row in response.json()["data"]}
    except (json.JSONDecodeError, KeyError, TypeError):
        fail(f"what answers at {url} is not the appliance")


def _tell_of_revision(name: str, revision: str | None) -> None:
    """A hub alone knows which files a revision has, and it is not asked for what is there."""
    if revision is not None:
        click.echo(
            f"note: {name} is there already, and may be another revision than {revision}; to have "
            "that one, remove the model first: appliance rm {name}",
            err=True,
        )


def _has(served: set[str], name: str) -> bool:
    return not served.isdisjoint({name, name.removesuffix(_LATEST)})


def _pull_there(url: str, model: str) -> None:
    """Have the daemon pull a model of a hub: it has to read the files. If this command ends
    meanwhile, the daemon goes on."""
    try:
        with (
            telling(False, err=True) as tell,
            connect(operators_url(url)) as client,
            client.stream("POST", "/api/pull", json={"model": model}) as response,
        ):
            for progress in _steps(event_lines(checked(response).iter_bytes())):
                tell(progress)
    except httpx.TransportError as error:
        fail(f"the connection to the daemon broke off ({error})")
    except KeyboardInterrupt:
        fail("stopped; the daemon goes on with the pull")


def _steps(lines: Iterable[str]) -> Iterator[Progress]:
    """What a pull's lines say, in Ollama's words. Ends the command if it failed."""
    status = ""
    for line in lines:
        step = json.loads(line)
        if "error" in step:
            fail(step["error"])
        status = step["status"]
        if "total" in step:
            file = status.partition(" ")[2]
            yield Progress("fetching", file, step.get("completed", 0), step["total"])
    if status != "success":
        fail("the daemon ended before the pull was over")


def _serve_own(url: str, model: str, name: str, error: httpx.TransportError) -> None:
    """Start a daemon of the user's own that has the model, which is pulled before if need be."""
    address = own_address(url)
    if address is None:
        unreachable(url, error)
    try:
        folder = models_folder()
        found = find_models([folder] if folder.is_dir() else [], leave_out_clashes=True)
        mine = tuple(one for one in found.models if one.name == name)
        clashing = [one for one in found.left_out if one.clash == name]
        if clashing:
            fail("\n".join(map(str, clashing)))
        if not mine and not HUB.fullmatch(model):
            fail(
                f"no daemon answers at {url} ({error}), and {folder} has no model {name}; start "
                "one with `appliance serve`, or have a model pulled: appliance run ORG/MODEL"
            )
        if mine:
            hub = HUB.fullmatch(model)
            _tell_of_revision(name, hub and hub["revision"])
        else:
            mine = (FoundModel(name, _fetch(model, folder, name)),)
        with tempfile.TemporaryDirectory(prefix="appliance-run-") as scratch:
            file = Path(scratch, "appliance.toml")
            write_starter(file, Found(mine, ()), Terms(address, folder), now=True)
        start_own_daemon(url, address)
        if not _has(_served(url), name):  # it looked through the folder before, or left it out
            added = {"name": name, "path": str(mine[0].path)}
            call("POST", operators_url(url), "/api/models", added)
    except httpx.TransportError as broken:
        unreachable(url, broken)
    except NothingToServe as wrong:
        fail("\n".join(map(str, wrong.left_out)))
    except ConfigError as wrong:
        fail("\n".join(f"{one.key}: {one.wrong}; {one.remedy}" for one in wrong.problems))
    except (ApplianceError, OSError) as wrong:
        fail(str(wrong))


def _fetch(model: str, folder: Path, name: str) -> Path:
    """Pull a model of a hub into the user's folder; where it is there."""
    try:
        with failing(model), telling(False, err=True) as tell:
            return fetch(model, folder, name, from_hub=True, tell=tell).path
    except KeyboardInterrupt:
        fail("the pull was stopped; it goes on where it stopped when the command is repeated")
