"""What a page of the dashboard is: it is shown the state, and says what keys act upon."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import ClassVar, NamedTuple, TypeAlias

import msgspec
from textual.message import Message
from textual.widget import Widget

from tui.asking import Ask
from tui.drawing.canvas import Line
from tui.drawing.theme import ColourTheme
from tui.messages import DaemonSource, Document
from tui.state import State


class ViewContext(NamedTuple):
    """What a view is shown: the state, the daemon's time (Unix seconds), and the colours."""

    state: State
    now: float
    theme: ColourTheme

    def model_style(self, model: str) -> str:
        """The colour of a model, the same in all views."""
        return self.theme.model(self.state.numbers.get(model, 0))


class Field(NamedTuple):
    """A field that an action asks for; `now` gives the present value of a row."""

    name: str
    help: str
    now: Callable[[Document], str] = lambda row: ""


Given: TypeAlias = Mapping[str, str]
"""The values of fields, by their names; those that were left empty are not in it."""


class Secret(NamedTuple):
    """What an action came to that is to be read once: `done` is what was done, in words, `text` the
    secret, under its `title`. It is on the screen until that is left, and kept nowhere."""

    done: str
    title: str
    text: str


class Action(NamedTuple):
    """Something that can be done to rows: by its key, as a command, in the palette.

    `do` is called for each marked row, or the one under the cursor, with the source, the row's key
    and what was given; it returns what was done, in words, or a `Secret`, or raises `Refused`. With
    a `question` that is asked first; ``{}`` in it are the rows. With `fields` a form asks for them,
    or the command has them (``:limit ttft=5s``).
    """

    key: str
    name: str
    help: str
    do: Callable[[DaemonSource, str, Given], Awaitable[str | Secret]]
    question: str | None = None
    fields: tuple[Field, ...] = ()
    each_row: bool = True
    """Else it is no row's: it is done once, with no key."""
    left_empty: str = "stays as it is"
    """What becomes of a field that is left empty."""


class View(Widget):
    """A page. To add one: a file in `tui/views` with a subclass, and its place in `VIEWS` there.

    Only the view on the screen is shown anything, four times a second at most, and only when
    something arrived or a second has passed.
    """

    title: ClassVar[str]
    names: ClassVar[tuple[str, ...]]
    """Of the commands that go there, the long one first."""
    help: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Keys of its own, and what they do; also those that do something else elsewhere."""
    actions: ClassVar[tuple[Action, ...]] = ()
    asks: tuple[Ask, ...] = ()
    """What it needs besides the state; it is found in `State.answer`. May change with what is shown
    of it."""

    ended: ClassVar[str] = "it is no longer there"
    """What is said above the detail of a row that is no longer there."""

    can_focus = True

    source: DaemonSource
    """Whom it may ask; there before it is on the screen."""
    off: str = ""
    """Why nothing may be changed or computed, if so."""

    class Wanted(Message):
        """Another view is to be on the screen, with a word behind its command."""

        def __init__(self, view: str, word: str) -> None:
            super().__init__()
            self.view = view
            self.word = word

    class Opened(Message):
        """A page is to lie over the view; its `lines` are kept up to date."""

        def __init__(self, title: str, lines: Callable[[ViewContext], list[Line] | None]) -> None:
            super().__init__()
            self.title = title
            self.lines = lines

    def open(self, title: str, lines: Callable[[ViewContext], list[Line] | None]) -> None:
        """Lay a page over the view."""
        self.post_message(self.Opened(title, lines))

    def show(self, context: ViewContext) -> None:
        """Bring what is on the screen in line with the state."""
        raise NotImplementedError

    def words(self, context: ViewContext) -> Iterable[str]:
        """What may stand behind the command that goes there."""
        return ()

    def turn_to(self, word: str) -> None:
        """This stood behind it."""

    def interrupt(self) -> bool:
        """Ctrl-C: end what it has begun. False if there is nothing; then the dashboard ends."""
        return False

    def status(self) -> str:
        """A few words after the title: how many rows, by what they are filtered."""
        return ""

    def current(self) -> tuple[str, Document] | None:
        """The row under the cursor, if there is one."""
        return None

    def picked(self) -> list[str]:
        """Keys of the rows that an action is for: the marked ones, or the one under the cursor."""
        row = self.current()
        return [] if row is None else [row[0]]

    def enter(self, key: str) -> bool:
        """Enter on a row does something of the view's own. False if not: its detail is shown."""
        return False

    def detail(self, key: str, context: ViewContext) -> list[Line] | None:
        """A row in words, as it is now; None for one that is no longer there."""
        return None

    def path(self, key: str) -> str | None:
        """Where the daemon tells all it knows of a row."""
        return None

    # What the keys that all views share do, for those that have it.

    def sorts(self) -> tuple[str, ...]:
        """What it can be sorted by."""
        return ()

    def sort_by(self, title: str | None) -> None:
        """By one of `sorts`, or the next one; the same one again is reversed."""

    def filter_by(self, text: str) -> None:
        """Show rows that have this, a regular expression; with `!` before it, the others."""

    def mark(self) -> None:
        """Mark the row under the cursor, or take its mark away."""

    def table(self) -> list[list[str]]:
        """All that is to be saved: titles, then rows."""
        return []


def details(document: object, theme: ColourTheme, indent: int = 0) -> list[Line]:
    """A JSON document in lines for people: names and values, what is nested below."""
    pad = "  " * indent
    if not isinstance(document, dict):
        return [[(f"{pad}{_word(document)}", "")]]
    lines: list[Line] = []
    width = max((len(str(key)) for key in document), default=0)
    for key, value in document.items():
        name = str(key).replace("_", " ")
        if isinstance(value, dict) and value:
            lines.append([(f"{pad}{name}", theme.accent)])
            lines.extend(details(value, theme, indent + 1))
        elif isinstance(value, list) and any(isinstance(one, dict) for one in value):
            lines.append([(f"{pad}{name}", theme.accent)])
            for one in value:
                lines.extend([*details(one, theme, indent + 1), []])
        else:
            lines.append([(f"{pad}{name:{width}}  ", theme.accent), (_word(value), "")])
    return lines


def _word(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(_word(one) for one in value) or "none"
    return "-" if value is None or value == {} else str(value)


def raw(document: object) -> list[Line]:
    """A JSON document as it is."""
    text = msgspec.json.format(msgspec.json.encode(document), indent=2).decode()
    return [[(line, "")] for line in text.splitlines()]
