"""What commands print: tables for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from typing import Any

import click
from rich.console import Console
from rich.table import Table

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, not a table.")


def print_table(columns: list[str], rows: list[list[Any]]) -> None:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=True)
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    # Cut to the width of a terminal, but never in a pipe.
    console = Console() if sys.stdout.isatty() else Console(width=1000)
    console.print(table)


def print_json(value: object) -> None:
    click.echo(json.dumps(value, indent=2))
