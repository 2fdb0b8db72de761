"""Who decides, on the dashboard: looked at, set, compared with what was before, taken back."""

from __future__ import annotations

from typing import Any

from textual.widgets import Input

from tests.unit.tui.bench import (
    NOW,
    Told,
    command,
    dashboard,
    lost,
    notice,
    notified,
    press,
    screen,
    seen,
    settle,
    state,
    tree,
)
from tests.unit.tui.scenes import policies
from tui.asking import Ask, Poller
from tui.messages import DaemonRefused

PATH = "/api/policies"


def decided(report: Any = None) -> Told:
    source = Told(state(tree()))
    source.answers["GET", PATH] = policies() if report is None else report
    return source


def changes(source: Told) -> list[tuple[str, str, object]]:
    return [asked for asked in source.asked if asked[0] != "GET"]


async def test_the_stack_by_decision() -> None:
    """Who is asked in which order, whether still, and what went wrong."""
    async with dashboard(decided(), size=(120, 30)) as app:
        await command(app, "policies")
        rows = {line.split()[0]: " ".join(line.split()[1:]) for line in screen(app)[3:8]}
        assert rows["round"].startswith("aegaeon, appliance ok 0 4711 32µs 210µs")
        assert rows["prefetch"].endswith("ok 0 0")
        assert "ours disabled 3 3 50ms 51ms ours: took longer" in rows["evict"]
        await command(app, "sort faults")
        await press(app, "S", "home", "enter")
        page = seen(app)
    for words in (
        "4711", "as it ships", "2023-11-14 22:13:11 x3  ours: took longer than 50 ms",
        "3 calls, 3 faults; mean 63ms, p50 50ms, p99 51ms, max 51ms",
    ):  # fmt: skip
        assert words in page


async def test_parameters_are_reported() -> None:
    """In the detail of a decision."""
    async with dashboard(decided(), size=(120, 40)) as app:
        await command(app, "policies")
        await press(app, "down", "down", "enter")
        assert "q max seconds  3" in seen(app)


async def test_compared_with_the_previous() -> None:
    """What differs is marked; without a previous choice that is said."""
    async with dashboard(decided(), size=(120, 30)) as app:
        await command(app, "policies")
        await press(app, "c")
        lines = {" ".join(line.split("│")[1].split()) for line in screen(app) if "│" in line}
        assert {
            "use ours ours",
            "≠ decision round aegaeon -",
            "≠ aegaeon.q_max_seconds 3.0 4.0",
        } <= lines
    async with dashboard(decided(policies() | {"previous": []})) as app:
        await command(app, "policies")
        await press(app, "c")
        assert "there were no others before" in seen(app)


async def test_installed() -> None:
    """What could decide, and why one could not."""
    async with dashboard(decided(), size=(120, 30)) as app:
        await command(app, "policies")
        await press(app, "i")
        for words in ("What aegaeon does.", "round, prefill, decode", "it cannot be imported"):
            assert words in seen(app)


async def test_others_are_set() -> None:
    """In a form, or by command; what is not given stays, and is shown as it is then."""
    source = decided()
    source.answers["PUT", PATH] = policies()
    async with dashboard(source, size=(120, 30)) as app:
        await command(app, "policies")
        await press(app, "e")
        assert [one.placeholder for one in app.screen.query(Input)] == [
            "now ours", "now round=aegaeon", "now aegaeon.q_max_seconds=3.0",
        ]  # fmt: skip
        await press(app, *"prism,ours", "tab", *"round= evict=prism", "tab")
        await press(app, *"aegaeon.on=true", "enter")
        await command(app, "set parameters=aegaeon.q_max_seconds=5,prism.word=fast")
        assert changes(source) == [
            ("PUT", PATH, {
                "use": ["prism", "ours"], "decisions": {"evict": "prism"},
                "parameters": {"aegaeon": {"q_max_seconds": 3.0, "on": True}},
            }),
            ("PUT", PATH, {
                "use": ["ours"], "decisions": {"round": "aegaeon"},
                "parameters": {"aegaeon": {"q_max_seconds": 5}, "prism": {"word": "fast"}},
            }),
        ]  # fmt: skip
        assert source.asked[-1] == ("GET", PATH, None)
        assert "ours decide from now on" in notified(app)


async def test_what_cannot_be_set() -> None:
    """The daemon's words, or those for what is no pair."""
    source = decided()
    source.answers["PUT", PATH] = DaemonRefused("use: no policy 'x' is installed")
    async with dashboard(source, size=(120, 30)) as app:
        await command(app, "policies")
        for text in ("use=x", "parameters=q=3", "decisions=round"):
            await command(app, f"set {text}")
        assert notified(app) == [
            "set: use: no policy 'x' is installed",
            "set: parameters: NAME.KEY=VALUE, not q=3",
            "set: 'round' is not NAME=VALUE",
        ]


async def test_roll_back_and_enable() -> None:
    """The one after a question, the other for those of the decision that are disabled."""
    source = decided()
    source.answers["POST", f"{PATH}/rollback"] = policies()
    source.answers["POST", f"{PATH}/ours/enable"] = policies()
    async with dashboard(source, size=(120, 30)) as app:
        await command(app, "policies")
        await press(app, "B")
        assert "Go back to the policies before these?" in seen(app)
        await press(app, "n", "B", "y")
        await press(app, "E", "down", "E")
        assert [asked[1] for asked in changes(source)] == [
            f"{PATH}/rollback",
            f"{PATH}/ours/enable",
        ]
        assert notified(app) == [
            "ours decide again",
            "place: no policy that is asked for it is disabled",
            "ours: asked again",
        ]


async def test_a_change_is_seen_at_once() -> None:
    """When the daemon tells of it, and when it is back; other events are nothing to ask for."""
    async with dashboard(source := decided()) as app:
        assert source.asked == []
        await command(app, "policies")
        report = policies()
        report["decisions"]["place"] = ["prism", "appliance"]
        source.answers["GET", PATH] = report
        source.say(notice(2, "model_load_requested", model="a"))
        await settle(app)
        assert "prism" not in seen(app)
        source.say(notice(3, "policies_chosen", choice={}))
        await settle(app)
        assert "prism, appliance" in seen(app)
        source.answers["GET", PATH] = policies()
        source.say(lost("the daemon ended"))
        source.say(state(tree()))
        await settle(app)
        assert "prism" not in seen(app)
        assert len(source.asked) == 3


async def test_without_an_answer() -> None:
    """Why there is none; what was known stays when it is refused later."""
    source = decided(DaemonRefused("this is a recording: there is no daemon to ask"))
    async with dashboard(source) as app:
        await command(app, "policies")
        assert "this is a recording" in seen(app)
        source.answers["GET", PATH] = policies()
        await command(app, "policies")
        assert "aegaeon" in seen(app)
        source.answers["GET", PATH] = DaemonRefused("the daemon cannot be reached")
        await command(app, "policies")
        assert "aegaeon" in seen(app)


def test_what_is_due() -> None:
    """After its time, when it is outdated, and never twice at once."""
    asking, ask = Poller(), Ask("GET", PATH, 2.0)
    assert asking.due([ask], NOW) == [ask]
    assert asking.due([ask], NOW + 9) == []
    asking.ended(ask)
    assert asking.due([ask], NOW + 1) == []
    assert asking.due([ask], NOW + 2) == [ask]
    asking.outdate([ask])
    assert asking.due([ask], NOW + 2) == []
    asking.ended(ask)
    assert asking.due([ask], NOW + 2) == [ask]
