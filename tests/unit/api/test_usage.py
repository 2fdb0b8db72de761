"""`/api/usage` and `appliance usage`: what keys used, for an admin alone."""

from __future__ import annotations

import asyncio
import csv
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from appliance.access.auth import Access
from appliance.access.keys import Key, KeyFile, KeyRing, Scope, digest
from appliance.access.organizations import Organization
from appliance.api.app import create_app
from appliance.usage.entries import CUT, DAY_SECONDS
from appliance.usage.ledger import Ledger
from tests.patience import PATIENCE_SECONDS
from tests.unit.doubles.fake_service import FakeService
from tests.unit.doubles.serving import commanded, unserved
from tests.unit.usage.test_books import NOW, entry
from tests.unit.usage.test_ledger import opened

Answer = dict[str, Any]


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[Ledger]:
    """Two keys used two models, one of them a month ago."""
    async with opened(tmp_path / "usage") as ledger:
        written = asyncio.Event()
        month_ago = NOW - 30 * DAY_SECONDS
        ledger.record(entry("a", 10), lambda: None)
        bob = entry("b", 1, key="bob", outcome=CUT, organization="acme")
        ledger.record(bob, lambda: None)
        ledger.record(entry("c", 100, model="large", ended=month_ago), written.set)
        await asyncio.wait_for(written.wait(), PATIENCE_SECONDS)
        yield ledger


def app(ledger: Ledger | None, keys: Path | None = None) -> Any:
    ring = None if keys is None else KeyRing(keys)
    access = Access(ring, wall_clock=lambda: NOW)
    return create_app(FakeService(), access=access, ledger=ledger)  # type: ignore[arg-type]


async def asked(ledger: Ledger | None, **query: str) -> httpx.Response:
    async with unserved(app(ledger)) as client:
        return await client.get("/api/usage", params=query)


async def test_sums_by_key_and_model(ledger: Ledger) -> None:
    """Unless something else is asked; from the beginning until today."""
    found: Answer = (await asked(ledger)).json()

    assert [(row["key"], row["model"], row["requests"]) for row in found["rows"]] == [
        ("alice", "large", 1), ("alice", "small", 1), ("bob", "small", 1),
    ]  # fmt: skip
    assert (found["by"], found["since"], found["until"]) == (["key", "model"], None, "2026-11-28")
    assert "day" not in found["rows"][0]
    assert found["total"]["input_tokens"] == 111
    assert found["budgets"] == []


async def test_days_and_outcomes(ledger: Ledger) -> None:
    """A query names its days in either way."""
    for since in ("1d", "2026-11-27"):
        found: Answer = (await asked(ledger, by="day,outcome", since=since)).json()
        assert [(row["day"], row["outcome"]) for row in found["rows"]] == [
            ("2026-11-28", "cut"), ("2026-11-28", "whole"),
        ]  # fmt: skip
        assert found["since"] == "2026-11-27"
    nothing: Answer = (await asked(ledger, until="2020-01-01")).json()
    assert (nothing["rows"], nothing["total"]) == ([], None)


async def test_csv(ledger: Ledger) -> None:
    """With a name for the file."""
    answer = await asked(ledger, by="model", format="csv")

    assert answer.headers["content-type"].startswith("text/csv")
    assert "usage.csv" in answer.headers["content-disposition"]
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    assert [(row["model"], row["output_tokens"]) for row in rows] == [
        ("large", "200"), ("small", "22"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("query", "field"),
    [({"by": "owner"}, "by"), ({"since": "soon"}, "since"), ({"until": "1"}, "until"),
     ({"format": "xml"}, "format")],
)  # fmt: skip
async def test_what_cannot_be_asked(ledger: Ledger, query: dict[str, str], field: str) -> None:
    """The answer names the field."""
    answer = await asked(ledger, **query)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field
    assert answer.json()["error"]["message"].startswith(f"{field}: ")


async def test_without_a_ledger() -> None:
    """The answer says how to have one."""
    answer = await asked(None)

    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_configured")
    assert "usage.directory" in answer.json()["error"]["message"]


async def test_it_is_for_admins(ledger: Ledger, tmp_path: Path) -> None:
    """A key of the scope `infer` sees nothing; an admin sees also budgets, and no secret."""
    file = KeyFile(tmp_path / "keys.json")
    file.set_organization(Organization(name="acme", tokens_per_month=70))
    file.set_organization(Organization(name="free"))
    for name, scope, budget in (("alice", Scope.INFER, 50), ("root", Scope.ADMIN, None)):
        key = Key(
            name=name, sha256=digest(f"sk-{name}"), created_seconds=0.0, scopes=(scope,),
            tokens_per_month=budget,
        )  # fmt: skip
        file.add(key)
    async with unserved(app(ledger, file.path)) as client:
        assert (await client.get("/api/usage")).status_code == 401
        headers = {"x-api-key": "sk-alice"}
        assert (await client.get("/api/usage", headers=headers)).status_code == 403
        answer = await client.get("/api/usage", headers={"x-api-key": "sk-root"})

    assert answer.json()["budgets"] == [
        {"key": "alice", "tokens_per_month": 50, "spent_tokens": 30, "renews": "2026-12-01"}
    ]
    assert answer.json()["organization_budgets"] == [
        {"organization": "acme", "tokens_per_month": 70, "spent_tokens": 3, "renews": "2026-12-01"}
    ]
    assert digest("sk-alice") not in answer.text


async def test_trouble_is_said_where_probes_look(ledger: Ledger) -> None:
    """The appliance goes on, and is degraded."""
    ledger.trouble = "the disk is full"
    async with unserved(app(ledger)) as client:
        answer = await client.get("/readyz")
    ledger.trouble = ""

    assert answer.status_code == 200
    assert answer.json()["degraded"] == ["the disk is full"]


async def test_the_command_prints_a_table(ledger: Ledger) -> None:
    """With a sum below it; JSON and CSV are what the API says."""
    async with commanded(app(ledger), "usage") as run:
        table = (await run("--by", "key")).stdout.splitlines()
        made = json.loads((await run("--by", "key", "--json")).stdout)
        rows = list(csv.reader(io.StringIO((await run("--by", "key", "--csv")).stdout)))
        both = await run("--csv", "--json")
        wrong = await run("--by", "owner")

    assert table[0].split()[:4] == ["KEY", "REQUESTS", "INPUT", "CACHED"]
    assert [line.split()[:3] for line in table[1:]] == [
        ["alice", "2", "110"], ["bob", "1", "1"], ["total", "3", "111"],
    ]  # fmt: skip
    assert [row["key"] for row in made["rows"]] == ["alice", "bob"]
    assert [row[:2] for row in rows] == [["key", "requests"], ["alice", "2"], ["bob", "1"]]
    assert (both.exit_code, wrong.exit_code) == (2, 1)
    assert "'owner' is none of key, organization, model" in wrong.stderr


async def test_the_command_adds_up_organizations(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By where keys belonged when they asked; budgets are below."""
    monkeypatch.setenv("APPLIANCE_API_KEY", "sk-r")
    file = KeyFile(tmp_path / "keys.json")
    file.set_organization(Organization(name="acme", tokens_per_month=70))
    root = Key(name="r", sha256=digest("sk-r"), created_seconds=0.0, scopes=(Scope.ADMIN,))
    file.add(root)
    async with commanded(app(ledger, file.path), "usage") as run:
        table = (await run("--by", "organization")).stdout.splitlines()

    assert table[0].split()[:2] == ["ORGANIZATION", "REQUESTS"]
    assert [line.split()[:3] for line in table[1:4]] == [
        ["(none)", "2", "110"], ["acme", "1", "1"], ["total", "3", "111"],
    ]  # fmt: skip
    assert table[4] == (
        "organization acme: 3 of 70 tokens of this month are spent; it renews on 2026-12-01"
    )
