"""The server errors that docs/api.md lists are those that the code answers."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from appliance.daemon.requests import REJECTION_STATUS
from tests.fuzz.documented import codes

SOURCES = Path(__file__).parents[3] / "appliance"
ANSWERS = {"ApiError", "GenerationFailed", "Refused", "ServerFailed", "refused"}
"""What makes the answer to a client of a status and a code, or a frame that becomes one."""


def test_every_server_error_is_listed() -> None:
    """Wherever an answer of 500 or more is made, its code is in the table, with this status."""
    answered = {(code, status) for code, status in REJECTION_STATUS.items() if status >= 500}
    for where, status, words in _made():
        listed = {(word, status) for word in words if codes().get(word) == status}
        assert listed, f"{where} answers {status} with a code that docs/api.md does not list"
        answered |= listed

    assert dict(answered) == codes()


def _made() -> Iterator[tuple[str, int, list[str]]]:
    """Where an answer is made, with which status, and all words that are written there."""
    for path in sorted(SOURCES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or ast.unparse(node.func) not in ANSWERS:
                continue
            given = [*node.args, *(word.value for word in node.keywords)]
            constants = [one.value for one in given if isinstance(one, ast.Constant)]
            words = [one for one in constants if isinstance(one, str)]
            for status in constants:
                if isinstance(status, int) and 500 <= status < 600:
                    yield f"{path.name}:{node.lineno}", status, words
