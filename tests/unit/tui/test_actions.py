"""What the dashboard has a daemon do: each action's request, its question or form, its refusals."""

from __future__ import annotations

import pytest
from textual.widgets import Input

from tests.unit.tui.bench import (
    Told,
    command,
    dashboard,
    model,
    notified,
    press,
    screen,
    seen,
    state,
    tree,
)
from tui.dialogs import FormDialog
from tui.messages import DaemonRefused

TERMS = {
    "slo": {"ttft_seconds": 5.0, "tbt_seconds": 0.1, "gap_seconds": 2.0},
    "max_queue": 20,
    "pinned": False,
}


def pool() -> Told:
    """Models whose names need care in a path, too."""
    names = ("a", "of/b", "c d")
    models = {name: model(name, terms=TERMS) for name in names}
    return Told(state(tree() | {"models": models}))


@pytest.mark.parametrize(
    ("key", "verb", "asks", "words"),
    [
        ("L", "load", False, "a is loaded to a device"),
        ("E", "evict", True, "a leaves its devices"),
        ("D", "drain", True, "a takes no new requests"),
        ("R", "resume", False, "a takes requests"),
        ("P", "pin", False, "a is pinned"),
        ("U", "unpin", False, "a is not pinned"),
    ],
)
async def test_models_are_steered(key: str, verb: str, asks: bool, words: str) -> None:
    """By key and by command, with a question where requests feel it."""
    source = pool()
    source.answers["POST", f"/api/models/a/{verb}"] = {}
    async with dashboard(source, size=(100, 30)) as app:
        await command(app, "models")
        for how in (lambda: press(app, key), lambda: command(app, verb)):
            source.asked.clear()
            await how()
            assert (f"{verb.capitalize()} a?" in seen(app)) == asks
            assert bool(source.asked) != asks
            await press(app, *(["y"] if asks else []))
            assert source.asked == [("POST", f"/api/models/a/{verb}", None)]
            assert words in seen(app)


async def test_a_refusal_names_each_model() -> None:
    """In the daemon's words; the others are done."""
    source = pool()
    source.answers["POST", "/api/models/a/load"] = DaemonRefused("a is draining")
    source.answers["POST", "/api/models/of/b/load"] = {}
    async with dashboard(source, size=(100, 30)) as app:
        await command(app, "models")
        await press(app, "space", "space", "space", "L")
        assert [path for _, path, _ in source.asked] == [
            "/api/models/a/load", "/api/models/of/b/load", "/api/models/c%20d/load",
        ]  # fmt: skip
        assert notified(app) == [
            "a: a is draining", "of/b is loaded to a device",
            "c d: /api/models/c%20d/load is not known",
        ]  # fmt: skip


async def test_limits_are_asked_for_in_a_form() -> None:
    """It says what holds; what is left empty is not sent, and Escape sends nothing."""
    source = pool()
    source.answers["PUT", "/api/models/a/limits"] = {"terms": TERMS | {"max_queue": 7}}
    async with dashboard(source, size=(100, 30)) as app:
        await command(app, "models")
        await press(app, "l")
        assert isinstance(app.screen, FormDialog)
        assert "limit a" in seen(app)
        assert [one.placeholder for one in app.screen.query(Input)] == [
            "now 5s",
            "now 0.1s",
            "now 20",
            "now 2s",
        ]
        await press(app, *"2q", "escape")
        await press(app, "l", "enter")
        assert source.asked == []
        await press(app, "l", *"2s", "tab", "tab", "7", "enter")
        assert source.asked == [
            ("PUT", "/api/models/a/limits", {"slo": {"ttft": "2s"}, "max_queue": 7})
        ]
        assert (
            "a: first token 5 s, then 0.1 s each, at most 2 s apart, at most 7 requests"
            in notified(app)
        )


async def test_limits_by_command() -> None:
    """Without the form; what is no limit is told."""
    source = pool()
    source.answers["PUT", "/api/models/a/limits"] = {"terms": TERMS}
    async with dashboard(source, size=(100, 40)) as app:
        await command(app, "models")
        await command(app, "limit tbt=100ms gap=1s")
        assert source.asked == [
            ("PUT", "/api/models/a/limits", {"slo": {"tbt": "100ms", "gap": "1s"}})
        ]
        source.asked.clear()
        await command(app, "limit colour=red")
        assert (
            "limit takes ttft=VALUE, tbt=VALUE, queue=VALUE, gap=VALUE, not 'colour'"
            in notified(app)
        )
        await command(app, "limit queue=many")
        assert "a: queue: a whole number, such as 20, not 'many'" in notified(app)
        await command(app, "load now")
        assert "load takes nothing more, not 'now'" in notified(app)
        assert source.asked == []


async def test_limits_of_several_models() -> None:
    """The form does not say what holds, as it may differ."""
    source = pool()
    async with dashboard(source, size=(100, 30)) as app:
        await command(app, "models")
        await press(app, "space", "space", "l")
        assert "limit a, of/b" in seen(app)
        assert {one.placeholder for one in app.screen.query(Input)} == {""}
        await press(app, "tab", "tab", *"12", "enter")
        assert [asked[1:] for asked in source.asked] == [
            ("/api/models/a/limits", {"max_queue": 12}),
            ("/api/models/of/b/limits", {"max_queue": 12}),
        ]


async def test_the_palette_has_actions() -> None:
    """Those with a form, too."""
    async with dashboard(pool(), size=(100, 30)) as app:
        await command(app, "models")
        await press(app, "ctrl+p", *"limit", "enter")
        assert isinstance(app.screen, FormDialog)


async def test_readonly_steers_nothing() -> None:
    """No action is offered, and none is done."""
    source = pool()
    async with dashboard(source, readonly=True, size=(160, 30)) as app:
        await command(app, "models")
        assert "evict" not in screen(app)[-1]
        await press(app, *"LEDRPUl")
        await command(app, "limit queue=3")
    assert source.asked == []
