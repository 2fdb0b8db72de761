"""`appliance policy new`, `test` and `docs`: for those who write policies."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

import click
import msgspec

from appliance.errors import PolicyError
from appliance.printing import json_option, print_json, print_table


@click.command()
@click.argument("name")
@click.option(
    "--dir", "directory", type=click.Path(file_okay=False, path_type=Path), default=Path(),
    help="Where to make its folder (default: here).",
)  # fmt: skip
def new(name: str, directory: Path) -> None:
    """Write a new policy NAME: a package that can be installed, and tests for it."""
    from appliance.policies import available
    from appliance.policytemplate import write_policy

    if name in available():
        raise click.UsageError(f"a policy {name!r} is installed already")
    try:
        written = write_policy(name, directory)
    except PolicyError as error:
        raise click.UsageError(str(error)) from error
    except OSError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
    for path in written:
        click.echo(path)
    click.echo(f"Test it: appliance policy test {directory / name}", err=True)


@click.command()
@click.argument("target", metavar="PATH|MODULE:CLASS|NAME")
@click.option(
    "--p99-ms", type=click.FloatRange(min=0, min_open=True),
    help="What the slowest hundredth of the answers to a hook may take.",
)  # fmt: skip
@json_option
def test(target: str, p99_ms: float | None, as_json: bool) -> None:
    """Test a policy: its package's folder, MODULE:CLASS, or the NAME of an installed one.

    It is asked what the machine asks in boxes of all sizes, and has to serve some by itself. Exit
    status: 0 nothing to object to, 1 something, 2 it cannot be loaded.
    """
    from appliance.conformance.kit import MACHINE_SECONDS, check  # loads the lab
    from appliance.conformance.loading import find

    try:
        found = find(target)
    except PolicyError as error:
        if error.__cause__ is not None and not isinstance(error.__cause__, OSError):
            click.echo("".join(traceback.format_exception(error.__cause__)), err=True, nl=False)
        raise click.UsageError(str(error)) from error
    limit = MACHINE_SECONDS if p99_ms is None else p99_ms / 1000
    reports = [(policy, check(policy.kind, p99_seconds=limit)) for policy in found]
    if as_json:
        print_json([
            {"name": policy.name, "source": policy.source, "ok": report.ok}
            | msgspec.to_builtins(report)
            for policy, report in reports
        ])  # fmt: skip
    else:
        for policy, report in reports:
            click.echo(f"{policy.name} ({policy.source})")
            rows = [
                [row.hook, row.asked, row.answered, row.valid, f"{row.p99_seconds * 1e6:.0f}"]
                for row in report.hooks
            ]
            print_table(["HOOK", "ASKED", "ANSWERED", "VALID", "P99 µs"], rows)
            click.echo(f"{report.ended} requests served to their end")
            click.echo(str(report))
    sys.exit(0 if all(report.ok for _, report in reports) else 1)


@click.command()
def docs() -> None:
    """Print the documentation of the hooks, as Markdown."""
    from appliance.policydoc import generate

    click.echo(generate(), nl=False)
