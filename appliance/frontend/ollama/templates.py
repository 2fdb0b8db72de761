"""The part of Go's templates that ``/api/generate`` needs for a client's own `template`.

Variables of one prompt and conditions on them. Templates that loop over messages are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from appliance.frontend.ollama.errors import OllamaError

_ACTION = re.compile(r"(?:\s*(?=\{\{-))?\{\{-?(?P<action>[^{}]*?)-?\}\}(?:(?<=-\}\})\s*)?")
"""With the white space that a dash takes away on its side."""

_VARIABLE = re.compile(r"(?P<condition>if\s+)?\.(?P<name>[A-Z]\w*)")


def render(template: str, values: Mapping[str, str]) -> str:
    """`template` with `values` for its variables, up to ``.Response``, where the model goes on.

    Raises `OllamaError` for everything else that a template of Ollama's can hold.
    """
    shown = [True]
    """Whether text is shown, of each open condition and of the template itself."""
    text = ""
    for literal, action in _parts(template):
        if all(shown):
            text += literal
        if action is None:
            break
        if action in ("else", "end"):
            if len(shown) == 1:
                raise OllamaError(400, f"template: {{{{ {action} }}}} without {{{{ if }}}}")
            last = shown.pop()
            if action == "else":
                shown.append(not last)
            continue
        variable = _VARIABLE.fullmatch(action)
        name = variable["name"] if variable else ""
        if variable is None or name not in (*values, "Response"):
            known = ", ".join(f".{name}" for name in values)
            raise OllamaError(
                400,
                f"template: {{{{ {action} }}}} is not supported; variables are {known} and "
                ".Response, with if, else and end",
            )
        if variable["condition"]:
            shown.append(bool(values.get(name)))
        elif name == "Response" and all(shown):
            return text
        elif all(shown):
            text += values.get(name, "")
    if len(shown) > 1:
        raise OllamaError(400, "template: {{ if }} without {{ end }}")
    return text


def _parts(template: str) -> Iterator[tuple[str, str | None]]:
    """Text, and the action that follows it; None after the last text."""
    start = 0
    for found in _ACTION.finditer(template):
        yield template[start : found.start()], found["action"].strip()
        start = found.end()
    yield template[start:], None
