"""The line at the bottom: commands after `:`, a filter after `/`, completed as they are typed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from textual import events
from textual.message import Message
from textual.suggester import Suggester
from textual.widgets import Input

MOST_REMEMBERED = 100


class PromptCommand(NamedTuple):
    """`run` is given what follows the name; `words` are what that may be."""

    help: str
    run: Callable[[str], None]
    words: Callable[[], Iterable[str]] = tuple


def complete(commands: Mapping[str, PromptCommand], typed: str) -> str | None:
    """The command that begins so, with its argument; None if none does, or it is complete."""
    name, space, _ = typed.partition(" ")
    if not space:
        candidates: Iterable[str] = commands
    elif name in commands:
        candidates = (f"{name} {word}" for word in commands[name].words())
    else:
        return None
    for candidate in candidates:
        if candidate != typed and candidate.lower().startswith(typed.lower()):
            return candidate
    return None


class Commands(Suggester):
    """Completes what is typed behind `:`."""

    def __init__(self, commands: Callable[[], Mapping[str, PromptCommand]]) -> None:
        super().__init__(use_cache=False, case_sensitive=True)
        self._commands = commands

    async def get_suggestion(self, value: str) -> str | None:
        if not value.startswith(":") or len(value) < 2:
            return None
        found = complete(self._commands(), value[1:])
        return None if found is None else f":{found}"


class CommandPrompt(Input):
    """Hidden until it is opened. Tab completes, up and down recall, Escape gives up."""

    class Filtered(Message):
        """The filter is being typed."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    class Entered(Message):
        """A command was given."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    class Closed(Message):
        """The keys are the view's again."""

    class Late(Message):
        """A key was sent here before it was known that the one before it closed the line. It is
        shown after what that one did."""

        def __init__(self, key: events.Key) -> None:
            super().__init__()
            self.key = key

    def __init__(self, commands: Callable[[], Mapping[str, PromptCommand]]) -> None:
        super().__init__(suggester=Commands(commands), compact=True, select_on_focus=False)
        self._commands = commands
        self._given: list[str] = []
        self._recalled = 0
        self.display = False

    def open(self, sign: str) -> None:
        """`:` or `/`."""
        self._recalled = len(self._given)
        self.display = True
        self.value = sign
        self.cursor_position = len(sign)
        self.screen.set_focus(self)  # now: the next key is for it

    def on_key(self, event: events.Key) -> None:
        if not self.display:
            self.post_message(self.Late(events.Key(event.key, event.character)))
        elif event.key == "enter":
            self._enter()
        elif event.key == "tab":
            found = complete(self._commands(), self.value[1:]) if self.value[:1] == ":" else None
            if found is not None:
                self.value = f":{found}"
                self.cursor_position = len(self.value)
        elif event.key == "escape":
            if self.value[:1] == "/":
                self.post_message(self.Filtered(""))
            self._close()
        elif event.key in ("up", "down") and self.value[:1] == ":":
            self._recall(-1 if event.key == "up" else 1)
        else:
            return
        event.stop()
        event.prevent_default()

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        if self.display and not self.value:  # the sign itself was deleted
            self.post_message(self.Filtered(""))
            self._close()
        elif self.value[:1] == "/":
            self.post_message(self.Filtered(self.value[1:]))

    def _enter(self) -> None:
        text = self.value
        self._close()
        if text[:1] == ":" and text[1:].strip():
            self._given = [*self._given, text][-MOST_REMEMBERED:]
            self.post_message(self.Entered(text[1:].strip()))

    def _recall(self, by: int) -> None:
        self._recalled = max(0, min(self._recalled + by, len(self._given)))
        given = [*self._given, ":"]
        self.value = given[self._recalled]
        self.cursor_position = len(self.value)

    def _close(self) -> None:
        self.display = False
        self.post_message(self.Closed())
