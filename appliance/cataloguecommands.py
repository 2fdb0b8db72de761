"""``appliance rm``: take a model from the catalogue of a running daemon."""

from __future__ import annotations

import sys
import time
from typing import Any
from urllib.parse import quote

import click
import httpx

from appliance.client import ANSWER_SECONDS, call, checked, connect, get, unreachable, url_option
from appliance.printing import json_option, print_json

POLL_SECONDS = 0.2


@click.command()
@click.argument("model")
@click.option("--force", is_flag=True, help="End its requests, rather than wait for them.")
@click.option("--keep-files", is_flag=True, help="Delete nothing.")
@click.option("--yes", is_flag=True, help="Ask nothing.")
@url_option
@json_option
def rm(model: str, force: bool, keep_files: bool, yes: bool, url: str, as_json: bool) -> None:
    """Take MODEL from the catalogue, now and for good, and delete its files if they are in the
    folder of models. New requests are refused at once; live ones go on to their ends before."""
    path = f"/api/models/{quote(model)}"
    found = get(url, path)
    if not yes and sys.stdin.isatty():
        live = found["running"] + found["waiting"]
        click.confirm(f"remove {model} ({live} live requests)?", abort=True)
    files = "false" if keep_files else "true"
    removal = call("DELETE", url, f"{path}?force={str(force).lower()}&files={files}")
    if removal["live"] and not as_json:
        click.echo(f"{model} takes no new requests; {removal['live']} go on to their ends")
    _await_end(url, path)
    if as_json:
        print_json(removal)
        return
    left = "its files are deleted" if removal["files"] else f"its files stay in {_path(found)}"
    click.echo(f"{model} is gone; {left}")


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
                time.sleep(POLL_SECONDS)
    except httpx.TransportError as error:
        unreachable(url, error)
