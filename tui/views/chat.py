"""Chat: talk to any model, and see of each answer what it took and how the appliance got there."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import aclosing
from typing import Any
from urllib.parse import quote
from weakref import WeakKeyDictionary

from textual import events
from textual.app import ComposeResult
from textual.widgets import Input
from textual.worker import Worker

from tui.conversation import AnswerState, ChatAnswer, Conversation
from tui.drawing.canvas import Canvas, Line
from tui.drawing.wrapping import harmless
from tui.messages import DaemonRefused, Document
from tui.request_trace import RequestTrace
from tui.view import View, ViewContext
from tui.views.answer_layout import AnswerLayout, lines_of

PATH = "/v1/chat/completions"
PAINT_SECONDS = 0.1


class Writing(Input):
    """The line at the bottom. What is typed into it is text, whatever it is."""

    def __init__(self) -> None:
        super().__init__(compact=True, select_on_focus=False)
        self.cursor_blink = False

    def _on_paste(self, event: events.Paste) -> None:
        """All of it, in one line."""
        event.stop()
        event.prevent_default()
        self.replace(harmless(" ".join(event.text.splitlines())), *self.selection)


class ChatView(View):
    """A conversation with each model. It follows what comes until it is scrolled back."""

    title = "Chat"
    names = ("chat",)
    help = (
        ("i", "write"), ("← →", "model"), ("↑ ↓", "scroll"), ("x", "cancel"), ("C", "clear"),
    )  # fmt: skip

    DEFAULT_CSS = """
    ChatView { layout: vertical; }
    ChatView > Input { background: $panel; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._canvas = Canvas()
        self._line = Writing()
        self._view_context: ViewContext | None = None
        self._model: str | None = None
        """The one that was chosen, or written to; before that it is the first of the catalogue."""
        self._conversations: dict[str, Conversation] = {}
        self._workers: dict[str, Worker[None]] = {}
        self._layouts: WeakKeyDictionary[ChatAnswer, AnswerLayout] = WeakKeyDictionary()
        self._top: int | None = None
        """The first line that is seen; None follows the end."""
        self._last_top = 0
        self._painted_at = 0.0

    def compose(self) -> ComposeResult:
        yield self._canvas
        yield self._line

    # --- what is on the screen -------------------------------------------------------------------

    def show(self, context: ViewContext) -> None:
        self._view_context = context
        for conversation in self._conversations.values():
            if conversation.answers:
                conversation.answers[-1].trace.hear(context.state)
        model = self._talks_to(context)
        self._line.display = bool(model) and not self.off
        self._line.placeholder = (
            "Enter sends, Esc leaves this line" if self._line.has_focus else f"i: write to {model}"
        )
        width, height = self._canvas.size
        if self.off:
            lines: list[Line] = [[(f"chat is off, as it computes: {self.off}", context.theme.warn)]]
        elif not model:
            lines = [[("no model is known", context.theme.dim)]]
        else:
            there = self._conversations.get(model)
            said = self._layouts_of(() if there is None else there.answers, context, width)
            room = max(1, height - 1)
            end = max(0, sum(map(len, said)) - room)
            self._top = None if self._top is None or self._top >= end else self._top
            self._last_top = end if self._top is None else self._top
            shown = lines_of(said, self._last_top, self._last_top + room)
            nothing: list[Line] = [[], [("Nothing was said yet.", context.theme.dim)]]
            lines = [self._heading(model, context, end), *(shown or nothing)]
        self._canvas.paint(lines)

    def _talks_to(self, context: ViewContext) -> str:
        """The model's name; "" where there is none."""
        return self._model or next(iter(context.state.rows("models")), "")

    def _heading(self, model: str, context: ViewContext, end: int) -> Line:
        row = context.state.rows("models").get(model, {})
        places = [key for key, stage in row.get("residency", {}).items() if stage == "loaded"]
        status = f"  {row.get('state', 'not in the catalogue')}"
        status += f" on {' '.join(places)}" if places else ""
        scrolled = f"  {end - self._last_top} lines below" if self._top is not None else ""
        return [
            (model, f"bold {context.model_style(model)}"),
            (status, context.theme.dim),
            (scrolled, context.theme.warn),
        ]

    def _layouts_of(
        self, answers: Collection[ChatAnswer], context: ViewContext, width: int
    ) -> list[AnswerLayout]:
        found = []
        for place, answer in enumerate(answers, start=1):
            layout = self._layouts.get(answer)
            if layout is None or layout.width != width or layout.theme is not context.theme:
                layout = self._layouts[answer] = AnswerLayout(answer, width, context.theme)
            layout.catch_up(context, newest=place == len(answers))
            found.append(layout)
        return found

    def status(self) -> str:
        coming = sum(one.coming is not None for one in self._conversations.values())
        return f"{coming} answering" if coming else ""

    # --- what is said ----------------------------------------------------------------------------

    def words(self, context: ViewContext) -> Iterable[str]:
        return context.state.rows("models")

    def turn_to(self, word: str) -> None:
        """Talk to this model."""
        self._model, self._top = word, None
        self._write()

    def _write(self) -> None:
        if self._line.display:
            self.screen.set_focus(self._line)  # now: the next key is for it

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        context, text = self._view_context, event.value.strip()
        if context is None or not text:
            return
        model = self._talks_to(context)
        conversation = self._conversations.setdefault(model, Conversation(model))
        if conversation.coming is not None:
            self.app.notify(f"{model} still answers; Ctrl-C cancels that", severity="warning")
            return
        try:
            answer, body = conversation.ask(text, RequestTrace(context.state))
        except ValueError as error:
            self.app.notify(str(error), severity="warning")
            return
        self._model = model  # also when the catalogue has another first
        self._line.value = ""
        self._top = None
        self._workers[model] = self.run_worker(self._hear(conversation, answer, body))
        self.show(context)

    async def _hear(self, conversation: Conversation, answer: ChatAnswer, body: Document) -> None:
        """Closing the stream, for whatever reason, ends the request."""
        try:
            async with aclosing(self.source.stream(PATH, body)) as pieces:  # type: ignore[type-var]
                async for piece in pieces:
                    conversation.hear(answer, piece)
                    if answer.outcome is AnswerState.FAILED:
                        break
                    self._look_again(answer, piece.at)
        except DaemonRefused as refusal:
            answer.end(AnswerState.FAILED, str(refusal))
        answer.end(AnswerState.DONE)
        self._again()

    def _look_again(self, answer: ChatAnswer, at: float) -> None:
        if self._view_context is not None:
            answer.trace.hear(self._view_context.state)
        if abs(at - self._painted_at) >= PAINT_SECONDS:
            self._painted_at = at
            self._again()

    def _again(self) -> None:
        if self._view_context is not None and self.display:
            self.show(self._view_context)

    def interrupt(self) -> bool:
        """The answer that comes, if one does; else what was typed. Who writes never leaves by it:
        an answer may end just before the key."""
        if self._cancel():
            return True
        self._line.value = ""
        return self._line.has_focus

    def _cancel(self) -> bool:
        conversation = self._conversation()
        coming = None if conversation is None else conversation.coming
        if conversation is None or coming is None:
            return False
        coming.end(AnswerState.CANCELLED)
        self._workers[conversation.model].cancel()
        self._again()
        return True

    def _clear(self) -> None:
        self._cancel()
        if (conversation := self._conversation()) is not None:
            del self._conversations[conversation.model]
        self._top = None

    def _conversation(self) -> Conversation | None:
        """The one on the screen."""
        context = self._view_context
        return None if context is None else self._conversations.get(self._talks_to(context))

    def _turn(self, by: int) -> None:
        """To the model before, or the next one."""
        if self._view_context is not None and (names := [*self._view_context.state.rows("models")]):
            here = self._talks_to(self._view_context)
            place = names.index(here) + by if here in names else 0
            self._model, self._top = names[place % len(names)], None

    # --- the answer that came last ---------------------------------------------------------------

    def current(self) -> tuple[str, Document] | None:
        conversation = self._conversation()
        if conversation is None or not conversation.answers:
            return None
        answer = conversation.answers[-1]
        return answer.trace.request or conversation.model, answer.measured()

    def path(self, key: str) -> str | None:
        """Only what is live is known to the daemon."""
        conversation = self._conversation()
        live = conversation is not None and conversation.coming is not None
        return f"/api/requests/{quote(key, safe='')}" if live else None

    def table(self) -> list[list[str]]:
        """What was measured of each answer, without a word of it."""
        conversation = self._conversation()
        if conversation is None or not conversation.answers:
            return []
        rows = [answer.measured() for answer in conversation.answers]
        return [[*rows[0]], *([_saved(value) for value in row.values()] for row in rows)]

    # --- keys ------------------------------------------------------------------------------------

    def on_key(self, event: events.Key) -> None:
        """Those that the line below has no use for reach it, too."""
        page = max(1, self._canvas.size.height - 2)
        far = 10**9
        moves = {
            "up": -1, "down": 1, "pageup": -page, "pagedown": page, "home": -far, "end": far,
            "k": -1, "j": 1, "g": -far, "G": far,
        }  # fmt: skip
        keys: dict[str, Any] = {
            "i": self._write, "enter": self._write, "x": self._cancel, "C": self._clear,
            "left": lambda: self._turn(-1), "h": lambda: self._turn(-1),
            "right": lambda: self._turn(1), "l": lambda: self._turn(1),
        }  # fmt: skip
        by = moves.get(event.character or "", moves.get(event.key))
        do = keys.get(event.character or "", keys.get(event.key))
        if by is not None:
            self._scroll(by)
        elif self._line.has_focus:
            if event.key != "escape":
                return
            self.screen.set_focus(self)
        elif do is not None:
            do()
        else:
            return
        event.stop()
        self.call_after_refresh(self._again)

    def _scroll(self, by: int) -> None:
        self._top = max(0, self._last_top + by)
        self._again()

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        event.stop()
        self._scroll(3)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        event.stop()
        self._scroll(-3)

    def on_descendant_focus(self) -> None:
        self._again()

    def on_descendant_blur(self) -> None:
        self._again()

    def on_resize(self) -> None:
        self._again()


def _saved(value: Any) -> str:
    return "" if value is None else " ".join(value) if isinstance(value, list) else str(value)
