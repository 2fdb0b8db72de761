"""The dashboard: hears a daemon, shows one view of it, and does what keys and commands say."""

from __future__ import annotations

import csv
import io
import os
import time
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from textual import events
from textual.app import App, ComposeResult, SystemCommand
from textual.binding import Binding, BindingType
from textual.command import CommandPalette
from textual.notifications import SeverityLevel
from textual.screen import Screen
from textual.widgets import ContentSwitcher

from tui.actions import ActionRunner
from tui.asking import Ask, Poller
from tui.dialogs import TextDialog
from tui.drawing.bars import Header, Hints, Tabs
from tui.drawing.canvas import Line
from tui.drawing.theme import THEMES
from tui.messages import DaemonRefused, DaemonSource, Kind, Message
from tui.prompt import CommandPrompt, PromptCommand
from tui.recording import NoRecording, RecordingWriter
from tui.state import State
from tui.view import View, ViewContext, details, raw
from tui.views import VIEWS

TICK_SECONDS = 0.25
IDLE_SECONDS = 1.0
"""Ages are brought up to date so often when nothing arrives."""
NEED_MORE = ("sort", "filter", "theme")
"""Commands that are nothing by themselves."""

KEYS = (
    ("1 … 9 0, Tab", "views"),
    ("Enter", "detail of the row, kept up to date"),
    ("d", "describe: all the daemon says of it"),
    ("y", "the row as JSON"),
    ("s, S", "sort by the next column; the other way round"),
    ("/ and /!", "rows that match a regular expression; that do not"),
    ("Space", "mark the row, for actions"),
    ("Ctrl-S", "save the table as CSV"),
    (":", "a command; Tab completes"),
    ("Ctrl-P", "palette"),
    ("?", "this help"),
    ("Esc", "back; takes the filter away"),
    ("Ctrl-C", "cancel the answer that comes, in a chat; quit elsewhere"),
    ("q", "quit"),
)


class Dashboard(App[None]):
    """A client of one `DaemonSource`. Whatever it shows it read in its `State`."""

    TITLE = "appliance"
    VIEWS: ClassVar[tuple[type[View], ...]] = VIEWS
    """In the order of their digits."""
    HEADER: ClassVar[type[Header]] = Header
    CSS = """
    Screen { layout: vertical; }
    ContentSwitcher, View, Canvas { height: 1fr; }
    Header, Tabs, Hints { height: 1; }
    Header { background: $panel; }
    View { padding: 0 1; }
    CommandPrompt { height: 1; border: none; background: $panel; padding: 0; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("tab", "next_view(1)", show=False, priority=True),
        Binding("shift+tab", "next_view(-1)", show=False, priority=True),
        Binding("ctrl+s", "save", show=False, priority=True),
        Binding("ctrl+c", "interrupt", show=False, priority=True),
        # What decides whom the next key is for has to be done before that is looked at: keys may
        # come faster than they are handled.
        Binding("colon", "prompt(':')", show=False, priority=True),
        Binding("slash", "prompt('/')", show=False, priority=True),
        *(Binding(digit, f"numbered_view('{digit}')", show=False, priority=True)
          for digit in "1234567890"),
    ]  # fmt: skip

    def __init__(
        self,
        source: DaemonSource,
        *,
        readonly: bool = False,
        recorder: RecordingWriter | None = None,
        theme: str = "dark",
        clock: Callable[[], float] = time.time,
        folder: Path | None = None,
    ) -> None:
        """Tables are saved in `folder`, the current one if none is given."""
        # With NO_COLOR nothing is coloured, and what is reversed or bold stays so.
        super().__init__(ansi_color=True if "NO_COLOR" in os.environ else None)
        self.state = State()
        self.source = source
        self.readonly = readonly or not source.live
        self.folder = Path() if folder is None else folder
        self._asking = Poller()
        self._actions = ActionRunner(self, source, off=self._off, done=self._ask_again)
        self._recorder = recorder
        self._clock = clock
        self._theme_wanted = theme
        self._shown_version = -1
        self._shown_at = 0.0
        self._views: list[View] = []
        # Kept, not searched for: it is asked for with every event.
        self._switcher = ContentSwitcher(initial=self.VIEWS[0].names[0])
        self._header, self._tabs, self._hints = self.HEADER(), Tabs(), Hints()
        self._prompt = CommandPrompt(self.commands)

    # --- what is on the screen -------------------------------------------------------------------

    def compose(self) -> ComposeResult:
        self._views = [kind() for kind in self.VIEWS]
        for view in self._views:
            view.id = view.names[0]
            view.source, view.off = self.source, self._off
        yield self._header
        yield self._tabs
        with self._switcher:
            yield from self._views
        yield self._hints
        yield self._prompt

    def on_mount(self) -> None:
        for theme in THEMES.values():
            self.register_theme(theme.textual_theme)
        self.theme = self._theme_wanted
        self.theme_changed_signal.subscribe(self, lambda theme: self.refresh_shown())
        self.view.focus()
        self.set_interval(TICK_SECONDS, self._tick)
        self.run_worker(self._follow(), name="follow")

    @property
    def _off(self) -> str:
        """Why nothing may be changed or computed; "" where it may."""
        if not self.source.live:
            return "this is a recording"
        return "it was started with --readonly" if self.readonly else ""

    @property
    def _shows(self) -> bool:
        """Whether there is a view on the screen: not before the start, and not while it is left."""
        return (
            bool(self._views) and self.is_mounted(self._header) and self.is_mounted(self._switcher)
        )

    @property
    def view(self) -> View:
        """The one on the screen."""
        return next(view for view in self._views if view.id == self._switcher.current)

    @property
    def context(self) -> ViewContext:
        return ViewContext(self.state, self.state.now(self._clock()), THEMES[self.theme])

    async def _follow(self) -> None:
        try:
            async for message in self.source.follow():
                self._record(message)
                self.state.hear(message)
                self._outdate(message)
        except NoRecording as error:
            self.notify(str(error), severity="error", timeout=60)
            return
        self.notify("the recording ends here")

    def _record(self, message: Message) -> None:
        """If there is no room for it the recording ends, and nothing else."""
        if self._recorder is None:
            return
        try:
            self._recorder.write(message)
        except OSError as error:
            self._recorder = None
            self.notify(
                f"nothing is recorded any more: {error.strerror}", severity="error", timeout=60
            )

    def _outdate(self, message: Message) -> None:
        """An answer is old after some events, and when a daemon is reachable again."""
        kind = message.data.get("kind") if message.kind is Kind.NOTICE else None
        if self._shows and (kind is not None or message.kind is Kind.STATE):
            asks = [ask for ask in self.view.asks if kind is None or kind in ask.renewed_by]
            self._asking.outdate(asks)
            self._ask()

    def _ask(self) -> None:
        """What the view on the screen needs, where that is due."""
        if not self._shows:
            return
        for ask in self._asking.due(self.view.asks, self._clock()):
            self.run_worker(self._hear_answer(ask))

    async def _hear_answer(self, ask: Ask) -> None:
        try:
            document = await self.source.ask(ask.method, ask.path)
        except DaemonRefused as refusal:
            self.state.refused(ask.path, str(refusal))
        else:
            self.state.answered(ask.path, document)
        finally:
            self._asking.ended(ask)
        self._ask()

    def _ask_again(self) -> None:
        """All that the view on the screen needs: what was done may have changed it."""
        if self._shows:
            self._asking.outdate(self.view.asks)
            self._ask()

    def _tick(self) -> None:
        self._ask()
        idle = self._clock() - self._shown_at >= IDLE_SECONDS
        if idle or self.state.version != self._shown_version:
            self.refresh_shown()

    def refresh_shown(self) -> None:
        """Bring what is seen in line with the state."""
        if not self._shows or self.theme not in THEMES:
            return
        self._shown_version, self._shown_at = self.state.version, self._clock()
        context, view = self.context, self.view
        view.show(context)
        self._header.show(context, self.source, self._clock(), readonly=self.readonly)
        self._tabs.show(context, self._views, view)
        self._hints.show(context, view, readonly=self.readonly)
        if isinstance(self.screen, TextDialog):
            self.screen.show(context)
        self._ask()  # it may need something else now

    def show_view(self, name: str) -> None:
        self._switcher.current = name
        self.screen_stack[0].set_focus(self.view)  # now: the next key is for it
        self._asking.outdate(self.view.asks)
        self.refresh_shown()

    def show_page(self, title: str, lines: Callable[[ViewContext], list[Line] | None]) -> None:
        """Lay a page over the view."""
        self.push_screen(TextDialog(title, lines, self.view.ended))
        self.call_after_refresh(self.refresh_shown)

    def notify(
        self,
        message: str,
        *,
        title: str = "",
        severity: SeverityLevel = "information",
        timeout: float | None = None,
        markup: bool = False,
    ) -> None:
        """The text may be anything: brackets in it are brackets."""
        super().notify(message, title=title, severity=severity, timeout=timeout, markup=markup)

    # --- keys ------------------------------------------------------------------------------------

    def on_key(self, event: events.Key) -> None:
        """What the view has no use for itself."""
        if not self._keys_are_ours:
            return
        character = event.character or ""
        keys: dict[str, Callable[[], object]] = {
            "?": self._help, "q": self.exit, "d": self._describe, "y": self._raw,
            "s": partial(self._on_view, lambda view: view.sort_by(None)), "enter": self._detail,
            "space": partial(self._on_view, lambda view: view.mark()),
            "escape": partial(self._filter_by, ""),
        }  # fmt: skip
        action = next((one for one in self.view.actions if one.key in (character, event.key)), None)
        if action is not None:
            self._actions.run(action, self.view)
        elif (do := keys.get(character, keys.get(event.key))) is not None:
            do()
        else:
            return
        event.stop()

    def on_click(self, event: events.Click) -> None:
        if event.chain == 2 and self._keys_are_ours:
            self._detail()

    def on_view_opened(self, message: View.Opened) -> None:
        self.show_page(message.title, message.lines)

    def on_view_wanted(self, message: View.Wanted) -> None:
        self._go(message.view, message.word)

    def on_tabs_chosen(self, message: Tabs.Chosen) -> None:
        self.show_view(message.view)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Some keys belong to a screen over the view, or to an input that has the focus."""
        if action == "next_view":
            return self._keys_are_ours
        if action in ("prompt", "numbered_view"):
            key = str(parameters[0])
            typed = self.focused is not None and self.focused.check_consume_key(key, key)
            return self._keys_are_ours and not typed
        return super().check_action(action, parameters)

    @property
    def _keys_are_ours(self) -> bool:
        """Nothing lies over the view, and nothing is being typed."""
        return self.screen is self.screen_stack[0] and not self._prompt.display

    def action_next_view(self, by: int) -> None:
        place = self._views.index(self.view) + by
        self.show_view(self._views[place % len(self._views)].names[0])

    def action_numbered_view(self, digit: str) -> None:
        number = int(digit) or 10
        if number <= len(self._views):
            self.show_view(self._views[number - 1].names[0])

    def action_interrupt(self) -> None:
        if not (self._shows and self._keys_are_ours and self.view.interrupt()):
            self.exit()

    def action_save(self) -> None:
        rows = self.view.table()
        if not rows:
            self.notify("there is no table here to save", severity="warning")
            return
        at = datetime.fromtimestamp(self._clock()).strftime("%Y%m%d-%H%M%S")
        path = self.folder / f"appliance-{self.view.names[0]}-{at}.csv"
        if self.is_web:  # the user has no folder here
            text = io.StringIO(newline="")
            csv.writer(text).writerows(rows)
            self.deliver_text(text, save_filename=path.name)
            return
        try:
            with path.open("w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows(rows)
        except OSError as error:
            self.notify(f"{path}: {error.strerror}", severity="error")
        else:
            self.notify(f"saved {path}")

    def _on_view(self, do: Callable[[View], None]) -> None:
        do(self.view)
        self.refresh_shown()

    def _filter_by(self, text: str) -> None:
        self._on_view(lambda view: view.filter_by(text))

    def action_prompt(self, sign: str) -> None:
        """For a command (`:`), or a filter (`/`)."""
        self._hints.display = False
        self._prompt.open(sign)

    def on_command_prompt_closed(self) -> None:
        self._hints.display = True
        self.screen_stack[0].set_focus(self.view)

    def on_command_prompt_late(self, message: CommandPrompt.Late) -> None:
        self.post_message(message.key)

    def on_command_prompt_filtered(self, message: CommandPrompt.Filtered) -> None:
        self._filter_by(message.text)

    def on_command_prompt_entered(self, message: CommandPrompt.Entered) -> None:
        name, _, argument = message.text.partition(" ")
        command = self.commands().get(name)
        if command is None:
            self.notify(f"no command {name!r}; ? lists them", severity="error")
        else:
            command.run(argument.strip())

    # --- pages -----------------------------------------------------------------------------------

    def _detail(self) -> None:
        view, row = self.view, self.view.current()
        if row is None or view.enter(row[0]):
            return
        if view.detail(row[0], self.context) is not None:
            self.show_page(row[0], partial(view.detail, row[0]))

    def _raw(self) -> None:
        if (row := self.view.current()) is not None:
            lines = raw(row[1])
            self.show_page(row[0], lambda context: lines)

    def _describe(self) -> None:
        row = self.view.current()
        path = None if row is None else self.view.path(row[0])
        if row is None or path is None:
            self.notify("there is nothing here to describe", severity="warning")
            return
        self.run_worker(self._ask_and_show(row[0], path))

    async def _ask_and_show(self, title: str, path: str) -> None:
        try:
            found = await self.source.ask("GET", path)
        except DaemonRefused as refusal:
            self.notify(str(refusal), severity="error")
        else:
            self.show_page(title, lambda context: details(found, context.theme))

    def _help(self) -> None:
        view = self.view
        own = {key for key, _ in view.help}
        keys = [*(row for row in KEYS if row[0] not in own), *view.help]
        keys += [(one.key, one.help) for one in view.actions]

        def lines(context: ViewContext) -> list[Line]:
            title, accent = f"bold {context.theme.accent}", context.theme.accent
            return [
                [("Keys", title)],
                *([(f"  {key:14}", accent), (text, "")] for key, text in keys),
                [],
                [("Commands", title)],
                *(
                    [(f"  :{name:13}", accent), (command.help, "")]
                    for name, command in self.commands().items()
                ),
            ]

        self.show_page("Help", lines)

    # --- commands --------------------------------------------------------------------------------

    def commands(self) -> dict[str, PromptCommand]:
        """What may be typed behind `:`; also in the palette."""
        found: dict[str, PromptCommand] = {}
        for view in self._views:
            name, *others = view.names
            found[name] = PromptCommand(
                f"the view {view.title}", partial(self._go, name), partial(self._words, view)
            )
            found |= {alias: PromptCommand(name, partial(self._go, name)) for alias in others}
        view = self.view
        for action in view.actions:
            words = tuple(f"{field.name}=" for field in action.fields)
            found[action.name] = PromptCommand(
                action.help, partial(self._actions.run_command, action, view), partial(tuple, words)
            )
        return found | {
            "sort": PromptCommand("sort the table", self._sort_by, view.sorts),
            "filter": PromptCommand("filter the table", self._filter_by),
            "theme": PromptCommand("choose the colours", self._set_theme, lambda: THEMES),
            "save": PromptCommand("save the table as CSV", lambda _: self.action_save()),
            "help": PromptCommand("keys and commands", lambda _: self._help()),
            "quit": PromptCommand("end the dashboard", lambda _: self.exit()),
        }

    def _words(self, view: View) -> Iterable[str]:
        return view.words(self.context)

    def _go(self, name: str, word: str) -> None:
        self.show_view(name)
        if word:
            self.view.turn_to(word)
            self.refresh_shown()

    def _sort_by(self, title: str) -> None:
        known = {one.lower(): one for one in self.view.sorts()}
        if title.lower() in known:
            self._on_view(lambda view: view.sort_by(known[title.lower()]))
        else:
            self.notify(f"it is sorted by one of {', '.join(known) or 'nothing'}", severity="error")

    def _set_theme(self, name: str) -> None:
        if name in THEMES:
            self.theme = name
        else:
            self.notify(f"themes are {', '.join(THEMES)}", severity="error")

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """The commands that need nothing more."""
        yield from (
            SystemCommand(name, command.help, partial(command.run, ""))
            for name, command in self.commands().items()
            if name not in NEED_MORE
        )
        for name in THEMES:
            yield SystemCommand(
                f"theme {name}", "choose the colours", partial(self._set_theme, name)
            )

    def on_command_palette_closed(self, message: CommandPalette.Closed) -> None:
        self.view.focus()
