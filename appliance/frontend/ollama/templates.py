"""The part of Go's templates that ``/api/generate`` needs for a client's own `template`.

Variables of one prompt and conditions on them. Templates that loop over messages are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

from appliance.frontend.ollama.errors import OllamaError

_ACTION: Final = re.compile(r"\{\{(?P<left>-?)(?P<action>[^{}]*?)(?P<right>-?)\}\}")
"""A dash takes away the white space on its side. No white space is looked for here: a client may
send megabytes of it."""

_VARIABLE: Final = re.compile(r"(?P<condition>if\s+)?\.(?P<name>[A-Z]\w*)")

MOST_CHARACTERS: Final = 8 << 20
"""Of what a template comes to: it may name a long prompt very often."""
_SHOWN: Final = 64
"""So many characters of an action are repeated in an error."""


def render(template: str, values: Mapping[str, str]) -> str:
    """`template` with `values` for its variables, up to ``.Response``, where the model goes on.

    Raises `OllamaError` for everything else that a template of Ollama's can hold.
    """
    shown = [True]
    """Whether text is shown: of the template itself, and within each open condition."""
    holds = [True]
    """Whether each open condition holds by itself."""
    text: list[str] = []
    characters = 0
    for literal, action in _parts(template):
        characters += len(literal)
        if characters > MOST_CHARACTERS:
            raise OllamaError(400, f"template: it comes to more than {MOST_CHARACTERS} characters")
        if shown[-1]:
            text.append(literal)
        if action is None:
            break
        if action in ("else", "end"):
            if len(shown) == 1:
                raise OllamaError(400, f"template: {{{{ {action} }}}} without {{{{ if }}}}")
            shown.pop()
            held = holds.pop()
            if action == "else":
                holds.append(not held)
                shown.append(shown[-1] and not held)
            continue
        variable = _VARIABLE.fullmatch(action)
        name = variable["name"] if variable else ""
        if variable is None or name not in (*values, "Response"):
            known = ", ".join(f".{name}" for name in values)
            raise OllamaError(
                400,
                f"template: {{{{ {action[:_SHOWN]} }}}} is not supported; variables are {known} and"
                " .Response, with if, else and end",
            )
        if variable["condition"]:
            holds.append(bool(values.get(name)))
            shown.append(shown[-1] and holds[-1])
        elif name == "Response" and shown[-1]:
            return "".join(text)
        elif shown[-1]:
            text.append(values.get(name, ""))
            characters += len(text[-1])
    if len(shown) > 1:
        raise OllamaError(400, "template: {{ if }} without {{ end }}")
    return "".join(text)


def _parts(template: str) -> Iterator[tuple[str, str | None]]:
    """Text, and the action that follows it; None after the last text."""
    start, trims = 0, ""
    for found in _ACTION.finditer(template):
        literal = template[start : found.start()]
        literal = literal.lstrip() if trims else literal
        yield literal.rstrip() if found["left"] else literal, found["action"].strip()
        start, trims = found.end(), found["right"]
    yield template[start:].lstrip() if trims else template[start:], None
