"""``appliance lab calibrate``: a cost model from measured steps, and how good it is."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Table

from appliance.errors import LabError
from appliance.lab.calibration.fit_profiles import (
    PREFILL_R2,
    RECORDED,
    STEP_R2,
    Calibrated,
    Quality,
    calibrate,
    known_sizes,
    profile_table,
    read_sizes,
    sizes_of,
)
from appliance.lab.calibration.step_tables import TableKey, read_tables
from appliance.lab.replay.journal_workload import recording

existing = click.Path(exists=True, dir_okay=False, path_type=Path)
written = click.Path(dir_okay=False, path_type=Path)


@click.command(name="calibrate")
@click.argument("paths", metavar="TABLE...", type=existing, nargs=-1, required=True)
@click.option(
    "--models",
    "models_path",
    type=existing,
    help="A table of models and their sizes; the built-in ones if it is not given.",
)
@click.option(
    "--min-r2",
    type=float,
    nargs=2,
    default=(PREFILL_R2, STEP_R2),
    show_default=True,
    metavar="PREFILL DECODE",
    help="What each fit must explain of rows that were held out.",
)
@click.option("--json", "json_path", type=written, help="Write a file.")
@click.option("--write", "write_path", type=written, help="Write the profiles, as CSV.")
def calibrate_command(
    paths: tuple[Path, ...],
    models_path: Path | None,
    min_r2: tuple[float, float],
    json_path: Path | None,
    write_path: Path | None,
) -> None:
    """Fit the cost model to TABLEs of measured steps, or to the journals of a daemon.

    Exit status 1 if a fit explains too little of the rows that it has not seen.
    """
    try:
        sizes = known_sizes() | (read_sizes(models_path) if models_path else {})
        measured = read_tables(path for path in paths if ".csv" in path.suffixes)
        for path in paths:
            if ".csv" not in path.suffixes:
                recorded = recording(path)
                for profile in recorded.setting.profiles.values():
                    key = TableKey(path.stem, profile.name, RECORDED, profile.tp)
                    measured[key] = recorded.measured[profile.name]
                    sizes[profile.name] = sizes_of(profile)
        found = calibrate(measured, sizes)
    except LabError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    console = Console() if sys.stdout.isatty() else Console(width=1000)
    console.print(_table(found, min_r2))
    if json_path is not None:
        json_path.write_bytes(_json(paths, found, min_r2))
    if write_path is not None:
        write_path.write_text(profile_table(found), encoding="utf-8")
        for one in found:
            if one.profile() is None:
                click.echo(f"{_name(one)}: no profile: {_lacks(one)}", err=True)
    misses = [one for one in found if one.misses(*min_r2)]
    for one in misses:
        click.echo(f"{_name(one)}: {_missed(one, min_r2)}", err=True)
    sys.exit(1 if misses else 0)


def _name(one: Calibrated) -> str:
    return f"{one.model} on {one.gpu} tp={one.tp} ({one.source})"


def _lacks(one: Calibrated) -> str:
    if one.sizes is None:
        return "its sizes are not known (--models)"
    return "too few prompts" if one.prefill is None else "too few steps"


def _missed(one: Calibrated, bounds: Sequence[float]) -> str:
    said = []
    for name in one.misses(*bounds):
        found, bound = (one.prefill, bounds[0]) if name == "prefill" else (one.step, bounds[1])
        assert found is not None, "what is not there misses nothing"
        why = ""
        if found.attainable_r2 < bound:
            why = f"; a rising curve through these very rows gives {found.attainable_r2:.3f}"
        said.append(f"R² of {name} is {found.r2:.3f}, not {bound:g}{why}")
    return "; ".join(said)


def _table(found: Sequence[Calibrated], bounds: Sequence[float]) -> Table:
    made = Table(box=None, pad_edge=False)
    for title in ("SOURCE", "MODEL", "GPU", "TP"):
        made.add_column(title, no_wrap=True)
    for title in (
        *("PROMPTS", "LEFT OUT", "R²", "RISING", "ERROR", "TOKENS"),
        *("STEPS", "LEFT OUT", "R²", "RISING", "ERROR", "REQUESTS", "KV", "MIXED R²"),
    ):
        made.add_column(title, justify="right", no_wrap=True)
    for one in found:
        made.add_row(
            *(one.source, one.model, one.gpu, str(one.tp)),
            *_cells(one.prefill, bounds[0], "tokens"),
            *_cells(one.step, bounds[1], "requests", "kv_tokens"),
            "-" if math.isnan(one.mixed_r2) else f"{one.mixed_r2:.3f}",
        )
    return made


def _cells(found: Quality | None, bound: float, *sizes: str) -> list[str]:
    if found is None:
        return ["-"] * (5 + len(sizes))
    r2 = "-" if math.isnan(found.r2) else f"{found.r2:.3f}"
    return [
        *(str(found.rows), str(found.left_out)),
        r2 if found.r2 >= bound else f"{r2} !",
        *(f"{found.attainable_r2:.3f}", f"{found.relative_error:.1%}"),
        *(f"{found.ranges[size].least}-{found.ranges[size].most}" for size in sizes),
    ]


def _json(paths: Sequence[Path], found: Sequence[Calibrated], bounds: Sequence[float]) -> bytes:
    """A fit a line, six digits; NaN is null."""
    head = {
        "tables": [path.name for path in paths],
        "bounds": {"prefill": bounds[0], "step": bounds[1]},
    }
    fits = [
        msgspec.json.encode(
            {
                **_plain(msgspec.to_builtins(msgspec.structs.replace(one, sizes=None))),
                "misses": one.misses(*bounds),
            }
        )
        for one in found
    ]
    opening = msgspec.json.encode(head)[:-1]
    return opening + b',"fits":[\n' + b",\n".join(fits) + b"\n]}\n"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(of) for name, of in value.items() if name != "sizes"}
    return float(f"{value:.6g}") if isinstance(value, float) else value
