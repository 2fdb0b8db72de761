"""Keys on the dashboard: what each allows; one is made and shown once, others are revoked."""

from __future__ import annotations

import csv
import gc
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.color import Color
from textual.widgets import Input, Static

from appliance.access.keys import NewKey
from appliance.api.admin.keys import Keys
from tests.unit.tui.bench import (
    NOW,
    Told,
    command,
    compare,
    dashboard,
    notified,
    press,
    screen,
    seen,
    state,
    tree,
    walk,
)
from tests.unit.tui.scenes import key, keys
from tui.app import Dashboard
from tui.dialogs import FormDialog, SecretPage
from tui.drawing.theme import THEMES
from tui.messages import DaemonRefused
from tui.recording import RecordingWriter

SNAPSHOTS = Path(__file__).parent / "snapshots"
PATH = "/api/keys"
SECRET = "sk-shown-once"
FULL = {
    "name": "ci", "scopes": ["infer", "admin"], "models": ["a", "b"], "classes": ["batch"],
    "slo": True, "guides": False, "expires": "30d", "requests_per_minute": 60,
    "tokens_per_minute": 9000, "concurrency": 4, "organization": "acme",
}  # fmt: skip


def told(answer: Any) -> Told:
    source = Told(state(tree()))
    source.answers["GET", PATH] = answer
    source.answers["POST", PATH] = key("ci") | {"key": SECRET}
    return source


def row(app: Dashboard, name: str) -> list[str]:
    (found,) = [line.split() for line in screen(app) if line.split()[:1] == [name]]
    return found


def changes(source: Told) -> list[tuple[str, str, object]]:
    return [asked for asked in source.asked if asked[0] != "GET"]


def test_they_are_reported_as_here() -> None:
    """The rows of these tests are what `/api/keys` answers, and what it is sent can be read."""
    told = msgspec.convert(keys(), Keys)

    assert msgspec.json.decode(msgspec.json.encode(told)) == keys()
    msgspec.convert(FULL, NewKey)


async def test_what_they_allow() -> None:
    """And until when; how much each has had."""
    async with dashboard(told(keys()), size=(160, 30)) as app:
        await command(app, "keys")
        assert row(app, "operator")[1:6] == ["infer,admin", "all", "both", "never", "40d00h"]
        assert row(app, "web") == [
            "web", "infer", "llama-a", "interactive", "20d00h", "40d00h", "600", "req/m,", "20.0k",
            "tok/m,", "8", "at", "once", "2", "1234", "7", "98765", "54321", "no", "yes",
        ]  # fmt: skip
        assert row(app, "nightly@ci")[1:6] == ["infer", "llama-a", "+1", "batch", "1h00m"]
        assert row(app, "alice")[4:] == ["never", "1m30s", "30", "req/m", "0", "0", "0", "0", "0",
                                         "no", "yes"]  # fmt: skip
        await press(app, "down", "down", "enter")
        for words in ("llama-a, qwen-a", "2h00m ago", "expires in", "none since the daemon began"):
            assert words in seen(app)
        await press(app, "escape", "up", "enter")
        assert "98765" in seen(app)


async def test_one_that_has_expired_is_flagged() -> None:
    """By a word, and dim; also when the daemon was asked before its end."""
    rows = [key("alice"), key("trial", expires_unix_seconds=NOW)]
    async with dashboard(told({"keys": rows})) as app:
        await command(app, "keys")
        assert row(app, "trial")[4] == "expired"
        strip = app.screen._compositor.render_strips()[4]
        colours = {one.style.color.triplet for one in strip if one.text.strip() and one.style}
        assert colours == {Color.parse(THEMES["dark"].dim).triplet}


async def test_it_is_sorted_marked_and_saved(tmp_path: Path) -> None:
    """As every table."""
    async with dashboard(told(keys()), folder=tmp_path) as app:
        await command(app, "keys")
        await command(app, "sort EXPIRES")
        names = [line.split()[0] for line in screen(app)[3:8]]
        assert names == ["operator", "alice", "trial", "nightly@ci", "web"]
        await press(app, "/", *"admin", "enter")
        assert "1 of 5" in screen(app)[1]
        await press(app, "ctrl+s")
    saved = (tmp_path / "appliance-keys-20231114-221320.csv").read_text().splitlines()
    assert [line[0] for line in csv.reader(saved)] == ["NAME", "operator"]


async def test_a_row_as_the_daemon_has_it() -> None:
    """`y` as JSON, `d` asked now."""
    source = told(keys())
    source.answers["GET", f"{PATH}/nightly%40ci"] = key("nightly@ci", concurrency=17)
    async with dashboard(source) as app:
        await command(app, "keys")
        await press(app, "down", "down", "y")
        assert '"name": "nightly@ci"' in seen(app)
        await press(app, "escape", "d")
        assert "17" in seen(app)
        assert source.asked[-1] == ("GET", f"{PATH}/nightly%40ci", None)


async def test_one_is_made_in_a_form() -> None:
    """All that may be said of it is asked for; what is left empty is not sent."""
    source = told(keys())
    async with dashboard(source, size=(80, 30)) as app:
        await command(app, "keys")
        await press(app, "c")
        assert "What is left empty does not bind" in seen(app)
    async with dashboard(source, size=(80, 24)) as app:
        await command(app, "keys")
        await press(app, "c")
        assert isinstance(app.screen, FormDialog)
        assert len(app.screen.query(Input)) == len(FULL)
        assert "name:" in seen(app)
        assert "scopes: infer, observe or admin" in seen(app)
        await press(app, *["tab"] * (len(FULL) - 1))  # the form is longer than the screen
        assert "organization: whose limits hold as well" in seen(app)
        await press(app, "escape", "c", "enter")
        assert changes(source) == []
        await press(app, "c")
        said = ("ci", "infer,admin", "a, b", "batch", "yes", "no", "30d", "60", "9000", "4")
        for field, text in zip(app.screen.query(Input), said, strict=False):
            field.value = text
        await press(app, *["tab"] * len(said), *"acme", "enter")
        assert changes(source) == [("POST", PATH, FULL)]
        assert SECRET in seen(app)


async def test_the_form_looks_like_this(pytestconfig: pytest.Config) -> None:
    async with dashboard(told(keys()), size=(80, 30)) as app:
        await command(app, "keys")
        await press(app, "c")
        path = SNAPSHOTS / "keys-form-80x30-dark.svg"
        compare(app, path, update=pytestconfig.getoption("--update-snapshots"))


async def test_one_is_made_by_command() -> None:
    """What cannot be read is told, as is what the daemon refuses."""
    source = told(keys())
    async with dashboard(source) as app:
        await command(app, "keys")
        await command(app, "create name=ci scopes=observe slo=no guides=no concurrency=4")
        body = {"name": "ci", "scopes": ["observe"], "slo": False, "guides": False}
        body["concurrency"] = 4
        assert changes(source) == [("POST", PATH, body)]
        await press(app, "escape")
        source.answers["POST", PATH] = DaemonRefused("there is a key 'ci' already")
        for words, refusal in (
            ("slo=maybe", "slo: yes or no, not 'maybe'"),
            ("guides=some", "guides: yes or no, not 'some'"),
            ("concurrency=4.5", "concurrency: a whole number, such as 60, not '4.5'"),
            ("name=ci", "there is a key 'ci' already"),
        ):
            await command(app, f"create {words}")
            assert notified(app)[-1] == f"create: {refusal}"


async def test_a_secret_is_shown_once(tmp_path: Path) -> None:
    """Until Escape alone takes it away; it is in no notice, no command, no recording, no state, and
    nowhere else."""
    path = tmp_path / "session.jsonl"
    recorder = RecordingWriter(path)
    source = told(keys())
    secret = "sk-of-this-test-alone"  # pages of others may be about still
    source.answers["POST", PATH] = key("ci") | {"key": secret}
    async with dashboard(source, recorder=recorder) as app:
        await command(app, "keys")
        source.answers["GET", PATH] = {"keys": [key("ci")]}
        await command(app, "create name=ci")
        assert isinstance(app.screen, SecretPage)
        assert "the key ci" in seen(app)
        assert secret in seen(app)
        assert notified(app) == ["ci is made"]
        await press(app, "enter", "q", "space", "1", ":")
        assert secret in seen(app)
        del source.answers["POST", PATH]
        await press(app, "escape")
        assert row(app, "ci")
        for page in (["enter"], ["y"], ["d"]):
            await press(app, *page)
            assert secret not in seen(app)
            await press(app, "escape")
        await press(app, ":", "up")
        assert "create name=ci" in seen(app)
        await press(app, "escape")
        gc.collect()
        # Not isinstance: asking some of torch's objects for their class is a warning.
        pages = [one for one in gc.get_objects() if type(one) is SecretPage]
        assert [page for page in pages if page._secret == secret] == []
        assert not any(secret in str(one.visual) for one in walk(app.screen)
                       if isinstance(one, Static))  # fmt: skip
    recorder.close()
    assert secret not in path.read_text()


async def test_they_are_revoked() -> None:
    """After a question, all that are marked; where no operator's is left, that is told."""
    source = told(keys())
    source.answers["DELETE", f"{PATH}/operator"] = {"revoked": "operator", "admin_keys": 0}
    source.answers["DELETE", f"{PATH}/web"] = {"revoked": "web", "admin_keys": 1}
    async with dashboard(source, size=(120, 30)) as app:
        await command(app, "keys")
        await press(app, "K")
        assert "Revoke operator? The next request is refused, for good" in seen(app)
        await press(app, "n")
        assert changes(source) == []
        await press(app, "space", "space", "K", "y")
        assert notified(app) == [
            "operator is revoked; no key of the scope admin is left, operators have the admin "
            "socket",
            "web is revoked",
        ]
        assert source.asked[-1] == ("GET", PATH, None)
        await command(app, "revoke")
        assert "Revoke operator, web?" in seen(app)


@pytest.mark.parametrize("readonly", ["--readonly", "a recording"])
async def test_nothing_is_changed_where_nothing_may_be(readonly: str) -> None:
    """By key or command."""
    source = told(keys())
    source.live = readonly == "--readonly"
    async with dashboard(source, readonly=source.live) as app:
        await command(app, "keys")
        assert "revoke" not in screen(app)[-1]
        for pressed, action in (
            (["c"], "create"), (["K"], "revoke"),
            ([":", *"create name=x", "enter"], "create"), ([":", *"revoke", "enter"], "revoke"),
        ):  # fmt: skip
            app.clear_notifications()
            await press(app, *pressed)
            assert notified(app)[-1].startswith(f"{action}: ")
        assert changes(source) == []
        assert len(app.screen_stack) == 1


async def test_where_there_are_none() -> None:
    """It is said; where they are not configured, how they would be."""
    why = 'api.keys is not set; add keys = "keys.json" to [api], and restart it'
    for answer, words in (({"keys": []}, "there are none"), (DaemonRefused(why), why)):
        async with dashboard(told(answer)) as app:
            await command(app, "keys")
            assert words in seen(app)


async def test_it_is_the_tenth() -> None:
    """Its digit is 0."""
    async with dashboard(told(keys())) as app:
        await press(app, "0")
        assert app.view.title == "Keys"
        assert "0 Keys (5)" in screen(app)[1]
