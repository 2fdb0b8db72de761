"""The chat of the dashboard: its keys, what it asks, what it shows of answers."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from textual import events
from textual.widgets import Input

from tests.unit.tui.bench import (
    NOW,
    Spoken,
    Told,
    command,
    compare,
    dashboard,
    delta,
    model,
    notice,
    notified,
    press,
    request,
    screen,
    seen,
    settle,
    state,
    tree,
)
from tests.unit.tui.scenes import DECISION, loaded, span
from tui.app import Dashboard
from tui.recording import RecordingWriter
from tui.views.chat import ChatView

SNAPSHOTS = Path(__file__).parent / "snapshots"
TIMING = (
    "queue;dur=900.0, load;dur=400.0, prefill;dur=100.0, decode;dur=1100.0, "
    'preempted;dur=500.0;desc="2"'
)


def pool() -> Told:
    """Models `a`, `b` and `c`."""
    return Told(state(tree()))


async def ask(app: Dashboard, source: Told, text: str) -> Spoken:
    """Write it, from wherever, and send it."""
    if not app.query_one(ChatView).query_one(Input).has_focus:
        await press(app, "i")
    await press(app, *text, "enter")
    return source.streams[-1]


async def test_a_question_is_answered() -> None:
    """Token by token; then with what it took, as seen from here and as the daemon counts."""
    async with dashboard(source := pool(), size=(100, 24)) as app:
        await command(app, "chat")
        stream = await ask(app, source, "How 2 go?")
        assert stream.path == "/v1/chat/completions"
        assert stream.body["model"] == "a"
        assert stream.body["messages"] == [{"role": "user", "content": "How 2 go?"}]
        assert "> How 2 go?" in seen(app)
        assert "on its way" in seen(app)
        assert "1 answering" in screen(app)[1]
        stream.begin("chatcmpl-7")
        stream.say("By ", NOW + 1.5)
        await settle(app)
        assert "  By\n" in seen(app)
        assert "first token 1.5s" in seen(app)
        stream.say("bike.", NOW + 2.0)
        stream.end(3, TIMING, NOW + 2.5)
        await settle(app)
        page = seen(app)
        for words in (
            "  By bike.", "first token 1.5s  3 tokens  2/s  500ms each", "░ queue 900ms",
            "↓ load 400ms", "▸ prefill 100ms", "█ decode 1.1s", "▒ preempted 500ms (2 times)",
        ):  # fmt: skip
            assert words in page
        assert "answering" not in page
        assert stream.closed


async def test_where_a_request_is_is_seen_meanwhile() -> None:
    """In which phase, what it waits for, and which models have their turns."""
    async with dashboard(source := pool(), size=(100, 24)) as app:
        await command(app, "chat")
        stream = await ask(app, source, "Hi")
        stream.begin("mine")
        reason = {"code": "other_model", "behind": "b"}
        row = request("mine", "a", phase="queued", output_tokens=0, reason=reason)
        for message in (
            notice(2, "request_arrived", id="mine", model="a"),
            delta({"requests": {"mine": row}}),
            notice(3, "model_switched", instance=0, model="b"),
        ):
            source.say(message)
        await settle(app)
        assert "queued on instance 0  3.0s  0 tokens  waits: other model b" in seen(app)
        assert "1 switch on instance 0: b" in seen(app)
        source.answers["GET", "/api/requests/mine"] = {"reason": {"message": "b decodes there"}}
        await press(app, "escape", "d")
        assert "b decodes there" in seen(app)
        await press(app, "escape")
        source.say(notice(4, "model_switched", instance=0, model="a"))
        source.say(notice(5, "request_ended", id="mine", model="a", output_tokens=1))
        source.say(delta({"requests": {"mine": None}}))
        stream.say("Hello")
        stream.end(1, TIMING)
        await settle(app)
        assert "2 switches on instance 0: b, a" in seen(app)
        await press(app, "d")
        assert "there is nothing here to describe" in notified(app)


async def test_of_many_switches_the_last_are_named() -> None:
    """As many as there is room for."""
    async with dashboard(source := pool(), size=(60, 24)) as app:
        await command(app, "chat")
        stream = await ask(app, source, "Hi")
        stream.begin("mine")
        source.say(notice(1, "request_arrived", id="mine", model="a"))
        source.say(delta({"requests": {"mine": request("mine", "a")}}))
        for number in range(2, 12):
            source.say(notice(number, "model_switched", instance=0, model=f"model-{number}"))
        await settle(app)
        assert "10 switches on instance 0: … model-9, model-10, model-11\n" in seen(app)


async def test_what_is_typed_is_text_until_escape() -> None:
    """Digits, colons and question marks; then keys are the view's again, and Tab always."""
    async with dashboard(source := pool()) as app:
        await command(app, "chat")
        await press(app, "enter", *"1:q?/ x", "enter")
        assert source.streams[0].body["messages"][-1]["content"] == "1:q?/ x"
        assert type(app.view) is ChatView
        await press(app, *"words", "escape", "1")
        assert app.view.title == "Overview"
        await command(app, "chat")
        assert "words" in screen(app)[-2]
        await press(app, "i", "tab")
        assert app.view.title == "Overview"


async def test_nothing_is_sent_that_is_nothing() -> None:
    """Blanks are no question."""
    async with dashboard(source := pool()) as app:
        await command(app, "chat")
        await press(app, "i", "enter", "space", "enter")
        assert source.streams == []


async def test_one_answer_at_a_time_of_a_model() -> None:
    """A second question is kept in the line; another model can be asked meanwhile."""
    async with dashboard(source := pool(), size=(100, 24)) as app:
        await command(app, "chat")
        first = await ask(app, source, "one")
        await press(app, *"two", "enter")
        assert len(source.streams) == 1
        assert "a still answers; Ctrl-C cancels that" in notified(app)
        assert "two" in screen(app)[-2]
        await press(app, "escape")
        await command(app, "chat b")
        await press(app, "ctrl+u", *"three", "enter")
        assert source.streams[1].body["model"] == "b"
        assert "2 answering" in screen(app)[1]
        for stream, text in ((first, "uno"), (source.streams[1], "tres")):
            stream.begin(text)
            stream.say(text)
            stream.end(1)
        await settle(app)
        assert "tres" in seen(app)
        assert "uno" not in seen(app)
        await press(app, "escape", "left")
        assert "uno" in seen(app)


async def test_a_conversation_goes_on() -> None:
    """With what was said before; until it is cleared, which ends what comes."""
    async with dashboard(source := pool()) as app:
        await command(app, "chat")
        stream = await ask(app, source, "one")
        stream.say("1")
        stream.end(1)
        await settle(app)
        stream = await ask(app, source, "two")
        assert [message["content"] for message in stream.body["messages"]] == ["one", "1", "two"]
        await press(app, "escape", "C")
        assert stream.closed
        assert "Nothing was said yet." in seen(app)
        stream = await ask(app, source, "three")
        assert [message["content"] for message in stream.body["messages"]] == ["three"]


@pytest.mark.parametrize("keys", [["ctrl+c"], ["escape", "x"], ["escape", "ctrl+c"]])
async def test_an_answer_is_cancelled(keys: list[str]) -> None:
    """By closing its stream; what came of it stays, and the daemon says how much that was."""
    async with dashboard(source := pool()) as app:
        await command(app, "chat")
        stream = await ask(app, source, "one")
        stream.begin("mine")
        stream.say("only the beginning")
        await settle(app)
        await press(app, *keys)
        assert stream.closed
        assert not app._exit
        source.say(notice(2, "request_ended", id="mine", output_tokens=17, outcome="cancelled"))
        await settle(app)
        page = seen(app)
        for words in ("only the beginning", "cancelled", "17 tokens"):
            assert words in page
        await press(app, "escape", "x")
        assert seen(app).count("cancelled") == 1


async def test_ctrl_c_without_an_answer() -> None:
    """Who writes goes on, with an empty line; elsewhere it is the end."""
    async with dashboard(pool()) as app:
        await command(app, "chat")
        await press(app, "i", *"words", "ctrl+c")
        assert app.query_one(ChatView).query_one(Input).value == ""
        assert not app._exit
        await press(app, "escape", "ctrl+c")
        assert app._exit


async def test_what_is_refused_is_shown() -> None:
    """In the daemon's words, all of them; it is no part of what is said next."""
    why = "messages: the model has no chat template, so that it cannot [chat]; use /v1/completions"
    async with dashboard(source := pool(), size=(60, 20)) as app:
        await command(app, "chat")
        stream = await ask(app, source, "one")
        stream.refuse(why)
        await settle(app)
        shown = " ".join(line.strip() for line in screen(app)[4:6])
        assert shown == why
        stream = await ask(app, source, "two")
        assert len(stream.body["messages"]) == 1
        stream.say("Half")
        stream.say({"error": {"message": "the worker died"}})
        await settle(app)
        assert "Half\n   the worker died" in seen(app)
        assert stream.closed


async def test_answers_are_text() -> None:
    """Nothing in them is markup, and nothing in them moves the cursor."""
    async with dashboard(source := pool()) as app:
        await command(app, "chat")
        stream = await ask(app, source, "[b]x[/b]")
        stream.say(" [red]no[/red] \x1b[31mcolour\x07")
        stream.end(2, reason="length")
        await settle(app)
        assert "> [b]x[/b]" in seen(app)
        assert "[red]no[/red] ␛[31mcolour␇" in seen(app)
        assert "cut at the limit of tokens" in seen(app)


async def test_reasoning_is_seen_and_not_sent() -> None:
    """As most models want it."""
    async with dashboard(source := pool()) as app:
        await command(app, "chat")
        stream = await ask(app, source, "one")
        stream.say({"choices": [{"index": 0, "delta": {"reasoning": "let me think"}}]})
        stream.say("1")
        stream.end(4)
        await settle(app)
        assert "let me think\n   1" in seen(app)
        stream = await ask(app, source, "two")
        assert stream.body["messages"][1] == {"role": "assistant", "content": "1"}


async def test_models_are_chosen() -> None:
    """By command, from the table of models, by the arrows; each has a conversation of its own."""
    async with dashboard(source := pool(), size=(100, 24)) as app:
        await press(app, ":", *"chat ", "tab")
        assert ":chat a" in screen(app)[-1]
        await press(app, "escape")
        await command(app, "models")
        await press(app, "down", "c", *"hi", "enter")
        assert source.streams[0].body["model"] == "b"
        await press(app, "escape", "right")
        assert screen(app)[2].startswith(" c  loaded on 0")
        assert "Nothing was said yet." in seen(app)
        await press(app, "right", "left", "left")
        assert "> hi" in seen(app)
        await command(app, "chat gone")
        assert "not in the catalogue" in screen(app)[2]
        await press(app, *"hi", "enter")
        assert source.streams[1].body["model"] == "gone"


async def test_a_long_answer_scrolls() -> None:
    """It follows what comes, stays where it was scrolled to, and tells how much is below."""
    async with dashboard(source := pool()) as app:
        await command(app, "chat")
        stream = await ask(app, source, "count")
        stream.say("".join([f"line {n}\n" for n in range(100)]))
        await settle(app)
        assert "line 99" in seen(app)
        assert "line 50" not in seen(app)
        await press(app, "escape", "home")
        assert "> count" in screen(app)[3]
        await press(app, "down", "pagedown", "pageup", "up", "j", "j", "k")
        assert "line 0" in screen(app)[3]
        below = next(line for line in screen(app) if "lines below" in line)
        assert int(below.split()[-3]) > 80
        stream.say("line 100\n" * 5)
        await settle(app)
        assert "line 0" in screen(app)[3]
        app.view.post_message(events.MouseScrollDown(None, 1, 5, 0, 0, 0, False, False, False))
        await settle(app)
        assert "line 3" in screen(app)[3]
        await press(app, "end")
        assert "line 100" in seen(app)
        assert "below" not in seen(app)


async def test_any_line_of_any_answer_is_reached() -> None:
    """One below the other: the question, what was thought and said, the stats, an empty line."""
    async with dashboard(source := pool(), size=(60, 12)) as app:
        await command(app, "chat")
        for number in range(3):
            stream = await ask(app, source, f"{number}?")
            stream.say({"choices": [{"index": 0, "delta": {"reasoning": f"{number} hm\nso"}}]})
            stream.say(f"{number} a\n{number} b", NOW + 1)
            stream.end(2, at=NOW + 2)
            await settle(app)
        whole = []
        for number in range(3):
            whole += [f"> {number}?", f"{number} hm", "so", f"{number} a", f"{number} b",
                      "first token 0µs  2 tokens  0.5/s  2.0s each", ""]  # fmt: skip
        await press(app, "escape", "home")
        room = len(screen(app)) - 5
        for top in range(len(whole) - room + 1):
            shown = [line.strip() for line in screen(app)[3 : 3 + room]]
            assert shown == whole[top : top + room]
            await press(app, "down")


async def test_a_question_that_is_too_long_stays_in_the_line() -> None:
    """And it is said how long one may be."""
    async with dashboard(source := pool()) as app:
        await command(app, "chat")
        await press(app, "i")
        app.post_message(events.Paste("x" * 100_001))
        await settle(app)
        await press(app, "enter")
        assert source.streams == []
        assert "the question has 100,001 characters; 100,000 are the most" in notified(app)
        await press(app, "home", "x", "ctrl+u", *"ok", "enter")
        assert source.streams[0].body["messages"][0]["content"].startswith("ok")


async def test_a_model_that_goes_keeps_its_conversation() -> None:
    """Also where it was never chosen, but the first."""
    async with dashboard(source := pool()) as app:
        await command(app, "chat")
        stream = await ask(app, source, "hi")
        source.say(delta({"models": {"a": None}}))
        stream.say("hello")
        stream.end(1)
        await settle(app)
        assert screen(app)[2].startswith(" a  not in the catalogue")
        assert "hello" in seen(app)


async def test_nothing_is_left_of_another_conversation() -> None:
    """Though it was on the screen when the view was left."""
    async with dashboard(source := pool()) as app:
        await command(app, "chat")
        stream = await ask(app, source, "count")
        stream.say("line\n" * 40)
        await settle(app)
        await press(app, "escape", "4", "down", "c")
        assert screen(app)[2].startswith(" b  loaded on 0")
        assert "Nothing was said yet." in screen(app)[4]
        assert "line" not in "".join(screen(app)[5:-2])


async def test_a_paste_is_one_line() -> None:
    """All of it, and no control characters."""
    async with dashboard(source := pool()) as app:
        await command(app, "chat")
        await press(app, "i")
        app.post_message(events.Paste("one\ntwo\x1bthree"))
        await settle(app)
        await press(app, "enter")
        assert source.streams[0].body["messages"][0]["content"] == "one two␛three"


@pytest.mark.parametrize(
    ("live", "words"),
    [(True, "chat is off, as it computes: it was started with --readonly"),
     (False, "chat is off, as it computes: this is a recording")],
)  # fmt: skip
async def test_it_is_off_where_nothing_may_be_done(live: bool, words: str) -> None:
    """And says so."""
    source = Told(state(tree()), live=live)
    async with dashboard(source, readonly=live) as app:
        await command(app, "chat b")
        assert words in seen(app)
        await press(app, "i", *"hi", "enter")
        assert source.streams == []


async def test_without_models_there_is_nobody() -> None:
    """Before anything was heard, too."""
    for source in (Told(), Told(state(tree() | {"models": {}}))):
        async with dashboard(source) as app:
            await command(app, "chat")
            await press(app, "i", "x", "right", "C", "ctrl+s", "y")
            assert "no model is known" in seen(app)


async def test_nothing_that_is_said_is_recorded_or_saved(tmp_path: Path) -> None:
    """Only what was measured is."""
    path = tmp_path / "session.jsonl"
    async with dashboard(
        source := pool(), recorder=RecordingWriter(path), folder=tmp_path, size=(80, 40)
    ) as app:
        await command(app, "chat")
        stream = await ask(app, source, "secret")
        stream.begin("mine")
        stream.say("hush", NOW + 1)
        stream.end(2, TIMING, NOW + 2)
        source.say(delta({"models": {"d": model("d")}}))
        await settle(app)
        await press(app, "escape", "ctrl+s", "y")
        text = "".join([line.split("│")[1] for line in screen(app) if line.count("│") == 2])
        assert json.loads(text)["ttft_seconds"] == 1.0
    saved = tmp_path / "appliance-chat-20231114-221320.csv"
    titles, row = csv.reader(saved.read_text().splitlines())
    assert dict(zip(titles, row, strict=True))["preempted_seconds"] == "0.5"
    for file in (path, saved):
        assert "secret" not in file.read_text()
        assert "hush" not in file.read_text()
    assert '"d"' in path.read_text()


async def talked(app: Dashboard, source: Told) -> None:
    """Two answers of a model whose instance is shared, one to come."""
    await command(app, "chat qwen-a")
    first = await ask(app, source, "What is a slab?")
    first.begin("chat-9")
    source.say(notice(5, "request_arrived", id="chat-9", model="qwen-a"))
    for number, name in enumerate(("llama-a", "qwen-a", "llama-a", "qwen-a"), start=6):
        source.say(notice(number, "model_switched", instance=0, model=name))
    turn = span(21, "turn", "qwen-a", -2, -1, requests=["chat-9"], decision=DECISION)
    source.say(delta({"spans": {"21": turn}}))
    first.say("A slab is a piece of the pool, of one size for all models. It is mapped ", NOW + 1.3)
    first.say("where weights or a KV cache are to be, and given back when they leave.", NOW + 3)
    first.end(34, TIMING, NOW + 3.0)
    source.say(notice(10, "request_ended", id="chat-9", model="qwen-a", output_tokens=34))
    await settle(app)
    second = await ask(app, source, "And [who] decides?")
    second.begin("chat-10")
    row = request(
        "chat-10", "qwen-a", phase="preempted", output_tokens=6, arrived_unix_seconds=NOW - 2
    )
    row["reason"] = {"code": "other_model", "instance": 0, "behind": "llama-b"}
    source.say(delta({"requests": {"chat-10": row}}))
    second.say("A policy: it is asked", NOW + 0.9)
    await settle(app)


@pytest.mark.parametrize("size", [(80, 24), (160, 48)])
async def test_it_looks_like_this(size: tuple[int, int], pytestconfig: pytest.Config) -> None:
    """An answer that is there, and one that comes."""
    source = loaded()
    async with dashboard(source, size=size) as app:
        await talked(app, source)
        name = f"chat-talk-{size[0]}x{size[1]}-dark.svg"
        compare(app, SNAPSHOTS / name, update=pytestconfig.getoption("--update-snapshots"))
