"""`appliance fleet`: which boxes take requests, as a file and as a table, and the front of them."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click
from rich.console import Console

from appliance.client import DEFAULT_URL, check_address, fail, own_key
from appliance.errors import FleetError
from appliance.fleet.box_addresses import Box, Reach, boxes_option, read_boxes
from appliance.fleet.endpoints import Endpoints, Polled
from appliance.fleet.plan_cli import apply_command, plan
from appliance.fleet.polling import BoxPoller
from appliance.fleet.ranking import ROUTERS
from appliance.fleet.ray_serve.node import Node, use_token
from appliance.fleet.ray_serve.settings import RAY_PORT, FleetSettings
from appliance.fleet.status import all_take, rows, table
from appliance.platform.durable import replace, sync_replaced

_READABLE: Final = 0o644
"""The picker may be another user."""
_WIDE: Final = 1000
"""Columns of a table that no terminal shows."""


@click.group()
def fleet() -> None:
    """Put several boxes behind one address, and plan which of them hold which models."""


fleet.add_command(plan)
fleet.add_command(apply_command)


@fleet.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@boxes_option(Reach.PICKER)
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
    known = known_boxes(boxes, Reach.PICKER)
    asyncio.run(_follow(file, known, own_key(), None if once else interval))


async def _follow(
    file: Path, boxes: Sequence[Box], key: str | None, interval: float | None
) -> None:
    """Write the file round by round, or once without an interval."""
    state, written = Endpoints(boxes), b""
    async with BoxPoller(key) as poller:
        while True:
            try:
                lines = state.polled(await poller.poll_all(boxes))
            except FleetError as error:
                fail(str(error))
            for line in lines:
                click.echo(line, err=True)
            if (document := state.document()) != written:
                _write(file, document)
                written = document
            if interval is None:
                return
            await asyncio.sleep(interval)


@fleet.command()
@boxes_option(Reach.NETWORK)
def status(boxes: tuple[str, ...]) -> None:
    """Show what each box has on its devices and how busy it is.

    Ends with status 1 unless all of them take requests. Boxes with keys want one with the scope
    observe, in $APPLIANCE_API_KEY.
    """
    known = known_boxes(boxes, Reach.NETWORK)
    answers = asyncio.run(_answers(known, own_key()))
    try:
        lines = rows(known, answers)
    except FleetError as error:
        fail(str(error))
    console = Console() if sys.stdout.isatty() else Console(width=_WIDE)
    console.print(table(lines))
    if not all_take(known, answers):
        raise SystemExit(1)


@fleet.command()
@click.option(
    "--box", default=DEFAULT_URL, show_default=True, metavar="URL",
    help="Where the daemon of this machine listens.",
)  # fmt: skip
@click.option("--no-box", is_flag=True, help="There is no daemon on this machine.")
@click.option("--name", help="Name of the box.", show_default="the machine's name")
@click.option("--join", default="", metavar="HOST:PORT", help="Join the fleet of this head.")
@click.option(
    "--ray-port", type=click.IntRange(1, 65535), default=RAY_PORT, show_default=True,
    help="Of the head: where nodes join.",
)  # fmt: skip
@click.option("--address", default="", help="Address of this machine for the other nodes.")
@click.option(
    "--bind", default="0.0.0.0:8080", show_default=True, metavar="HOST:PORT",
    help="Of the head: where clients find each node.",
)  # fmt: skip
@click.option("--no-front", is_flag=True, help="Clients do not talk to this node.")
@click.option(
    "--policy", type=click.Choice(sorted(ROUTERS)), default=FleetSettings().policy,
    show_default=True, help="Of the head: how a box is chosen.",
)  # fmt: skip
@click.option(
    "--max-queue", type=click.IntRange(min=1), default=FleetSettings().max_queue,
    show_default=True, help="Of the head: at least what api.max_queue of every box is.",
)  # fmt: skip
def serve(
    box: str, no_box: bool, name: str | None, join: str, ray_port: int, address: str,
    bind: str, no_front: bool, policy: str, max_queue: int,
) -> None:  # fmt: skip
    """Put the daemon of this machine into a fleet on Ray Serve, as its head or joining one.

    The daemon stays a service of its own. Boxes with keys want one with the scope observe, in
    $APPLIANCE_API_KEY. Needs `pip install appliance[ray]`.
    """
    check_address(box)
    if not box.startswith("http://"):
        fail(f"--box: {box!r}: a fleet reaches its boxes by http://HOST:PORT", 2)
    host, _, port = bind.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        fail(f"--bind: {bind!r} is no address: give HOST:PORT", 2)
    if importlib.util.find_spec("ray") is None:
        fail("Ray is not installed here: pip install 'appliance[ray]'")
    try:
        use_token(os.environ, Path.home(), make=not join)
    except FleetError as error:
        fail(str(error))
    from appliance.fleet.ray_serve.run import Listen, run  # Ray is there

    node = Node(
        join=join,
        port=ray_port,
        address=address,
        box_name=name or socket.gethostname(),
        box_url="" if no_box else box,
        front=not no_front,
    )
    settings = FleetSettings(policy=policy, max_queue=max_queue)
    run(node, own_key(), settings, Listen(host.strip("[]"), int(port)))


def known_boxes(texts: Sequence[str], reach: Reach) -> tuple[Box, ...]:
    """Of the option `--box`. Ends the command for what is no box."""
    try:
        return read_boxes(texts, reach)
    except FleetError as error:
        fail(str(error), 2)


async def _answers(boxes: Sequence[Box], key: str | None) -> dict[str, Polled | None]:
    async with BoxPoller(key) as poller:
        return await poller.poll_all(boxes)


def _write(file: Path, document: bytes) -> None:
    try:
        replace(file, [document], lambda descriptor: os.fchmod(descriptor, _READABLE))
    except OSError as error:
        fail(f"{file}: cannot be written: {error.strerror}")
    sync_replaced(file)
