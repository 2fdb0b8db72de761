"""Manual pages, from the commands and the configuration schema.

Written by ``python -m appliance.cli.docs.manpages``.

``appliance(1)`` has every command with its options, ``appliance.toml(5)`` every key.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click

import appliance
from appliance.cli.docs.config import shown
from appliance.cli.main import cli
from appliance.config.schema import choices, schema


def command_page() -> str:
    """The text of ``appliance.1``."""
    lines = [
        *_head("appliance", 1, "Appliance"),
        r".SH NAME",
        rf"appliance \- {_plain(_summary(cli)).rstrip('.').lower()}",
        r".SH SYNOPSIS",
        r".B appliance",
        r".I COMMAND",
        r"[\fIOPTION\fR ...] [\fIARGUMENT\fR ...]",
        r".SH DESCRIPTION",
        r"One daemon serves many language models from the memory of a few, behind an HTTP API. The",
        r"commands start it, or talk to one that runs.",
        r".SH COMMANDS",
    ]
    for path, command in _commands(cli, "appliance"):
        lines += _command(path, command)
    lines += [
        r".SH EXIT STATUS",
        r"0: done; 1: it went wrong; 2: the command line or the configuration is wrong.",
        r".SH SIGNALS",
        r"SIGTERM and SIGINT end the daemon: what runs may go on for a while (api.drain). A second",
        r"one ends it at once.",
        r".SH SEE ALSO",
        r".BR appliance.toml (5)",
    ]
    return "\n".join(lines) + "\n"


def configuration_page() -> str:
    """The text of ``appliance.toml.5``."""
    lines = [
        *_head("appliance.toml", 5, "Appliance"),
        r".SH NAME",
        r"appliance.toml \- the configuration of the appliance",
        r".SH DESCRIPTION",
        r"A TOML file. Sizes are written 192MiB, 4GiB or as bytes; durations 100ms, 10s, 2m.",
        r"Unknown keys, wrong types and impossible sizes are refused;",
        r"\fBappliance config check\fR finds them.",
    ]
    for header, (kind, keys) in schema().items():
        lines += [f".SH {_plain(header)}", _plain((kind.__doc__ or "").splitlines()[0])]
        for field in keys.values():
            default = "required" if field.required else f"default {shown(field.default)}"
            lines += [".TP", rf"\fB{_plain(field.key)}\fR ({_plain(default)})"]
            lines.append(_plain(field.description.replace("`", "")))
            if words := choices(field.type):
                lines.append(_plain(f"One of {', '.join(words)}."))
    lines += [r".SH SEE ALSO", r".BR appliance (1)"]
    return "\n".join(lines) + "\n"


def write_pages(directory: Path) -> None:
    """Both, as files."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "appliance.1").write_text(command_page(), encoding="utf-8")
    (directory / "appliance.toml.5").write_text(configuration_page(), encoding="utf-8")


def _head(name: str, section: int, manual: str) -> list[str]:
    version = appliance.__version__
    return [rf'.TH "{name.upper()}" {section} "" "appliance {version}" "{manual}"', ".nh", ".ad l"]


def _commands(group: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    """Every command that does something, with the words that call it."""
    if not isinstance(group, click.Group):
        yield path, group
        return
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command is not None and not command.hidden:
            yield from _commands(command, f"{path} {name}")


def _command(path: str, command: click.Command) -> list[str]:
    context = click.Context(command, info_name=path)
    usage = " ".join(command.collect_usage_pieces(context))
    lines = [".SS " + _plain(f"{path} {usage}"), *_paragraphs(command.help or "")]
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is None or isinstance(parameter, click.Argument) or "--help" in parameter.opts:
            continue
        options, about = record
        lines += [".TP", rf"\fB{_plain(options)}\fR", _plain(about) or r"\&"]
    return lines


def _paragraphs(text: str) -> list[str]:
    """Text of a docstring; a blank line is a new paragraph."""
    lines: list[str] = []
    for paragraph in text.replace("\b", "").strip().split("\n\n"):
        lines += [".PP", _plain(" ".join(paragraph.split()))]
    return lines[1:]


def _summary(command: click.Command) -> str:
    return (command.help or "").strip().splitlines()[0]


def _plain(text: str) -> str:
    """The text as roff takes it word for word."""
    escaped = text.replace("\\", r"\e").replace("-", r"\-")
    return rf"\&{escaped}" if escaped.startswith((".", "'")) else escaped


if __name__ == "__main__":
    write_pages(Path(sys.argv[1]))
