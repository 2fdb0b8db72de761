"""Every key and command that all views of the dashboard share."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import Any

import pytest
from textual.color import Color
from textual.dom import DOMNode
from textual.widgets import Input

from tests.unit.tui.bench import (
    NOW,
    Told,
    click,
    command,
    dashboard,
    delta,
    lost,
    model,
    notice,
    paste,
    press,
    request,
    screen,
    seen,
    settle,
    state,
    tree,
)
from tui.dialogs import TextDialog
from tui.drawing.theme import THEMES
from tui.messages import DaemonRefused, Message
from tui.prompt import CommandPrompt
from tui.recording import RecordingWriter, read_recording
from tui.views import VIEWS

REQUESTS = [request(f"chat-{n}", "abc"[n % 3], output_tokens=10 - n) for n in range(6)]


def told() -> Told:
    return Told(state(tree(requests=REQUESTS)))


async def test_digits_and_tab_change_views() -> None:
    """Every view has its digit; Tab goes round, and back with Shift."""
    async with dashboard(told()) as app:
        for number, kind in enumerate(VIEWS[:10], start=1):
            await press(app, str(number % 10))
            assert type(app.view) is kind
            assert kind.title in screen(app)[1]
        await press(app, "1", "shift+tab")
        assert type(app.view) is VIEWS[-1]
        await press(app, "tab")
        assert type(app.view) is VIEWS[0]


async def test_views_have_commands_and_aliases() -> None:
    """All names of a view lead to it."""
    async with dashboard(told()) as app:
        for kind in VIEWS:
            for name in kind.names:
                await command(app, name)
                assert type(app.view) is kind


async def test_keys_that_come_all_at_once() -> None:
    """Each is for whom the one before made it be for: a command is no row of keys, its `q` does not
    quit; a filter is not, either, and arrows move the cursor of the view that a digit led to."""
    async with dashboard(told()) as app:
        await paste(app, *":requests", "enter")
        assert app.view.title == "Requests"
        await paste(app, "/", *"q10:", "enter")
        assert "/q10:" in seen(app)
        await paste(app, *":models", "enter", *":requests", "enter", "?")
        assert app.view.title == "Requests"
        assert "Commands" in seen(app)
        await press(app, "escape")
        await press(app, "escape", "1")
        await paste(app, "5", "down", "down")
        row = app.view.current()
        assert row is not None
        assert row[0] == REQUESTS[2]["id"]
        await press(app, "4", "l")
        await paste(app, "7", "tab", "8", "shift+tab", "9")
        assert [typed.value for typed in app.screen.query(Input)] == ["9", "8", "", ""]


async def test_events_search_no_widgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come by the hundred in a second: what is looked for among the widgets is looked for when
    they are painted, not with each of them."""
    searches: list[int] = []

    def counted(search: Callable[..., Any]) -> Callable[..., Any]:
        def searched(node: DOMNode, *arguments: Any) -> Any:
            searches.append(1)
            return search(node, *arguments)

        return searched

    async with dashboard(source := told()) as app:
        for name in ("query", "query_one"):
            monkeypatch.setattr(DOMNode, name, counted(getattr(DOMNode, name)))
        found = []
        for count in (1, 50):
            searches.clear()
            for number in range(count):
                source.say(notice(number, "request_ended", id="x"))
            await settle(app)
            found.append(len(searches))
    assert found[0] == found[1]


async def test_digits_are_typed_where_text_is() -> None:
    """Behind the sign, and in forms, they lead nowhere."""
    async with dashboard(told()) as app:
        await press(app, "4", "/", "5", "/", ":")
        assert app.view.title == "Models"
        assert "/5/:" in seen(app)
        await press(app, "escape", "l", "5", ":")
        assert app.screen.query(Input).first().value == "5:"
        await press(app, "escape")
        assert app.view.title == "Models"


async def test_commands_are_completed() -> None:
    """Tab takes the first command that begins so, then the argument; up recalls."""
    async with dashboard(told()) as app:
        await press(app, ":", "t", "h", "tab")
        prompt = app.query_one(CommandPrompt)
        assert prompt.value == ":theme"
        await press(app, "space", "c", "tab")
        assert prompt.value == ":theme colour-blind"
        await press(app, "enter")
        assert app.theme == "colour-blind"
        await press(app, ":", "up")
        assert prompt.value == ":theme colour-blind"
        await press(app, "down")
        assert prompt.value == ":"
        await press(app, "escape")
        assert not prompt.display
        await command(app, "nonsense")
        assert "no command 'nonsense'" in seen(app)


async def test_a_filter_hides_rows_while_it_is_typed() -> None:
    """It holds after Enter, the other way round with `!`, and goes with Escape."""
    async with dashboard(told()) as app:
        await command(app, "requests")
        await press(app, "/", *"chat-[12]")
        assert [row[0] for row in app.view._shown] == ["chat-1", "chat-2"]  # type: ignore[attr-defined]
        await press(app, "enter")
        assert "2 of 6, /chat-[12]" in screen(app)[1]
        await press(app, "/", *"!chat-[12]", "enter")
        assert "4 of 6" in screen(app)[1]
        await press(app, "/", "(")
        assert "6 of 6" in screen(app)[1]  # no regular expression yet
        await press(app, "escape")
        assert "(6)" in screen(app)[1]


async def test_sorting() -> None:
    """`s` by the next column, `S` the other way round, or by name."""
    async with dashboard(told()) as app:
        await command(app, "requests")
        await press(app, "s")
        assert [row[1]["model"] for row in app.view._shown] == list("aabbcc")  # type: ignore[attr-defined]
        assert "MODEL▲" in seen(app)
        await press(app, "S")
        assert [row[1]["model"] for row in app.view._shown] == list("ccbbaa")  # type: ignore[attr-defined]
        await command(app, "sort tokens")
        tokens = [row[1]["output_tokens"] for row in app.view._shown]  # type: ignore[attr-defined]
        assert tokens == sorted(tokens)
        await command(app, "sort colour")
        assert "it is sorted by" in seen(app)


async def test_the_cursor_stays_on_its_row() -> None:
    """Though others come and go; where that was, if it goes itself."""
    async with dashboard(source := told()) as app:
        await command(app, "requests")
        await press(app, "down", "j", "k", "down")
        assert app.view.picked() == ["chat-2"]
        source.say(delta({"requests": {"chat-0": None}}))
        await settle(app)
        assert app.view.picked() == ["chat-2"]
        source.say(delta({"requests": {"chat-2": None}}))
        await settle(app)
        assert app.view.picked() == ["chat-3"]
        await press(app, "end")
        assert app.view.picked() == ["chat-5"]
        await press(app, "pageup", "home")
        assert app.view.picked() == ["chat-1"]


async def test_a_long_table_scrolls() -> None:
    """The cursor is always on the screen."""
    rows = [request(f"chat-{n:03}", "a") for n in range(200)]
    async with dashboard(Told(state(tree(requests=rows)))) as app:
        await command(app, "requests")
        for keys in (["pagedown"] * 3, ["end"], ["pageup"], ["home"]):
            await press(app, *keys)
            (key,) = app.view.picked()
            assert key in seen(app)


async def test_mouse() -> None:
    """Tabs, titles and rows can be clicked; a row twice is opened."""
    async with dashboard(told()) as app:
        column = screen(app)[1].index("Req") + 2
        await click(app, column, 1)
        assert app.view.title == "Requests"
        line = screen(app).index(next(row for row in screen(app) if "TOKENS" in row))
        await click(app, screen(app)[line].index("TOKENS") + 1, line)
        assert "TOKENS▲" in seen(app)
        await click(app, 10, line + 3)
        assert app.view.picked() == ["chat-3"]
        await click(app, 10, line + 3, times=2)
        assert isinstance(app.screen, TextDialog)


async def test_detail_is_kept_up_to_date() -> None:
    """Enter opens it, Escape leaves it; what is gone says so."""
    async with dashboard(source := told()) as app:
        await command(app, "requests")
        await press(app, "enter")
        assert "output tokens" in seen(app)
        source.say(delta({"requests": {"chat-0": {"output_tokens": 4711}}}))
        await settle(app)
        assert "4711" in seen(app)
        source.say(delta({"requests": {"chat-0": None}}))
        await settle(app)
        assert "finished" in seen(app)
        assert "4711" in seen(app)
        await press(app, "escape")
        assert not isinstance(app.screen, TextDialog)


async def test_describe_asks_the_daemon() -> None:
    """All it says, in lines; or why it says nothing."""
    source = told()
    source.answers["GET", "/api/requests/chat-0"] = {"reason": {"message": "b decodes there"}}
    async with dashboard(source) as app:
        await command(app, "requests")
        await press(app, "d")
        assert "b decodes there" in seen(app)
        assert source.asked == [("GET", "/api/requests/chat-0", None)]
        await press(app, "q", "down", "d")
        assert "/api/requests/chat-1 is not known" in seen(app)


async def test_raw_is_json() -> None:
    """As the daemon told it."""
    async with dashboard(told()) as app:
        await command(app, "requests")
        await press(app, "y")
        text = "".join([line.split("│")[1] for line in screen(app) if line.count("│") == 2])
        assert json.loads(text)["id"] == "chat-0"


async def test_help_lists_keys_and_commands() -> None:
    """Those of all views, and of this one."""
    async with dashboard(told(), size=(100, 70)) as app:
        await command(app, "requests")
        await press(app, "?")
        page = seen(app)
    for words in ("Ctrl-S", "cancel requests", ":theme", "the view Models"):
        assert words in page


async def test_a_table_is_saved(tmp_path: Path) -> None:
    """What passes the filter, as CSV, all columns."""
    async with dashboard(told(), folder=tmp_path) as app:
        await command(app, "requests")
        await press(app, "/", *"chat-[12]", "enter", "ctrl+s")
    path = tmp_path / "appliance-requests-20231114-221320.csv"
    titles, *rows = csv.reader(path.read_text().splitlines())
    assert [row[titles.index("ID")] for row in rows] == ["chat-1", "chat-2"]


async def test_what_cannot_be_saved_is_said(tmp_path: Path) -> None:
    """A folder that is not there."""
    async with dashboard(told(), folder=tmp_path / "none") as app:
        await command(app, "requests")
        await press(app, "ctrl+s")
        assert "No such file" in seen(app)


async def test_actions_ask_first_and_are_done_to_marked_rows() -> None:
    """No is the answer of every other key."""
    source = told()
    for name in ("chat-1", "chat-2"):
        source.answers["DELETE", f"/api/requests/{name}"] = {"cancelled": {"output_tokens": 3}}
    source.answers["DELETE", "/api/requests/chat-2"] = DaemonRefused("no request 'chat-2' is live")
    async with dashboard(source, size=(100, 30)) as app:
        await command(app, "requests")
        await press(app, "down", "space", "space")
        assert "2 marked" in screen(app)[1]
        await press(app, "K")
        assert "Cancel chat-1, chat-2?" in seen(app)
        await press(app, "n")
        assert source.asked == []
        await press(app, "K", "y")
        assert [asked[:2] for asked in source.asked] == [
            ("DELETE", "/api/requests/chat-1"),
            ("DELETE", "/api/requests/chat-2"),
        ]
        assert "cancelled chat-1 after 3 tokens" in seen(app)
        assert "no request 'chat-2' is live" in seen(app)


@pytest.mark.parametrize(("live", "words"), [(True, "--readonly"), (False, "recording")])
async def test_readonly_changes_nothing(live: bool, words: str) -> None:
    """Nor does a recording."""
    source = Told(state(tree(requests=REQUESTS)), live=live)
    async with dashboard(source, readonly=True, size=(100, 30)) as app:
        await command(app, "requests")
        await press(app, "K")
        assert words in seen(app)
        await command(app, "cancel")
    assert source.asked == []


async def test_a_lost_daemon_is_reported_and_comes_back() -> None:
    """Why, and when it is tried again; what was known stays."""
    async with dashboard(source := Told(lost("refused", 3.0))) as app:
        assert screen(app)[0].startswith(" NOT CONNECTED: refused, again in 3 s")
        source.say(state(tree()))
        await settle(app)
        assert " ready " in screen(app)[0]
        source.say(lost("the daemon ended", 0.25))
        await settle(app)
        assert screen(app)[0].startswith(" LOST: the daemon ended, trying again")
        source.say(state(tree(readiness={"ok": False, "reasons": ["no worker is up"]})))
        await settle(app)
        assert "NOT READY: no worker is up" in screen(app)[0]


async def test_themes() -> None:
    """By command, or in the palette."""
    async with dashboard(told()) as app:
        for name in THEMES:
            await command(app, f"theme {name}")
            assert app.theme == name
        await command(app, "theme mauve")
        assert "themes are dark" in seen(app)
        await press(app, "ctrl+p", *"theme light", "enter")
        assert app.theme == "light"


async def test_without_colours() -> None:
    """`NO_COLOR` leaves none; the row under the cursor is still seen."""
    async with dashboard(told(), colours=False) as app:
        await command(app, "requests")
        filters = app.get_line_filters()
        strips = [
            strip.apply_filter(one, Color.parse("black"))
            for strip in app.screen._compositor.render_strips()
            for one in filters
        ]
        styles = [piece.style for strip in strips for piece in strip if piece.style is not None]
        assert filters
        colours = [colour for style in styles for colour in (style.color, style.bgcolor)]
        assert all(colour is None or colour.is_default for colour in colours)
        assert any(style.reverse for style in styles)


async def test_a_session_is_recorded_and_replayed(tmp_path: Path) -> None:
    """All that was heard; a replay shows the same, in the time of the recording."""
    path = tmp_path / "session.jsonl"
    messages = [state(tree()), notice(3, "model_load_requested", NOW + 5, model="b"),
                delta({"models": {"d": model("d")}}, NOW + 9)]  # fmt: skip
    async with dashboard(Told(*messages), recorder=RecordingWriter(path)) as app:
        live = seen(app)
        assert "4 models" in live
    source = Told(*(Message(NOW, *message[1:]) for message in read_recording(path)), live=False)
    source.say(None)
    async with dashboard(source) as app:
        assert "replay 22:13:29" in screen(app)[0]
        assert screen(app)[2:8] == live.splitlines()[2:8]
        assert "the recording ends here" in seen(app)


async def test_a_full_disk_ends_only_the_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said once, and all is heard as before."""
    full = FileIO("/dev/full", "w")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda path, mode: BufferedWriter(full))
        recorder = RecordingWriter(tmp_path / "session.jsonl")
    source = told()
    async with dashboard(source, recorder=recorder, size=(160, 30)) as app:
        assert seen(app).count("No space left on device") == 1
        source.say(delta({"models": {"d": model("d")}}))
        await settle(app)
        assert "4 models" in screen(app)[0]
        assert seen(app).count("nothing is recorded any more") == 1
    recorder.close()


async def test_brackets_are_text() -> None:
    """In what is typed, in what the daemon says, and in names."""
    source = Told(state(tree(requests=[request("[b]1[/x]", "a")])))
    path = "/api/requests/%5Bb%5D1%5B%2Fx%5D"
    source.answers["DELETE", path] = DaemonRefused("[/y] is not live")
    source.answers["GET", path] = {"state": "[/z]"}
    async with dashboard(source, size=(160, 30)) as app:
        await command(app, "[/x]")
        assert "no command '[/x]'" in seen(app)
        await command(app, "requests")
        await press(app, "enter")
        assert "[b]1[/x]" in screen(app)[1]
        await press(app, "escape", "K", "y")
        assert "[b]1[/x]: [/y] is not live" in seen(app)
        await press(app, "d")
        assert "[/z]" in seen(app)


async def test_a_clock_that_ticks_while_it_is_left() -> None:
    """Nothing is asked for any more by a view that is gone."""
    async with dashboard(source := told()) as app:
        await command(app, "batches")
        source.asked.clear()
    app._tick()
    assert source.asked == []


async def test_leaving() -> None:
    """By a key, or by its command."""
    async with dashboard(told()) as app:
        await press(app, "q")
        assert app._exit
    async with dashboard(told()) as app:
        await command(app, "quit")
        assert app._exit
    app._tick()  # one that was due when everything had been taken off the screen
    app._outdate(state(tree()))
