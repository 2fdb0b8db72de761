"""Usage on the dashboard: what each key had, added up and sorted; how to turn the ledger on."""

from __future__ import annotations

from typing import Any

from tests.unit.tui.bench import Told, command, dashboard, press, screen, seen, settle, state, tree
from tui.app import Dashboard
from tui.messages import DaemonRefused, Document

PATH = "/api/usage?by=key,model&since=30d"
OFF = (
    "this appliance keeps no ledger: usage.directory is not set; "
    'add directory = "usage" to [usage], and restart it'
)


def used(requests: int, tokens: int, **names: str) -> Document:
    return names | {
        "requests": requests, "input_tokens": 10 * tokens, "cached_tokens": tokens,
        "output_tokens": tokens, "gpu_seconds": 12.5, "waiting_seconds": 310.0,
    }  # fmt: skip


def answer(*rows: Document) -> Document:
    budget = {"key": "alice", "tokens_per_month": 5000, "spent_tokens": 4321,
              "renews": "2026-12-01"}  # fmt: skip
    return {"by": [], "since": None, "until": "2026-11-28", "rows": list(rows), "total": None,
            "budgets": [budget], "organization_budgets": [
                {"organization": "acme", "tokens_per_month": 99, "spent_tokens": 77,
                 "renews": "2026-12-01"}]}  # fmt: skip


def told(**answers: Any) -> Told:
    source = Told(state(tree()))
    source.answers["GET", PATH] = answer(
        used(3, 700, key="alice", model="a"), used(9, 20, key="", model="a"),
        used(4, 90, key="bob", model="b"),
    )  # fmt: skip
    return source


def keys_in_order(app: Dashboard) -> list[str]:
    return [line.split()[0] for line in screen(app)[3:6]]


async def test_what_keys_used() -> None:
    """By key and model, of the last 30 days, and sorted by any column."""
    async with dashboard(told(), size=(100, 24)) as app:
        await command(app, "usage")
        await settle(app)
        (row,) = [line.split() for line in screen(app) if line.split()[:2] == ["alice", "a"]]
        assert row == ["alice", "a", "3", "7000", "700", "12s", "5m10s", "700"]
        assert "(no key)" in seen(app)
        assert "(3, 30 days)" in screen(app)[1]
        await command(app, "sort OUTPUT")
        assert keys_in_order(app) == ["(no", "bob", "alice"]
        await press(app, "S")
        assert keys_in_order(app) == ["alice", "bob", "(no"]
        await press(app, "enter")
        assert "4321" in seen(app), "of its budget"


async def test_it_is_added_up_otherwise() -> None:
    """By key alone, model or day, and of other periods."""
    async with dashboard(source := told(), size=(100, 24)) as app:
        source.answers["GET", "/api/usage?by=key&since=30d"] = answer(used(5, 7, key="carol"))
        source.answers["GET", "/api/usage?by=key&since=7d"] = answer(used(2, 3, key="dave"))
        await command(app, "usage")
        await press(app, "b")
        await settle(app)
        assert "carol" in seen(app)
        assert "MODEL" not in screen(app)[2]
        await press(app, "p")
        await settle(app)
        assert "dave" in seen(app)
        assert "(1, 7 days)" in screen(app)[1]


async def test_without_a_ledger_it_says_how_to_have_one() -> None:
    """All of it, also where the line is longer than the screen."""
    async with dashboard(source := told()) as app:
        source.answers["GET", PATH] = DaemonRefused(OFF)
        await command(app, "usage")
        await settle(app)
        page = " ".join(" ".join(line.split()) for line in screen(app)[2:6])
        assert OFF in page


async def test_what_organizations_used() -> None:
    """Their keys together, and the budget of each."""
    async with dashboard(source := told(), size=(100, 24)) as app:
        rows = used(5, 7, organization="acme"), used(5, 7, organization="")
        for by in ("key", "model", "day"):
            source.answers["GET", f"/api/usage?by={by}&since=30d"] = answer()
        source.answers["GET", "/api/usage?by=organization&since=30d"] = answer(*rows)
        await command(app, "usage")
        await press(app, "b", "b", "b", "b")
        await settle(app)
        assert "(none)" in seen(app)
        await press(app, "enter")
        assert "77" in seen(app)
