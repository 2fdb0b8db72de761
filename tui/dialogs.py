"""What lies over a view: a page to read, a secret, a question to answer, a form to fill in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, Label, Static

from tui.drawing.canvas import Canvas, Line
from tui.drawing.folding import folded
from tui.view import Field, ViewContext

MOST_LINES = 1_000_000
"""More than any page has."""
MOST_SPACED = 5
"""Fields of a form that stand apart from each other; more of them are close together."""


class TextDialog(ModalScreen[None]):
    """Lines to read, kept up to date; scrolled by keys and mouse, left by Escape, `q` or Enter."""

    CSS = """
    TextDialog { align: center middle; }
    TextDialog > Vertical {
        width: 90%; height: 90%; max-width: 110;
        border: round $primary; background: $surface; padding: 0 1;
    }
    """

    def __init__(
        self,
        title: str,
        lines: Callable[[ViewContext], list[Line] | None],
        ended: str = "it is no longer there",
    ) -> None:
        """`lines` are asked for whenever a view would be shown; None for what is no longer there,
        of which the last lines stay, below `ended`."""
        super().__init__()
        self._title = title
        self._ended = ended
        self._produce = lines
        self._lines: list[Line] = []
        self._canvas = Canvas()
        self._top = 0

    def compose(self) -> ComposeResult:
        box = Vertical(self._canvas)
        box.border_title = Content(self._title)
        box.border_subtitle = "Esc"
        yield box

    def show(self, context: ViewContext) -> None:
        lines = self._produce(context)
        if lines is not None:
            self._lines = lines
        elif self._lines and self._lines[0] != (gone := [(self._ended, context.theme.bad)]):
            self._lines = [gone, *self._lines]
        self._paint()

    def _paint(self) -> None:
        width, height = self._canvas.size
        lines = folded(self._lines, width)
        self._top = max(0, min(self._top, len(lines) - max(1, height)))
        self._canvas.paint(lines[self._top : self._top + max(1, height)])

    def on_key(self, event: events.Key) -> None:
        page = max(1, self._canvas.size.height - 1)
        moves = {
            "up": -1, "k": -1, "down": 1, "j": 1, "pageup": -page, "pagedown": page, "space": page,
            "home": -MOST_LINES, "end": MOST_LINES,
        }  # fmt: skip
        if event.key in ("escape", "q", "enter"):
            self.dismiss()
        elif event.key in moves:
            self._top += moves[event.key]
            self._paint()
        event.stop()

    def on_mouse_scroll_down(self) -> None:
        self._top += 3
        self._paint()

    def on_mouse_scroll_up(self) -> None:
        self._top -= 3
        self._paint()

    def on_resize(self) -> None:
        self._paint()


class SecretPage(ModalScreen[None]):
    """A secret to be copied, on a line of its own. Escape alone leaves it: another key may have
    been meant for what was there before."""

    CSS = """
    SecretPage { align: center middle; }
    SecretPage > Static {
        width: auto; max-width: 100%; height: auto;
        border: round $warning; background: $surface; padding: 1 2;
    }
    """

    def __init__(self, title: str, secret: str) -> None:
        super().__init__()
        self._title = title
        self._secret = secret

    def compose(self) -> ComposeResult:
        words = "This is the only time that it is shown. With Shift, the mouse selects it."
        box = Static(f"{self._secret}\n\n{words}", markup=False)
        box.border_title = Content(self._title)
        box.border_subtitle = "Esc"
        yield box

    def on_key(self, event: events.Key) -> None:
        event.stop()
        if event.key == "escape":
            self.dismiss()


class ConfirmDialog(ModalScreen[bool]):
    """Yes or no; whatever is not a yes is a no."""

    CSS = """
    ConfirmDialog { align: center middle; }
    ConfirmDialog > Static {
        width: auto; max-width: 70; height: auto;
        border: round $warning; background: $surface; padding: 1 2;
    }
    """

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        box = Static(f"{self._question}\n\ny  yes      n  no", markup=False)
        box.border_title = "Sure?"
        yield box

    def on_key(self, event: events.Key) -> None:
        event.stop()
        if event.key in ("y", "Y"):
            self.dismiss(True)
        elif event.key in ("n", "N", "escape", "q", "enter"):
            self.dismiss(False)


class FormDialog(ModalScreen[Mapping[str, str]]):
    """Asks for fields. Tab goes to the next one, Enter gives what was typed, Escape nothing."""

    CSS = """
    FormDialog { align: center middle; }
    FormDialog > VerticalScroll {
        width: 70; max-width: 90%; height: auto; max-height: 100%;
        border: round $primary; background: $surface; padding: 1 2;
    }
    FormDialog Label { color: $foreground; }
    FormDialog Input { background: $panel; margin-bottom: 1; }
    FormDialog.many > VerticalScroll { padding: 0 2; }
    FormDialog.many Input { margin-bottom: 0; }
    """

    # Before the next key is looked at: that one is for the next field.
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("tab", "app.focus_next", show=False, priority=True),
        Binding("shift+tab", "app.focus_previous", show=False, priority=True),
    ]

    def __init__(self, title: str, fields: Mapping[Field, str], left_empty: str) -> None:
        """`fields` with what holds now; `left_empty` says what becomes of one that is left so."""
        super().__init__(classes="many" if len(fields) > MOST_SPACED else "")
        self._title = title
        self._now = fields
        self._left_empty = left_empty
        self._inputs = {
            field.name: Input(placeholder=f"now {now}" if now else "", compact=True)
            for field, now in fields.items()
        }

    def compose(self) -> ComposeResult:
        box = VerticalScroll(can_focus=False)
        box.border_title = Content(self._title)
        box.border_subtitle = "Enter  do it      Esc  leave it"
        with box:
            for field in self._now:
                yield Label(f"{field.name}: {field.help}", markup=False)
                yield self._inputs[field.name]
            yield Label(f"What is left empty {self._left_empty}.")

    def on_mount(self) -> None:
        next(iter(self._inputs.values())).focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        given = {name: typed.value.strip() for name, typed in self._inputs.items()}
        self.dismiss({name: text for name, text in given.items() if text})

    def on_key(self, event: events.Key) -> None:
        if event.key == "escape":
            event.stop()
            self.dismiss({})
