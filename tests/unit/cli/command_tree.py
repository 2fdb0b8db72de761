"""The command line as a tree: its groups, and the commands that do something."""

from __future__ import annotations

from collections.abc import Iterator

import click

from appliance.cli.main import cli


def commands() -> Iterator[tuple[str, click.Command]]:
    """Every command that is shown, with the words that call it."""
    for path, command in _walk(cli, ()):
        if not isinstance(command, click.Group):
            yield path, command


def groups() -> Iterator[tuple[str, click.Group]]:
    """Every group; the words of the first one are none."""
    for path, command in _walk(cli, ()):
        if isinstance(command, click.Group):
            yield path, command


def _walk(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[str, click.Command]]:
    yield " ".join(path), command
    if not isinstance(command, click.Group):
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        found = command.get_command(context, name)
        if found is not None and not found.hidden:
            yield from _walk(found, (*path, name))
