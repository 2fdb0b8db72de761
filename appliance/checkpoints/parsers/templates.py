"""The chat template of a checkpoint: where it is stored, and which variables it reads."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import msgspec

TOOL_USE: Final = "tool_use"
"""What checkpoints with several templates call the one for requests with tools."""
_CODE: Final = re.compile(r"{[%{](.*?)[%}]}", re.DOTALL)
_COMMENT: Final = re.compile(r"{#.*?#}", re.DOTALL)
_TEXT: Final = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)


def chat_template(path: Path, *names: str) -> str:
    """The template of the checkpoint in `path`; empty without one, or if it cannot be read. Of
    several, the first of `names` that is there, then the default, then any."""
    try:
        return (path / "chat_template.jinja").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        pass
    for file in ("chat_template.json", "tokenizer_config.json"):
        match _read(path / file).get("chat_template"):
            case str() as template:
                return template
            case [*several]:
                by_name = {one.get("name"): one for one in several if isinstance(one, dict)}
                found = [by_name[name] for name in (*names, "default") if name in by_name]
                chosen = (found or [*by_name.values(), {}])[0]
                return str(chosen.get("template", ""))
    return ""


def reads_variable(template: str, variable: str) -> bool:
    """Whether the code of a template has the name: not its texts, nor its comments."""
    named = re.compile(rf"(?<![\w.]){re.escape(variable)}\b")
    return any(
        named.search(_TEXT.sub("''", block)) for block in _CODE.findall(_COMMENT.sub("", template))
    )


def _read(file: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
