"""`appliance fleet endpoints`: asks boxes, and writes the file of those that take requests."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import click
import httpx

from appliance.client import fail, own_key
from appliance.errors import FleetError
from appliance.fleet.endpoints import Box, Endpoints, Polled, read_boxes
from appliance.fleet.plan_cli import apply_command, plan
from appliance.platform.durable import replace, sync_replaced

POLL_SECONDS: Final = 2.0
"""A box that does not answer for so long gives no answer."""
_READABLE: Final = 0o644
"""The picker may be another user."""
_MOST_AT_ONCE: Final = 64


@click.group()
def fleet() -> None:
    """Put several boxes behind one address, and plan which of them hold which models."""


fleet.add_command(plan)
fleet.add_command(apply_command)


@fleet.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--box", "boxes", multiple=True, required=True, metavar="NAME=URL",
    help="A box: http://ADDRESS:PORT, with an IPv4 address. Give one for each.",
)  # fmt: skip
@click.option("--once", is_flag=True, help="Ask the boxes once, write FILE and end.")
@click.option(
    "--interval", type=click.FloatRange(min=0.1), default=1.0, show_default=True,
    help="Seconds between two rounds.",
)  # fmt: skip
def endpoints(file: Path, boxes: tuple[str, ...], once: bool, interval: float) -> None:
    """Write the boxes that take requests to FILE, for llm-d's endpoint picker, and follow them.

    A box that drains, or is not ready, is out at once, one that does not answer after two rounds.
    Boxes with keys want one with the scope observe, in $APPLIANCE_API_KEY.
    """
    try:
        known = read_boxes(boxes)
    except FleetError as error:
        fail(str(error), 2)
    key = own_key()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    state, written = Endpoints(known), b""
    with (
        httpx.Client(headers=headers, timeout=POLL_SECONDS) as client,
        ThreadPoolExecutor(min(_MOST_AT_ONCE, len(known))) as threads,
    ):
        while True:
            try:
                lines = state.polled(_round(client, threads, known))
            except FleetError as error:
                fail(str(error))
            for line in lines:
                click.echo(line, err=True)
            if (document := state.document()) != written:
                _write(file, document)
                written = document
            if once:
                return
            time.sleep(interval)


def _round(
    client: httpx.Client, threads: ThreadPoolExecutor, boxes: Sequence[Box]
) -> dict[str, Polled | None]:
    """The answers of all boxes, which are asked at the same time."""
    answers = threads.map(lambda box: _poll(client, box), boxes)
    return dict(zip((box.name for box in boxes), answers, strict=True))


def _poll(client: httpx.Client, box: Box) -> Polled | None:
    try:
        ready = client.get(f"{box.url}/readyz")
        load = client.get(f"{box.url}/api/load")
    except httpx.HTTPError:
        return None
    return Polled(ready.status_code, load.status_code, load.content)


def _write(file: Path, document: bytes) -> None:
    try:
        replace(file, [document], lambda descriptor: os.fchmod(descriptor, _READABLE))
    except OSError as error:
        fail(f"{file}: cannot be written: {error.strerror}")
    sync_replaced(file)
