"""The names of vLLM's parsers: from the vLLM that is installed, or as they were written down.

The daemon never imports vLLM. Its registries are literals in two files, which are read as text.
"""

from __future__ import annotations

import ast
from enum import StrEnum
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from appliance.checkpoints.model_config import known_models
from appliance.errors import closest

AUTO: Final = "auto"
"""Means the parser that the checkpoint's family and chat template call for."""
LISTED: Final = "docs/structured-outputs.md#parsers"


class ParserKind(StrEnum):
    """What a parser reads; the value is the key in a model's table."""

    TOOLS = "tool_parser"
    REASONING = "reasoning_parser"

    @property
    def reads(self) -> str:
        return "tool calls" if self is ParserKind.TOOLS else "reasoning"


_REGISTRIES: Final = {
    ParserKind.TOOLS: ("tool_parsers", "_TOOL_PARSERS_TO_REGISTER"),
    ParserKind.REASONING: ("reasoning", "_REASONING_PARSERS_TO_REGISTER"),
}
"""The package of vLLM's that has each registry, and what the registry is called there."""


@cache
def parser_names(kind: ParserKind) -> tuple[str, ...]:
    """All of a kind, in alphabetical order."""
    return installed_names(kind) or committed_names(kind)


def committed_names(kind: ParserKind) -> tuple[str, ...]:
    """Those of the vLLM that this version of the appliance is made for."""
    return known_models().parsers[kind]


def installed_names(kind: ParserKind) -> tuple[str, ...]:
    """Those of the vLLM that is installed; none without one, or if its registry is elsewhere."""
    spec = find_spec("vllm")  # which does not import it
    if spec is None or not spec.submodule_search_locations:
        return ()
    package, registry = _REGISTRIES[kind]
    file = Path(spec.submodule_search_locations[0], package, "__init__.py")
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return ()
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Dict(keys=keys)):
                if name == registry:
                    names = [key.value for key in keys if isinstance(key, ast.Constant)]
                    return tuple(sorted(name for name in names if isinstance(name, str)))
    return ()


def remedy_for(name: str, kind: ParserKind) -> str:
    """What to write instead of a name that vLLM does not know."""
    close = closest(name, [AUTO, *parser_names(kind)])
    instead = f"did you mean {close}?" if close else f'use "{AUTO}", or "" for none'
    return f"{instead} ({LISTED} lists all of them)"
