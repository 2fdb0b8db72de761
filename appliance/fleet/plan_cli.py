"""`appliance fleet plan` and `apply`: which box should hold which model, and having it so."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeVar

import click
import httpx
import msgspec

from appliance.client import fail, own_key
from appliance.errors import FleetError
from appliance.fleet.apply import Boxes, apply
from appliance.fleet.box_addresses import Box, Reach, boxes_option, read_boxes
from appliance.fleet.observed import (
    DAY_SECONDS,
    USAGE_DAYS,
    Hold,
    ObservedBox,
    PlanFile,
    make_plan,
    read_box,
)
from appliance.fleet.placement import Step
from appliance.units import human

ANSWER_SECONDS: Final = 30.0
T = TypeVar("T")


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@boxes_option(Reach.NETWORK, required=False)
@click.option(
    "--observed", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="In place of boxes, what was seen of some (--write-observed).",
)  # fmt: skip
@click.option(
    "--write-observed", "written", type=click.Path(dir_okay=False, path_type=Path),
    help="Write what was seen of the boxes to this file, too.",
)  # fmt: skip
@click.option(
    "--hold", type=click.Choice([one.value for one in Hold]), default=Hold.CATALOGUE.value,
    show_default=True,
    help="What is planned: which boxes serve a model, or which keep it in their host cache.",
)  # fmt: skip
@click.option(
    "--most", type=click.IntRange(min=1), default=20, show_default=True, help="Steps at most."
)
def plan(
    file: Path,
    boxes: tuple[str, ...],
    observed: Path | None,
    written: Path | None,
    hold: str,
    most: int,
) -> None:
    """Write to FILE which box should hold which model, and print why. Nothing is changed.

    Demands are forecasts by the boxes' ledgers (usage.directory) of today and the week before. The
    key, in $APPLIANCE_API_KEY, has the scope admin.
    """
    if (observed is None) == (not boxes):
        fail("give --box for each box, or --observed FILE", 2)
    try:
        if observed is not None:
            found = _decoded(observed, list[ObservedBox])
        else:
            found = observe(read_boxes(boxes, Reach.NETWORK))
        if written is not None:
            _write(written, found)
        made = make_plan(found, Hold(hold), most)
        _write(file, made)
    except FleetError as error:
        fail(str(error))
    for number, step in enumerate(made.steps, 1):
        click.echo(f"{number}. {line_of(step)}")
    if not made.steps:
        click.echo("nothing to do: no step is worth it")
    elif len(made.steps) == most:
        click.echo(f"more may follow: --most is {most}", err=True)


@click.command("apply")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--wait", type=click.FloatRange(min=0), default=600.0, show_default=True,
    help="Seconds to wait at a step for a model to be ready, or for its requests to end.",
)  # fmt: skip
def apply_command(file: Path, wait: float) -> None:
    """Take the steps of a plan at its boxes, in order, until one refuses.

    What is so already is left as it is: apply a plan again to go on. No box gives a model up before
    another one is ready to serve it, and files are never deleted. The key, in $APPLIANCE_API_KEY,
    has the scope admin.
    """
    try:
        found = _decoded(file, PlanFile)
        with _client() as client:
            taken = apply(found, Boxes(client, found.urls), click.echo, wait)
    except FleetError as error:
        fail(str(error))
    click.echo(f"{taken} of {len(found.steps)} steps changed something")


def line_of(step: Step) -> str:
    """A line for people."""
    where = {
        (True, True): f"{step.source} -> {step.target}",
        (False, True): f"-> {step.target}",
        (True, False): f"{step.source} ->",
    }.get((step.source is not None, step.target is not None), "")
    cost = f", {human(step.moved_bytes)} to read" if step.moved_bytes else ""
    return f"{step.kind} {step.model} {where}{cost}: {step.reason}"


def observe(boxes: Sequence[Box]) -> list[ObservedBox]:
    """All boxes, one after the other. Raises `FleetError`, as a plan without one of them would
    place its models anew."""
    now = datetime.fromtimestamp(time.time(), UTC)
    seconds = (now - now.replace(hour=0, minute=0, second=0, microsecond=0)).total_seconds()
    assert 0 <= seconds < DAY_SECONDS
    usage = f"/api/usage?by=model,day&since={USAGE_DAYS}d"
    found = []
    with _client() as client:
        for box in boxes:
            status, load = _get(client, box, "/api/status"), _get(client, box, "/api/load")
            used = _get(client, box, usage)
            try:
                found.append(read_box(box.name, box.url, status, load, used, now.date(), seconds))
            except msgspec.DecodeError as error:
                raise FleetError(
                    f"{box.name}: its answer is not the appliance's: {error}"
                ) from error
    return found


def _get(client: httpx.Client, box: Box, path: str) -> bytes:
    try:
        response = client.get(f"{box.url}{path}")
    except httpx.HTTPError as error:
        raise FleetError(
            f"{box.name} does not answer ({error}): start it, or leave its --box out"
        ) from error
    if response.status_code == httpx.codes.NOT_FOUND and path.startswith("/api/usage"):
        raise FleetError(f"{box.name} keeps no ledger: set usage.directory in its configuration")
    if response.status_code in (401, 403):
        raise FleetError(
            f"{box.name}: {path} is {response.status_code}: set $APPLIANCE_API_KEY to a key with"
            " the scope admin"
        )
    if not response.is_success:
        raise FleetError(f"{box.name}: {path} is {response.status_code}")
    return response.content


def _client() -> httpx.Client:
    key = own_key()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.Client(headers=headers, timeout=ANSWER_SECONDS)


def _decoded(file: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except OSError as error:
        raise FleetError(f"{file}: cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise FleetError(f"{file}: {error}") from error


def _write(file: Path, document: Any) -> None:
    try:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(document)) + b"\n")
    except OSError as error:
        raise FleetError(f"{file}: cannot be written: {error.strerror}") from error
