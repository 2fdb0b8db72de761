"""The configuration on the dashboard: in force, against the files, applied."""

from __future__ import annotations

from tests.unit.tui.bench import (
    Told,
    command,
    dashboard,
    notice,
    notified,
    press,
    screen,
    seen,
    settle,
    state,
    tree,
)
from tests.unit.tui.scenes import config, config_check
from tui.messages import DaemonRefused, Document

IN_FORCE, CHECK = "/api/config", "/api/config/check"


def configured(check: Document | None = None) -> Told:
    source = Told(state(tree()))
    source.answers["GET", IN_FORCE] = config()
    source.answers["POST", CHECK] = config_check() if check is None else check
    return source


async def test_what_differs_comes_first() -> None:
    """With what it needs; then all that is in force."""
    async with dashboard(configured(), size=(120, 30)) as app:
        await command(app, "config")
        rows = [line.split() for line in screen(app)[3:10]]
        assert rows == [
            ["api.max_queue", "1024", "reload", "2048"],
            ["api.bind", "127.0.0.1:11500", "restart", "0.0.0.0:11500"],
            ["model.llama-b", "-", "reload", "/models/llama-b"],
            ["api.keys", "-"],
            ["policy.use", '["aegaeon"]'],
            ["policy.aegaeon.q_max_seconds", "3.0"],
            ["model.llama-a.name", "llama-a"],
        ]
        assert "3 differ" in screen(app)[1]
        await press(app, "enter")
        assert "/etc/appliance.toml" in seen(app)


async def test_files_with_problems() -> None:
    """Which line, what is wrong, and the remedy; there is nothing to compare then."""
    problem = {"file": "/etc/appliance.toml", "line": 7, "key": "api.bnd", "wrong": "unknown key",
               "remedy": "did you mean bind?"}  # fmt: skip
    check = {"ok": False, "changes": [], "problems": [problem]}
    async with dashboard(configured(check), size=(120, 30)) as app:
        await command(app, "config")
        first = " ".join(screen(app)[3].split())
        assert first == "api.bnd - correction appliance.toml:7: unknown key; did you mean bind?"


async def test_reload() -> None:
    """After a question; it is told what came of it, and asked anew."""
    source = configured()
    source.answers["POST", "/api/config/reload"] = {"applied": [1, 2], "restart": [3]}
    async with dashboard(source, size=(120, 30)) as app:
        await command(app, "config")
        source.asked.clear()
        source.answers["POST", CHECK] = {"ok": True, "changes": [], "problems": []}
        await press(app, "R", "n")
        assert source.asked == []
        await press(app, "R", "y")
        assert [asked[1] for asked in source.asked] == ["/api/config/reload", IN_FORCE, CHECK]
        assert notified(app) == ["2 applied, 1 wait for a restart"]
        assert "differ" not in screen(app)[1]
        source.answers["POST", "/api/config/reload"] = DaemonRefused(
            "appliance.toml:7: unknown key"
        )
        await command(app, "reload")
        await press(app, "y")
        assert notified(app)[-1] == "reload: appliance.toml:7: unknown key"


async def test_another_reload_is_seen() -> None:
    """As the daemon tells of it."""
    async with dashboard(source := configured(), size=(120, 30)) as app:
        await command(app, "config")
        source.answers["POST", CHECK] = {"ok": True, "changes": [], "problems": []}
        source.say(notice(2, "config_reloaded", applied=[], restart=[]))
        await settle(app)
        assert "differ" not in screen(app)[1]


async def test_a_daemon_that_does_not_tell() -> None:
    """Why."""
    source = Told(state(tree()))
    source.answers["GET", IN_FORCE] = DaemonRefused("the API key is no admin's")
    async with dashboard(source) as app:
        await command(app, "config")
        assert "the API key is no admin's" in seen(app)
