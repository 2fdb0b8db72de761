"""Who decides, on the dashboard: looked at, set, compared with what was before, taken back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from textual.widgets import Input

from tests.unit.tui.bench import (
    NOW,
    Told,
    command,
    compare,
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
from tests.unit.tui.scenes import autopilot, loaded, policies
from tui.asking import Ask, Poller
from tui.messages import DaemonRefused

PATH = "/api/policies"
SNAPSHOTS = Path(__file__).parent / "snapshots"


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


@pytest.mark.parametrize("size", [(80, 24), (160, 48)], ids=lambda size: f"{size[0]}x{size[1]}")
async def test_the_autopilot_looks_like_this(
    size: tuple[int, int], pytestconfig: pytest.Config
) -> None:
    async with dashboard(loaded(), size=size) as app:
        await command(app, "policies")
        await press(app, "a")
        name = f"autopilot-{size[0]}x{size[1]}-dark.svg"
        compare(app, SNAPSHOTS / name, update=pytestconfig.getoption("--update-snapshots"))


async def test_the_autopilot() -> None:
    """That it is on, in the title; its mode and phase, the last advice with its figures, what it
    applied and took back, what is barred, and what it remembers of this hour."""
    async with dashboard(decided(), size=(120, 60)) as app:
        await command(app, "policies")
        assert "Policies (5, autopilot)" in seen(app)
        await press(app, "a")
        lines = [" ".join(line.split("│")[1].split()) for line in screen(app) if "│" in line]
    text = "\n".join(lines)
    assert lines[:3] == [
        "mode apply", "phase replaying", "CPU time 90 s of 360 s were charged in the last hour",
    ]  # fmt: skip
    advice = text[text.index("LAST ADVICE") : text.index("APPLIED, ROLLED BACK")]
    assert "2023-11-14 22:10:00 kept" in advice
    assert "gain +2.0 points, error 3.1 points, kept before 81.0%" in advice
    assert "that may be the lab's error" in advice
    changes = text[text.index("APPLIED, ROLLED BACK") : text.index("BARRED")]
    places = [changes.index(what) for what in ("confirmed", "22:00:00 applied", "rolled back")]
    assert places == sorted(places)
    assert "ours round=aegaeon aegaeon.q_max_seconds=3.0" in changes
    assert "gain +12.0 points, error 3.1 points, kept before 72.0%, after 55.0%" in changes
    assert "prism, for 23h00m more" in text
    hour = text[text.index("THIS HOUR OF THE WEEK") :]
    assert "won in 2 weeks, 12.0 points ahead, error 3.1 points" in hour
    assert "won in no week, 17.0 points behind, error 3.1 points, kept 55.0%" in hour


async def test_the_last_advice_may_have_been_applied() -> None:
    report = policies()
    report["autopilot"]["notes"] = report["autopilot"]["notes"][:3]
    async with dashboard(decided(report), size=(120, 60)) as app:
        await command(app, "policies")
        await press(app, "a")
        advice = seen(app).partition("LAST ADVICE")[2].partition("APPLIED, ROLLED BACK")[0]
    assert "22:00:00  applied" in advice


async def test_the_autopilot_s_page_is_kept_up_to_date() -> None:
    """An event of the autopilot has it asked again, and an operator's choice is told."""
    source = decided()
    async with dashboard(source, size=(120, 40)) as app:
        await command(app, "policies")
        await press(app, "a")
        assert "it only proposes" not in seen(app)
        held = autopilot() | {"held": True, "phase": "waiting"}
        source.answers["GET", PATH] = policies() | {"autopilot": held}
        source.say(notice(1, "autopilot", NOW, what="left"))
        await settle(app)
        assert "an operator chose policies: it only proposes" in seen(app)
        assert "phase     waiting" in seen(app)


@pytest.mark.parametrize(
    ("pilot", "said"),
    [
        ({"mode": "off"}, 'off; `autopilot = "propose"` or "apply" in [policy] has it begin'),
        ({"notes": [], "barred": [], "hour": []}, "none yet"),
        (None, "this daemon has none: it is of an earlier version"),
    ],
)
async def test_an_autopilot_that_has_nothing_to_tell(pilot: Any, said: str) -> None:
    """It is off, has just begun, or the daemon has none."""
    report = policies()
    del report["autopilot"]
    if pilot is not None:
        report["autopilot"] = autopilot() | pilot
    async with dashboard(decided(report), size=(120, 40)) as app:
        await command(app, "policies")
        told = pilot is not None and "mode" not in pilot
        assert ("autopilot" in screen(app)[1]) is told
        await press(app, "a")
        assert said in seen(app)


async def test_what_the_autopilot_quotes_is_only_text() -> None:
    """Names of policies are others' words: they move no cursor, and paint nothing."""
    note = autopilot()["notes"][0] | {"reason": "bad \x1b[2J\nnext"}
    report = policies() | {"autopilot": autopilot() | {"notes": [note]}}
    async with dashboard(decided(report), size=(120, 40)) as app:
        await command(app, "policies")
        await press(app, "a")
        assert "bad ␛[2J" in seen(app)


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
