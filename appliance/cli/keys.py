"""`appliance key`: API keys and the organizations that they belong to, in the file that a running
daemon watches."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from appliance.access.keys import Key, KeyFile, NewKey, Scope, lifetime_seconds, make_key
from appliance.access.organizations import Limited, Limits, make_organization
from appliance.checkpoints.adapters import full_name
from appliance.cli.options import config_option
from appliance.cli.output import json_option, print_json, print_table
from appliance.client import fail
from appliance.config.loader import load_config
from appliance.config.schema import Config
from appliance.errors import ConfigError, KeyFieldError, KeysError, nearest
from appliance.vocabulary import RequestClass


class DurationType(click.ParamType[str]):
    """A duration: 30d, 12h, 90m."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            lifetime_seconds(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return str(value)


its_config = config_option(
    "config", "The daemon's configuration: its api.keys names the file of keys."
)
file_option = click.option(
    "--file", "file", type=click.Path(dir_okay=False, path_type=Path),
    help="The file of keys itself, instead.",
)  # fmt: skip
limit = click.IntRange(min=1, max=2**53)

BOUNDS = ("RPM", "TPM", "MONTHLY", "AT ONCE")
"""Columns of limits."""

_Command = TypeVar("_Command", bound=Callable[..., Any])


def limit_options(command: _Command) -> _Command:
    """The limits that a key, or an organization, may have."""
    for option in (
        click.option("--concurrency", type=limit, help="Requests at once."),
        click.option(
            "--tokens-per-month", type=limit,
            help="Prompts and answers together, of a calendar month in UTC; it needs "
            "usage.directory.",
        ),
        click.option(
            "--tokens-per-minute", type=limit, help="Prompts and answers together."
        ),
        click.option("--requests-per-minute", type=limit),
    ):  # fmt: skip
        command = option(command)
    return command


@click.group()
def key() -> None:
    """Make, list and revoke API keys. A running daemon follows at once."""


@key.command()
@click.argument("name")
@click.option(
    "--scope", "scopes", multiple=True, type=click.Choice([s.value for s in Scope]),
    default=(Scope.INFER.value,), show_default=True,
    help="infer: list models and generate. admin: everything else. Repeat it for both.",
)  # fmt: skip
@click.option(
    "--model", "models", multiple=True, metavar="MODEL",
    help="A model that the key knows; repeat it for more. Without any it knows all.",
)  # fmt: skip
@click.option(
    "--class", "classes", multiple=True, type=click.Choice([c.value for c in RequestClass]),
    help="The class of its requests; batch alone makes all of them batch work. Without any: both.",
)  # fmt: skip
@click.option("--slo", is_flag=True, help="Its requests may name a service level (x-slo).")
@click.option(
    "--no-guides", is_flag=True,
    help="Its requests may have no guides: schemas, grammars, tools that must be called.",
)  # fmt: skip
@click.option("--expires", "lifetime", type=DurationType(), help="After so long: 30d, 12h, 90m.")
@limit_options
@click.option(
    "--organization", metavar="NAME", help="Whose limits hold for all of its keys together."
)
@its_config
@file_option
@json_option
def create(
    name: str,
    scopes: tuple[str, ...],
    models: tuple[str, ...],
    classes: tuple[str, ...],
    slo: bool,
    no_guides: bool,
    lifetime: str | None,
    organization: str | None,
    config: Path,
    file: Path | None,
    as_json: bool,
    **limits: int | None,
) -> None:
    """Make the key NAME, and print it: this is the only time that it is shown."""
    keys = _keys(config, file)
    if file is None:
        _check_models(models, config)
    wanted = NewKey(
        name=name,
        scopes=tuple(map(Scope, scopes)),
        models=models,
        classes=tuple(map(RequestClass, classes)) or tuple(RequestClass),
        slo=slo,
        guides=not no_guides,
        expires=lifetime,
        organization=organization,
        **limits,
    )
    try:
        made, secret = make_key(wanted, time.time())
        keys.add(made)
    except KeyFieldError as error:
        raise click.BadParameter(error.wrong, param_hint=_hint(error)) from error
    except KeysError as error:
        fail(str(error))
    if as_json:
        print_json({**_shown(made), "key": secret})
        return
    click.echo(secret)
    click.echo("this is the only time it is shown; only its hash is kept", err=True)


@key.command(name="list")
@its_config
@file_option
@json_option
def list_keys(config: Path, file: Path | None, as_json: bool) -> None:
    """List the keys and what they allow; never the keys themselves."""
    try:
        found = _keys(config, file).read()
    except KeysError as error:
        fail(str(error))
    if as_json:
        print_json([_shown(each) for each in found])
        return
    now = time.time()
    rows = [
        [
            each.name,
            ",".join(each.scopes),
            ",".join(each.models) or "all",
            ",".join(each.classes),
            _date(each.created_seconds),
            "expired" if each.expired(now) else _date(each.expires_seconds),
            *_bounds(each),
            each.organization or "-",
        ]
        for each in found
    ]
    columns = ["NAME", "SCOPES", "MODELS", "CLASSES", "CREATED", "EXPIRES"]
    print_table([*columns, *BOUNDS, "ORGANIZATION"], rows)


@key.command()
@click.argument("name")
@its_config
@file_option
def revoke(name: str, config: Path, file: Path | None) -> None:
    """Take the key NAME back. Its next request is refused; those that run go on."""
    try:
        _keys(config, file).remove(name)
    except KeysError as error:
        fail(str(error))
    click.echo(f"{name} is revoked")


@key.command()
@click.argument("name")
@click.option("--organization", metavar="NAME", help="The organization it is to belong to.")
@click.option("--no-organization", is_flag=True, help="It belongs to none from now on.")
@its_config
@file_option
def assign(
    name: str, organization: str | None, no_organization: bool, config: Path, file: Path | None
) -> None:
    """Have the key NAME belong to another organization, or to none."""
    if (organization is not None) == no_organization:
        raise click.UsageError("give --organization or --no-organization")
    try:
        _keys(config, file).assign(name, organization)
    except KeyFieldError as error:
        raise click.BadParameter(error.wrong, param_hint=_hint(error)) from error
    except KeysError as error:
        fail(str(error))
    click.echo(f"{name} belongs to {organization or 'no organization'}")


@key.group()
def organization() -> None:
    """Set, list and remove organizations: limits of several keys together."""


@organization.command(name="set")
@click.argument("name")
@limit_options
@its_config
@file_option
def set_organization(name: str, config: Path, file: Path | None, **limits: int | None) -> None:
    """Give the organization NAME its limits; it may be new. What is left out does not bind."""
    try:
        _keys(config, file).set_organization(make_organization(name, Limits(**limits)))
    except KeyFieldError as error:
        raise click.BadParameter(error.wrong, param_hint=_hint(error)) from error
    except KeysError as error:
        fail(str(error))
    shown = ", ".join(
        f"{each.replace('_', ' ')} {n}" for each, n in limits.items() if n is not None
    )
    click.echo(f"{name}: {shown or 'no limits'}")


@organization.command(name="list")
@its_config
@file_option
@json_option
def list_organizations(config: Path, file: Path | None, as_json: bool) -> None:
    """List the organizations, their limits and their keys."""
    try:
        found = _keys(config, file).contents()
    except KeysError as error:
        fail(str(error))
    keys = {
        each.name: [one.name for one in found.keys if one.organization == each.name]
        for each in found.organizations
    }
    if as_json:
        organizations = found.organizations
        print_json(
            [msgspec.to_builtins(each) | {"keys": keys[each.name]} for each in organizations]
        )
        return
    rows = [
        [each.name, *_bounds(each), ",".join(keys[each.name]) or "-"]
        for each in found.organizations
    ]
    print_table(["NAME", *BOUNDS, "KEYS"], rows)


@organization.command(name="remove")
@click.argument("name")
@its_config
@file_option
def remove_organization(name: str, config: Path, file: Path | None) -> None:
    """Remove the organization NAME, which has no keys any more."""
    try:
        _keys(config, file).remove_organization(name)
    except KeysError as error:
        fail(str(error))
    click.echo(f"{name} is removed")


def _hint(error: KeyFieldError) -> str:
    """The argument or the option that is wrong."""
    return "--organization" if error.field == "organization" else error.field.upper()


def _check_models(models: Sequence[str], config: Path) -> None:
    """Ends the command for a name that no model or adapter of the configuration has."""
    found = _load(config)
    known = [
        name
        for model in found.models
        for name in (model.name, *(full_name(model.name, one.name) for one in model.adapters))
    ]
    known += [remote.name for remote in found.remotes]
    for name in models:
        if name not in known:
            wrong = f"there is no model {name!r}; {nearest(name, known)}"
            raise click.BadParameter(wrong, param_hint="--model")


def _load(config: Path) -> Config:
    """The configuration; every problem is printed, with status 2, if it cannot be used."""
    try:
        return load_config(config, check_files=False)
    except ConfigError as error:
        for problem in error.problems:
            click.echo(str(problem), err=True)
        sys.exit(2)


def _keys(config: Path, file: Path | None) -> KeyFile:
    """The file that was named, or the configuration's."""
    if file is not None:
        return KeyFile(file)
    api = _load(config).api
    if not api.keys:
        raise click.UsageError(
            f"{config} has no keys: name the configuration that the daemon runs with (--config),"
            ' and add keys = "keys.json" to [api] there; or name a file of keys (--file)'
        )
    return KeyFile(Path(api.keys), read_only=api.keys_read_only)


def _shown(each: Key) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(each)
    return fields


def _date(seconds: float | None) -> str:
    if seconds is None:
        return "never"
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%MZ")


def _bounds(of: Limited) -> list[str]:
    """In the order of `BOUNDS`."""
    limits = of.requests_per_minute, of.tokens_per_minute, of.tokens_per_month, of.concurrency
    return ["-" if each is None else str(each) for each in limits]
