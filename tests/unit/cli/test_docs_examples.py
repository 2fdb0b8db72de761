"""Every endpoint and every command has an example that tests run.

What fails here is new, and wants an example in a block that a test takes (`tests/docblocks.py`): of
an endpoint a `curl` of its address (or a block on the page `SPELT_OUT`), of a command a line that
begins with it.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from appliance.api.openapi.document import document
from appliance.cli.main import cli
from tests.conftest import write_checkpoint
from tests.docblocks import blocks_of, code_blocks, pages, taken
from tests.docexamples import ADDRESS
from tests.docshell import examples
from tests.fuzz.running import ROOT, running
from tests.patience import PATIENCE_SECONDS

SPELT_OUT = "docs/openai-endpoints.md"
"""A page whose examples have the method and the path in their first line; tests/frontend/test_docs
runs those with a body, test_stored_responses the others."""

ELSEWHERE = (["serve"], ["demo"], ["doctor"], ["logs"])
"""Commands that do not end, or want a machine: tests/system and test_watchcommands run them, and
their examples are checked by their options."""

CONSOLE = {
    "policies.md": code_blocks("docs/policies.md", "console"),
    "commands.md": code_blocks("docs/commands.md", "console"),
}
MODELS = "".join(
    f'[[model]]\nname = "{name}"\npath = "tiny"\nmax_context = 256\n'
    for name in ("small", "org/small")
)


# --- what there is -------------------------------------------------------------------------------


def shown_commands() -> list[str]:
    """All examples."""
    found = []
    for page in pages():
        for block in blocks_of(page):
            if block.language not in ("sh", "console"):
                continue
            commands = [command for command, _ in examples(block.text)]
            if block.place not in taken():
                commands = [one for one in commands if one.split()[1:2] in ELSEWHERE]
            found += commands
    return found


def asked() -> set[tuple[str, str]]:
    """Methods and paths of the examples' requests."""
    found = set()
    for command in shown_commands():
        for request in re.split(r"\bcurl\b", command)[1:]:
            if (path := re.search(rf"{ADDRESS}(/[^\s\"'?)]*)", request)) is None:
                continue
            said = re.search(r"-X (\w+)", request)
            sends = re.search(r" (?:-d|-F|--data|--json) ", request)
            looks = re.search(r" (?:-I|--head) ", request)
            usual = "POST" if sends else "HEAD" if looks else "GET"
            found.add((said[1] if said else usual, path[1]))
    for block in blocks_of(SPELT_OUT):
        method, path_there = block.text.partition("\n")[0].split()
        found.add((method, path_there))
    return found


def operations() -> list[tuple[str, str]]:
    return [(m.upper(), path) for path, item in document()["paths"].items() for m in item]


def commands(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """All that is no group of others."""
    if not isinstance(command, click.Group):
        yield path
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        child = command.get_command(context, name)
        assert child is not None
        yield from commands(child, (*path, name))


@pytest.mark.parametrize(("method", "path"), operations())
def test_every_endpoint_has_an_example(method: str, path: str) -> None:
    """On a page whose examples are run, with its method."""
    shape = re.compile(re.sub(r"{\w+}", "[^/]+", path))

    assert any(method == one and shape.fullmatch(at) for one, at in asked()), (
        f"put a curl of {method} {path} into a block that a test takes"
    )


@pytest.mark.parametrize("path", [*commands(cli)], ids=" ".join)
def test_every_command_has_an_example(path: tuple[str, ...]) -> None:
    """On a page whose examples are run."""
    begins = " ".join(["appliance", *path])

    assert any(re.search(rf"(^|\(){begins}( |$)", one) for one in shown_commands()), (
        f"put an example of `{begins}` into a block that a test takes"
    )


# --- it works ------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a configuration, and the command line as a program."""
    write_checkpoint(tmp_path / "tiny")
    (tmp_path / "my.toml").write_text(f'[devices]\nmemory = "8MiB"\n{MODELS}', encoding="utf-8")
    program = tmp_path / "bin" / "appliance"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m appliance "$@"\n')
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path


@pytest.mark.thorough
@pytest.mark.parametrize("page", CONSOLE)
def test_the_page_is_true(page: str, folder: Path) -> None:
    """All its commands, in order, succeed and print what it shows; ``...`` stands for anything."""
    with running() as target:
        for block in CONSOLE[page]:
            for command, shown in examples(block.text):
                printed = run(command, target.url)
                if shown:
                    assert matches(shown, printed), f"{command} printed:\n{printed}"


def run(command: str, url: str) -> str:
    """What a command prints; it has to succeed. Only what a shell is needed for is given to one."""
    words = shlex.split(command, comments=True)
    if words[0] == "appliance" and ">" not in words:
        result = CliRunner().invoke(cli, [*words[1:], *told_where(words, url)])
        assert result.exit_code == 0, result.output
        return result.stdout
    strict = 'curl() { command curl --fail-with-body "$@"; }'
    done = subprocess.run(
        ["bash", "-euc", f"{strict}\n{command.replace(ADDRESS, url)}"],
        capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def told_where(words: list[str], url: str) -> list[str]:
    """The option that says where the daemon is, if this is a command that asks it."""
    if words[0] != "appliance":
        return []
    command: click.Command | None = cli
    for word in words[1:]:
        if isinstance(command, click.Group):
            command = command.get_command(click.Context(command), word)
    assert command is not None
    return ["--url", url] if any(one.name == "url" for one in command.params) else []


def matches(shown: list[str], printed: str) -> bool:
    words = " ".join(" ".join(shown).split())
    pattern = ".*".join(re.escape(part) for part in words.split("..."))
    return re.fullmatch(pattern, " ".join(printed.split()), re.DOTALL) is not None
