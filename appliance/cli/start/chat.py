"""Talking to a model: one prompt, or a conversation on a terminal."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import quote

import click
import httpx
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from appliance.client import ANSWER_SECONDS, checked, connect, event_lines, fail, unreachable

POLL_SECONDS: Final = 0.5
"""How often the state of a model is looked at that a user waits for."""
HELP: Final = """\
/bye      end the conversation; so does Ctrl-D
/clear    forget what was said
\"\"\"       begin or end a message of several lines
Ctrl-C    stop the answer"""
_QUOTES: Final = '"""'
_STATES: Final = {
    "absent": "waits for its engine",
    "building": "its engine is built",
    "cold": "waits for room on a device",
    "loading": "its weights are loaded",
    "loaded": "reads the prompt",
}
"""What a model does before its first token, by the state that the daemon reports."""


def answer(url: str, body: dict[str, Any], messages: list[dict[str, str]]) -> str:
    """Print an answer as it comes; returns it whole. Ends the command if it fails."""
    pieces: list[str] = []
    _print_answer(url, body, messages, pieces)
    return "".join(pieces)


def converse(url: str, body: dict[str, Any]) -> None:
    """Until the user ends it. Each message is sent with what was said before it."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # which lets lines be edited that `input` reads
    click.echo("Type a message; /? for help, /bye or Ctrl-D ends the conversation.", err=True)
    messages: list[dict[str, str]] = []
    while True:
        try:
            text = _message()
        except EOFError:
            click.echo(err=True)
            return
        except KeyboardInterrupt:
            click.echo("\nCtrl-D or /bye ends the conversation.", err=True)
            continue
        except UnicodeDecodeError:
            click.echo("that was no UTF-8; type the message again", err=True)
            continue
        match text.strip():
            case "":
                pass
            case "/bye":
                return
            case "/clear":
                messages.clear()
            case "/?" | "/help":
                click.echo(HELP, err=True)
            case _:
                asked = {"role": "user", "content": text}
                if said := _answered(url, body, [*messages, asked]):
                    messages += [asked, {"role": "assistant", "content": said}]


def _answered(url: str, body: dict[str, Any], messages: list[dict[str, str]]) -> str:
    """What came of an answer of a conversation, which goes on if the answer is stopped or fails."""
    pieces: list[str] = []
    try:
        _print_answer(url, body, messages, pieces)
    except KeyboardInterrupt:  # what came of it was said
        click.echo()
    except SystemExit:  # why was said
        click.echo("the conversation goes on; Ctrl-D or /bye ends it", err=True)
    return "".join(pieces)


def _print_answer(
    url: str, body: dict[str, Any], messages: list[dict[str, str]], pieces: list[str]
) -> None:
    """Print an answer, and put what comes of it into `pieces`."""
    asked = {**body, "messages": messages, "stream": True}
    try:
        with (
            connect(url) as client,
            _StateLine(url, body["model"]) as waiting,
            client.stream("POST", "/v1/chat/completions", json=asked) as response,
        ):
            for piece in _texts(checked(response)):
                waiting.end()
                pieces.append(piece)
                click.echo(piece, nl=False)
    except httpx.TransportError as error:
        if pieces:
            click.echo()
            fail(f"the answer broke off ({error})")
        unreachable(url, error)
    click.echo()


def _message() -> str:
    """A line, or the lines between two of triple quotation marks. Raises `EOFError`."""
    text = input(">>> ")
    if not text.startswith(_QUOTES):
        return text
    text = text.removeprefix(_QUOTES)
    while not text.rstrip().endswith(_QUOTES):
        text += "\n" + input("... ")
    return text.rstrip().removesuffix(_QUOTES).strip("\n")


def _texts(response: httpx.Response) -> Iterator[str]:
    """The text in a stream of server-sent events."""
    for line in event_lines(response.iter_bytes()):
        if not line.startswith("data:"):
            continue  # a comment that keeps the connection alive, or an empty line
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            click.echo()
            fail(event["error"]["message"])
        for choice in event["choices"]:
            if text := choice["delta"].get("content"):
                yield text


class _StateLine:
    """On a terminal, a line that says what a model does before its first token."""

    def __init__(self, url: str, model: str) -> None:
        self._url = url
        self._model = model
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._line: Progress | None = None
        self._thread = threading.Thread(target=self._show, daemon=True)

    def __enter__(self) -> _StateLine:
        if sys.stderr.isatty():
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Show nothing more; the line is gone. Does not wait for the daemon's word."""
        if not self._over.is_set():
            self._over.set()
            with self._lock:
                if self._line is not None:
                    self._line.stop()

    def _show(self) -> None:
        if self._over.wait(POLL_SECONDS):  # it answers at once
            return
        columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
        line = Progress(*columns, console=Console(stderr=True), transient=True)
        task = line.add_task(f"{self._model}: waiting")
        with self._lock:
            if self._over.is_set():
                return
            line.start()
            self._line = line
        while not self._over.wait(POLL_SECONDS):
            with contextlib.suppress(httpx.HTTPError, ValueError, KeyError, TypeError):
                line.update(task, description=f"{self._model}: {self._doing()}")

    def _doing(self) -> str:
        """In words; "waiting" for users that may not ask. Raises what a strange answer leads to."""
        with connect(self._url) as client:
            path = f"/api/models/{quote(self._model)}"
            found = client.get(path, timeout=ANSWER_SECONDS)
            if not found.is_success:
                return "waiting"
            return _STATES.get(found.json()["state"], "waiting")
