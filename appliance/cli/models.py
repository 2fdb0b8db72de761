"""Commands for the models of a running daemon: what they are, where they are, and their removal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import quote

import click
import httpx

from appliance.checkpoints.adapters import SEPARATOR
from appliance.checkpoints.architectures.chat_sounds import HEARS, read_besides_text
from appliance.checkpoints.architectures.transcribers import TRANSCRIBERS
from appliance.checkpoints.language_models import MEDIA
from appliance.cli.output import json_option, print_json
from appliance.client import ANSWER_SECONDS, call, checked, connect, get, unreachable, url_option
from appliance.units import human


def model_command(action: Callable[..., None]) -> click.Command:
    """A command for one model of a running daemon."""
    return click.command()(click.argument("model")(url_option(json_option(action))))


@model_command
def load(model: str, url: str, as_json: bool) -> None:
    """Load MODEL's weights to a device before a request asks for them, as soon as there is room."""
    found = post(url, model, "load")
    text = "is on its way to a device" if found["load_requested"] else "is on a device"
    _report(found, as_json, f"{model} {text}")


@model_command
def stop(model: str, url: str, as_json: bool) -> None:
    """Unload MODEL from the devices. Its requests are paused, and go on later."""
    _report(post(url, model, "evict"), as_json, f"{model} leaves its devices")


@model_command
def drain(model: str, url: str, as_json: bool) -> None:
    """Refuse new requests for MODEL; those that are live go on to their ends."""
    found = post(url, model, "drain")
    live = found["running"] + found["waiting"]
    _report(found, as_json, f"{model} takes no new requests; {live} are live")


@model_command
def resume(model: str, url: str, as_json: bool) -> None:
    """Take requests for MODEL again."""
    _report(post(url, model, "resume"), as_json, f"{model} takes requests")


@model_command
def pin(model: str, url: str, as_json: bool) -> None:
    """Keep MODEL's weights in the host cache, now and after a restart."""
    _report(post(url, model, "pin"), as_json, f"{model} is pinned")


@model_command
def unpin(model: str, url: str, as_json: bool) -> None:
    """Let MODEL's weights leave the host cache when others want the room."""
    _report(post(url, model, "unpin"), as_json, f"{model} is not pinned")


@click.command()
@click.argument("model")
@click.option("--ttft", metavar="DURATION", help="Promised time to the first token, such as 5s.")
@click.option("--tbt", metavar="DURATION", help="Promised time between tokens, such as 100ms.")
@click.option(
    "--gap", metavar="DURATION", help="Promised longest time between two tokens; 0s for none."
)
@click.option("--batch-ttft", metavar="DURATION", help="The same for batch requests.")
@click.option("--batch-tbt", metavar="DURATION", help="The same for batch requests.")
@click.option("--batch-gap", metavar="DURATION", help="The same for batch requests.")
@click.option("--queue", type=click.IntRange(min=1), help="Live requests at most.")
@url_option
@json_option
def limit(
    model: str,
    ttft: str | None,
    tbt: str | None,
    gap: str | None,
    batch_ttft: str | None,
    batch_tbt: str | None,
    batch_gap: str | None,
    queue: int | None,
    url: str,
    as_json: bool,
) -> None:
    """Set the service level of new requests for MODEL and how many it takes, now and after a
    restart; without options, show it."""
    slo = _given(ttft=ttft, tbt=tbt, gap=gap)
    batch_slo = _given(ttft=batch_ttft, tbt=batch_tbt, gap=batch_gap)
    body = _given(slo=slo or None, batch_slo=batch_slo or None, max_queue=queue)
    path = f"/api/models/{quote(model)}"
    found = call("PUT", url, f"{path}/limits", body) if body else get(url, path)
    if (terms := found["terms"]) is None:
        _report(found, as_json, ELSEWHERE)
        return
    text = [
        f"{kind}: {_level(terms[key])}"
        for kind, key in (("interactive", "slo"), ("batch", "batch_slo"))
    ]
    _report(found, as_json, "\n".join([*text, f"at most {terms['max_queue']} requests"]))


ELSEWHERE: Final = "it is a model of another server, whose table in the configuration has `remote`"


def _level(slo: dict[str, float]) -> str:
    """What an SLO promises."""
    text = f"first token {slo['ttft_seconds']:g} s, then {slo['tbt_seconds']:g} s each"
    gap = slo.get("gap_seconds", 0.0)
    return f"{text}, at most {gap:g} s apart" if gap else text


def _given(**values: Any) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def post(url: str, model: str, verb: str) -> dict[str, Any]:
    answer: dict[str, Any] = call("POST", url, f"/api/models/{quote(model)}/{verb}")
    return answer


def _report(found: dict[str, Any], as_json: bool, text: str) -> None:
    if as_json:
        print_json(found)
    else:
        click.echo(text)


@model_command
def show(model: str, url: str, as_json: bool) -> None:
    """Show what MODEL is: its architecture and sizes, its terms, and where it is."""
    found = get(url, f"/api/models/{quote(model)}")
    if as_json:
        print_json(found)
        return
    if found["facts"] is None:
        click.echo(f"{ELSEWHERE}; {found['running']} requests running")
        return
    lines = [*_facts(found["facts"]), *_terms(found["terms"]), *_whereabouts(found)]
    width = max(len(name) for name, _ in lines)
    for name, value in lines:
        click.echo(f"{name:<{width}}  {value}")


def _media(facts: dict[str, Any]) -> str:
    for what in ("image", "sound"):
        if most := facts[f"{what}s"]:
            return f"text, and up to {most} {what}{'s' * (most > 1)} in a prompt"
    name = facts["architecture"]
    kind = "sounds" if name in HEARS else read_besides_text(name).replace(" and ", " or ")
    return f"text only, no {kind}"


def _facts(facts: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        ("architecture", facts["architecture"]),
        *([("reads", _media(facts))] * (facts["architecture"] in MEDIA)),
        ("parameters", _count(facts["parameters"])),
        ("context", f"{facts['max_context_tokens']} tokens"),
        ("computed in", facts["dtype"]),
        ("weights", _weights(facts)),
        *([("task", facts["embedding_task"])] * bool(facts.get("embedding_task"))),
        ("KV per token", human(facts["kv_bytes_per_token"])),
        *(
            [(_kept(facts), f"{human(facts['state_bytes'])} of each request")]
            * bool(facts["state_bytes"])
        ),
        ("batch", f"at most {facts['max_batch']} requests"),
        *_adapters(facts),
        *_parsers(facts),
        ("files", facts["path"]),
    ]


def _kept(facts: dict[str, Any]) -> str:
    """What a request keeps however long it is."""
    return "KV of sound" if facts["architecture"] in TRANSCRIBERS else "states"


def _weights(facts: dict[str, Any]) -> str:
    nbytes = human(facts["weight_bytes"])
    if stored := facts.get("multiplied"):
        return f"{nbytes}, in {facts['dtype']}; its files have them in {stored}"
    return nbytes


def _adapters(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Those that a model has, and whether others may come."""
    names, places = facts["adapters"], facts["max_loras"]
    if not places:
        return []
    rank = facts["max_lora_rank"]
    room = f"{len(names)} of {places} places, for ranks up to {rank}" if rank else "a fixed list"
    return [("adapters", f"{', '.join(names) or 'none'} ({room})")]


def _parsers(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """What reads calls of tools and reasoning, and why, or why nothing does."""
    found = []
    for name, key in (("tool parser", "tool_parser"), ("reasoning", "reasoning_parser")):
        if reason := facts.get(f"{key}_reason"):
            found.append((name, f"{facts[key] or 'none'} ({reason})"))
    return found


def _terms(terms: dict[str, Any]) -> list[tuple[str, str]]:
    levels = [
        (name, _level(terms[key]))
        for name, key in (("interactive", "slo"), ("batch work", "batch_slo"))
    ]
    pinned = "stays in the host cache" if terms["pinned"] else "gives way in the host cache"
    aliases = [("aliases", ", ".join(names))] if (names := terms.get("aliases")) else []
    queue = ("queue", f"at most {terms['max_queue']} requests")
    return [*levels, queue, ("pin", pinned), *aliases]


def _whereabouts(found: dict[str, Any]) -> list[tuple[str, str]]:
    places = ", ".join(f"instance {n}: {at}" for n, at in sorted(found["residency"].items()))
    requests = f"{found['running']} running, {found['waiting']} waiting"
    if found["draining"]:
        requests += "; takes no new ones"
    state = ": ".join([found["state"], *(found["failure"] or "").splitlines()[:1]])
    return [
        ("state", state),
        *([("groups", ", ".join(found["groups"]))] if found.get("groups") else ()),
        ("residency", places or "nowhere"),
        ("requests", requests),
    ]


def _count(number: int) -> str:
    """Parameters as people say them: 8.0B, 135M."""
    for unit, scale in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= scale:
            return f"{number / scale:.1f}{unit}"
    return str(number)


POLL_SECONDS = 0.2


@click.command()
@click.argument("model")
@click.option("--force", is_flag=True, help="End its requests, rather than wait for them.")
@click.option("--keep-files", is_flag=True, help="Delete nothing.")
@click.option("--yes", is_flag=True, help="Ask nothing. Without a terminal files stay otherwise.")
@url_option
@json_option
def rm(model: str, force: bool, keep_files: bool, yes: bool, url: str, as_json: bool) -> None:
    """Take MODEL from the catalogue, now and for good, and delete its files if they are in the
    folder of models. New requests are refused at once; live ones go on to their ends before.

    MODEL:ADAPTER is a LoRA adapter of a model with room for some; its files stay."""
    path = f"/api/models/{quote(model)}"
    if (base := _base_of_adapter(url, model)) is not None:
        _remove_adapter(url, base, model, force=force, as_json=as_json)
        return
    found = get(url, path)
    if ask := not yes and sys.stdin.isatty():
        live = found["running"] + found["waiting"]
        click.confirm(f"remove {model} ({live} live requests)?", abort=True)
    files = "true" if (yes or ask) and not keep_files else "false"
    removal = call("DELETE", url, f"{path}?force={str(force).lower()}&files={files}")
    if removal["live"] and not as_json:
        click.echo(f"{model} takes no new requests; {removal['live']} go on to their ends")
    _await_end(url, path)
    if as_json:
        print_json(removal)
        return
    left = "its files are deleted" if removal["files"] else f"its files stay in {_path(found)}"
    if not (yes or ask or keep_files):
        left += " (without a terminal, files are deleted only with --yes)"
    click.echo(f"{model} is gone; {left}")


def _base_of_adapter(url: str, name: str) -> str | None:
    """The model that has an adapter of this full name, if one has."""
    for model in get(url, "/api/models")["models"]:
        if name in (model["facts"] or {}).get("adapters", ()):
            return str(model["model"])
    return None


def _remove_adapter(url: str, base: str, full: str, *, force: bool, as_json: bool) -> None:
    own = full.removeprefix(f"{base}{SEPARATOR}")
    path = f"/api/models/{quote(base)}/adapters/{quote(own)}"
    removal = call("DELETE", url, f"{path}?force={str(force).lower()}")
    live = removal["live"]
    more = f"; {live} requests go on to their ends" if live else "; its files stay"
    _report(removal, as_json, f"{full} takes no new requests{more}")


def _path(found: dict[str, Any]) -> str:
    return str((found["facts"] or {}).get("path", "their place"))


def _await_end(url: str, path: str) -> None:
    """Return when nothing is left of the model; its files may be, which ends the command."""
    try:
        with connect(url) as client:
            while True:
                response = client.get(path, timeout=ANSWER_SECONDS)
                gone = response.status_code == httpx.codes.NOT_FOUND
                if gone and response.json()["error"]["code"] != "files_left":
                    return
                checked(response)
                time.sleep(POLL_SECONDS)  # no event tells of the files' deletion
    except httpx.TransportError as error:
        unreachable(url, error)
