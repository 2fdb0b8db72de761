"""Commands of documents, checked without running them: options, endpoints and files exist."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import click

from appliance import __version__
from appliance.api.openapi.document import document
from appliance.cli.main import cli
from tests.docblocks import ROOT

ADDRESS: Final = re.compile(r"https?://[\w.-]+:11500(/[^\s?]*)")
ORDINARY: Final = {
    *("[", "cat", "chmod", "chown", "cp", "echo", "editor", "export", "find", "grep", "head"),
    *("install", "jq", "ls", "mkdir", "tar", "true", "umask"),
}
"""Programs of every machine, of which only the syntax is checked."""
_JOINING: Final = {"&&", "||", ";", "|", "&", "(", ")"}
_REDIRECTING: Final = {">", ">>", "<", ">&", "&>"}


def examples(text: str) -> Iterator[tuple[str, list[str]]]:
    """The commands of a block, each with the lines that it is said to print. One that is not whole
    goes on in the next line."""
    prompted = text.startswith("$ ")
    command, shown = "", list[str]()
    for line in text.splitlines():
        if command and (command.endswith("\\") or not _is_whole(command)):
            command += f"\n{line}"
        elif not prompted or line.startswith("$ "):
            if command:
                yield command, shown
            command, shown = line.removeprefix("$ "), []
        else:
            shown.append(line)
    yield command, shown


def _is_whole(command: str) -> bool:
    try:
        shlex.split(command, comments=True)
    except ValueError:  # a quotation goes on
        return False
    return True


def check_commands(text: str) -> None:
    """Those of a block, with what they print. Raises `AssertionError` that says what is wrong."""
    for command, shown in examples(text):
        assert not shown, f"no test compares what `{command}` prints: have one run it, or mark it"
        syntax = subprocess.run(
            ["bash", "-n"], input=command, capture_output=True, text=True, check=False
        )
        assert syntax.returncode == 0, syntax.stderr
        for words in simple_commands(command):
            program = Path(words[0]).name
            if program in CHECKS:
                CHECKS[program](words[1:])
            else:
                assert program in ORDINARY, (
                    f"{program} is not known: have a test run it, or mark it"
                )


def simple_commands(command: str) -> Iterator[list[str]]:
    """The words of each program's call, without redirections, variables and `sudo`."""
    lexer = shlex.shlex(command.replace("\\\n", " "), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = "#"
    calls: list[list[str]] = [[]]
    words = iter(lexer)
    for word in words:
        if word in _JOINING:
            calls.append([])
        elif word in _REDIRECTING:
            next(words)
        else:
            calls[-1].append(word)
    for call in calls:
        while call and (call[0] == "sudo" or re.match(r"\w+=", call[0])):
            del call[: 3 if call[:2] == ["sudo", "-u"] else 1]
        if call:
            yield call


def begins_with_a_command(line: str) -> bool:
    """Whether a line that is not marked as code calls a program that is checked."""
    program = line.removeprefix("$ ").removeprefix("sudo ").split(" ", 1)[0]
    return Path(program).name in CHECKS


def _appliance(words: list[str]) -> None:
    """The parser of the command line takes them; files that they name are there."""
    command: click.Command = cli
    while isinstance(command, click.Group):
        name = words.pop(0)
        found = command.get_command(click.Context(command), name)
        assert found is not None, f"there is no command {name}"
        command = found
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for word in words:
            if re.fullmatch(r"(?:[\w-]+/)*[\w{},-]+\.[\w.]+", word):
                Path(word).parent.mkdir(parents=True, exist_ok=True)
                Path(word).touch()
        try:
            command.make_context(command.name, words)
        except click.ClickException as error:
            raise AssertionError(error.format_message()) from error


def _engine(words: list[str]) -> None:
    """They fit a line of what `appliance-engine` says about its usage."""
    script = (ROOT / "packaging/deb/appliance-engine").read_text(encoding="utf-8")
    lines = re.findall(r"^(?:usage:|      ) appliance-engine (.*)$", script, re.MULTILINE)
    for line in lines:
        required, _, more = line.partition(" [")
        fits = [
            wanted.isupper() or word in wanted.split("|")
            for wanted, word in zip(
                required.replace("WHEEL|DIR", "FILE").split(), words, strict=False
            )
        ]
        if all(fits) and (len(words) == len(required.split()) or (more and len(words) > len(fits))):
            return
    raise AssertionError(f"appliance-engine {shlex.join(words)}: not in its usage")


@cache
def _operations() -> dict[str, Any]:
    return document()["paths"]


def operation(method: str, path: str) -> Any:
    """What the API's document says about a request. Raises `AssertionError` if it has none."""
    for shape, operations in _operations().items():
        if re.fullmatch(re.sub(r"{\w+}", "[^/]+", shape), path) and method.lower() in operations:
            return operations[method.lower()]
    raise AssertionError(f"there is no endpoint {method} {path}")


def _fields(operation: Any) -> set[str]:
    """The names of a body's fields, of all kinds of bodies; none where they are not listed."""
    content = operation.get("requestBody", {}).get("content", {})
    schema = content.get("application/json", {}).get("schema", {})
    found = set[str]()
    for one in schema.get("anyOf", [schema]):
        name = one.get("$ref", "").rpartition("/")[2]
        whole = document()["components"]["schemas"][name] if name else one
        found |= set(whole.get("properties", {}))
    return found


def _curl(words: list[str]) -> None:
    """Method and path are an endpoint's; a body is JSON with fields that it has."""
    (path,) = [found[1] for word in words if (found := ADDRESS.match(word))] or [""]
    assert path, "the address has no port 11500 and path"
    body = next((words[n + 1] for n, word in enumerate(words) if word in ("-d", "--data")), None)
    told = next((words[n + 1] for n, word in enumerate(words) if word == "-X"), None)
    sends = body is not None or "-F" in words
    there = operation(told or ("POST" if sends else "GET"), path)
    sent, known = set(json.loads(body or "{}")), _fields(there)
    assert sent <= known or not known, f"{path} has no fields {sent - known}"


def _make(words: list[str]) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    for word in words:
        assert "=" in word or word in targets, f"there is no target {word}"


def _unit(name: str) -> None:
    units = {path.name for path in (ROOT / "packaging/systemd").iterdir()}
    assert (name if "." in name else f"{name}.service") in units, f"there is no unit {name}"


def _systemctl(words: list[str]) -> None:
    for name in words[1:]:
        if not name.startswith("-"):
            _unit(name)


def _journalctl(words: list[str]) -> None:
    _unit(words[words.index("-u") + 1])


def _apt(words: list[str]) -> None:
    for name in words[1:]:
        known = re.fullmatch(rf"\./appliance_{re.escape(__version__)}_\w+\.deb", name)
        assert known, f"apt: {name} is not the package of version {__version__}"


def _pip(words: list[str]) -> None:
    """Extras are the project's; other packages are policies, as their template names them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for word in words[1:]:
        found = re.fullmatch(r"appliance\[([\w,-]+)\]|appliance-policy-\w+", word)
        assert word.startswith("-") or found, f"pip: {word} is not a package of this project"
        if found and found[1]:
            assert set(found[1].split(",")) <= set(project["optional-dependencies"]), word


def _python(words: list[str]) -> None:
    """The script or module is there, and its source has the options."""
    if words[:2] == ["-m", "pytest"]:
        for word in words[2:]:
            assert word.startswith("-") or (ROOT / word).exists(), f"there is no {word}"
        return
    if words[0] == "-m" and words[1].partition(".")[0] in sys.stdlib_module_names:
        return
    if words[0] == "-m":
        words = [f"{words[1].replace('.', '/')}.py", *words[2:]]
    path = ROOT / words[0]
    assert path.is_file(), f"there is no {words[0]}"
    source = path.read_text(encoding="utf-8")
    for word in words[1:]:
        assert not word.startswith("--") or f'"{word}"' in source, f"{words[0]} has no {word}"


def _container(words: list[str]) -> None:
    """The file that an image is built from is there."""
    if "-f" in words:
        assert (ROOT / words[words.index("-f") + 1]).is_file(), "there is no such file"


CHECKS: Final[dict[str, Callable[[list[str]], None]]] = {
    "appliance": _appliance,
    "appliance-engine": _engine,
    "apt": _apt,
    "curl": _curl,
    "docker": _container,
    "journalctl": _journalctl,
    "make": _make,
    "pip": _pip,
    "podman": _container,
    "python": _python,
    "python3": _python,
    "systemctl": _systemctl,
}
"""By program: the check of its words."""
