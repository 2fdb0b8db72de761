"""Commands for the models of a running daemon: where they are, what they take and promise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import click

from appliance.client import call, get, url_option
from appliance.printing import json_option, print_json


def model_command(action: Callable[..., None]) -> click.Command:
    """A command for one model of a running daemon."""
    return click.command()(click.argument("model")(url_option(json_option(action))))


@model_command
def load(model: str, url: str, as_json: bool) -> None:
    """Bring MODEL's weights to a device before anybody asks, as soon as there is room."""
    found = post(url, model, "load")
    told = "is on its way to a device" if found["wanted"] else "is on a device"
    show(found, as_json, f"{model} {told}")


@model_command
def stop(model: str, url: str, as_json: bool) -> None:
    """Have MODEL give its memory on devices back. Its requests are paused, and go on later."""
    show(post(url, model, "evict"), as_json, f"{model} leaves its devices")


@model_command
def drain(model: str, url: str, as_json: bool) -> None:
    """Refuse new requests for MODEL; those that are live go on to their ends."""
    found = post(url, model, "drain")
    live = found["running"] + found["waiting"]
    show(found, as_json, f"{model} takes no new requests; {live} are live")


@model_command
def resume(model: str, url: str, as_json: bool) -> None:
    """Take requests for MODEL again."""
    show(post(url, model, "resume"), as_json, f"{model} takes requests")


@model_command
def pin(model: str, url: str, as_json: bool) -> None:
    """Keep MODEL's weights in the host cache, now and after a restart."""
    show(post(url, model, "pin"), as_json, f"{model} is pinned")


@model_command
def unpin(model: str, url: str, as_json: bool) -> None:
    """Let MODEL's weights leave the host cache when others want the room."""
    show(post(url, model, "unpin"), as_json, f"{model} is not pinned")


@click.command()
@click.argument("model")
@click.option("--ttft", metavar="DURATION", help="Promised time to the first token, such as 5s.")
@click.option("--tbt", metavar="DURATION", help="Promised time between tokens, such as 100ms.")
@click.option("--batch-ttft", metavar="DURATION", help="The same for batch requests.")
@click.option("--batch-tbt", metavar="DURATION", help="The same for batch requests.")
@click.option("--queue", type=click.IntRange(min=1), help="Live requests at most.")
@url_option
@json_option
def limit(
    model: str,
    ttft: str | None,
    tbt: str | None,
    batch_ttft: str | None,
    batch_tbt: str | None,
    queue: int | None,
    url: str,
    as_json: bool,
) -> None:
    """Set what new requests for MODEL are promised and how many it takes, now and after a
    restart; without options, show it."""
    slo = _given(ttft=ttft, tbt=tbt)
    batch_slo = _given(ttft=batch_ttft, tbt=batch_tbt)
    body = _given(slo=slo or None, batch_slo=batch_slo or None, max_queue=queue)
    path = f"/api/models/{quote(model)}"
    found = call("PUT", url, f"{path}/limits", body) if body else get(url, path)
    terms = found["terms"]
    told = [
        f"{kind}: first token {terms[key]['ttft_seconds']:g} s, "
        f"then {terms[key]['tbt_seconds']:g} s each"
        for kind, key in (("interactive", "slo"), ("batch", "batch_slo"))
    ]
    show(found, as_json, "\n".join([*told, f"at most {terms['max_queue']} requests"]))


def _given(**values: Any) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def post(url: str, model: str, verb: str) -> dict[str, Any]:
    answer: dict[str, Any] = call("POST", url, f"/api/models/{quote(model)}/{verb}")
    return answer


def show(found: dict[str, Any], as_json: bool, told: str) -> None:
    if as_json:
        print_json(found)
    else:
        click.echo(told)
