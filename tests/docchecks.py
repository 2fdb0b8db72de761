"""Blocks of documents that no test runs, checked by their language."""

from __future__ import annotations

import ast
import importlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import tomlkit
import yaml

from appliance.config.loader import load_config
from tests.docblocks import Block
from tests.docshell import begins_with_a_command, check_commands

DIAGRAMS: Final = ("stateDiagram-v2", "flowchart", "sequenceDiagram", "xychart-beta")
REMEDY: Final = (
    "Correct it; or have a test take it with `tests.docblocks.code_blocks` and run it; or put "
    "`<!-- not run: reason -->` on the line before it."
)
MODEL: Final = {"name": "completing", "path": "m", "max_context": 64}


def check(block: Block) -> None:
    """Raises `AssertionError` that says where a block is, what is wrong with it and what to do."""
    try:
        if block.indented:
            _formula(block.text)
            return
        assert block.language, "it has no language"
        assert block.language in LANGUAGES, f"nothing checks {block.language} by itself"
        LANGUAGES[block.language](block.text)
    except Exception as error:
        raise AssertionError(f"{block.place}: {error}\n{REMEDY}") from error


def _configuration(text: str) -> None:
    """The daemon reads it, completed with a model and a size of memory where it has none."""
    document = tomlkit.parse(text)
    document.setdefault("model", [MODEL])
    devices = document.setdefault("devices", {})
    devices.setdefault("memory", "8GiB")
    devices.setdefault("host_cache", "8GiB")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "appliance.toml"
        path.write_text(tomlkit.dumps(document), encoding="utf-8")
        load_config(path, check_files=False)


def _yaml(text: str) -> None:
    assert isinstance(yaml.safe_load(text), dict | list)


def _python(text: str) -> None:
    """It compiles, and every name that it imports is there."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            for one in node.names:
                importlib.import_module(one.name)
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module or "")
            for one in node.names:
                assert hasattr(module, one.name), f"{node.module} has no {one.name}"


def _mermaid(text: str) -> None:
    """Its first word is a kind of diagram; a chart has a bar, or a point, for each label."""
    kind, *rest = text.split("\n")
    assert kind.split()[0] in DIAGRAMS, f"{kind} is not a kind of diagram"
    if not kind.startswith("xychart"):
        return
    lines = dict(line.split(maxsplit=1) for line in rest if line.strip())
    labels = json.loads(lines["x-axis"][lines["x-axis"].index("[") :])
    for name in {"bar", "line"} & lines.keys():
        assert len(json.loads(lines[name])) == len(labels), f"{name}: not one for each label"


def _formula(text: str) -> None:
    """An indented block has no language, so it may have no commands."""
    for line in text.splitlines():
        assert not begins_with_a_command(line), f"`{line}` is a command: put it into a fence, ```sh"


LANGUAGES: Final[dict[str, Callable[[str], object]]] = {
    "console": check_commands,
    "json": json.loads,
    "mermaid": _mermaid,
    "python": _python,
    "sh": check_commands,
    "toml": _configuration,
    "yaml": _yaml,
}
"""By language: the check of a block's text."""
