"""`/api/organizations`: limits that several keys share, set over HTTP, and what a client hears of
them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from appliance.access.keys import Scope
from appliance.access.organizations import Organization
from appliance.api.app import create_app
from appliance.service.front_frames import Refused
from tests.unit.api.test_keys import House
from tests.unit.doubles.fake_service import FakeService
from tests.unit.doubles.serving import unserved

NONE = {"requests_per_minute": None, "tokens_per_minute": None, "tokens_per_month": None}


@pytest.fixture
def house(tmp_path: Path) -> House:
    """Its operator has a key of the scope `admin`."""
    house = House(tmp_path / "keys.json")
    house.add("operator", scopes=(Scope.ADMIN,))
    return house


async def test_the_life_of_an_organization(house: House) -> None:
    """It is made, gets keys, other limits, loses its keys, and is removed."""
    house.add("alice")
    async with house.client("sk-operator") as client:
        made = await client.put("/api/organizations/acme", json={"concurrency": 2})
        acme: dict[str, Any] = {"name": "acme", **NONE, "concurrency": 2, "keys": [], "live": 0}
        assert (made.status_code, made.json()) == (200, acme)

        key = await client.put("/api/keys/alice/organization", json={"organization": "acme"})
        assert key.json()["organization"] == "acme"
        made = await client.post("/api/keys", json={"name": "bob", "organization": "acme"})
        assert (made.status_code, made.json()["organization"]) == (201, "acme")
        changed = await client.put("/api/organizations/acme", json={"requests_per_minute": 5})
        acme |= {"requests_per_minute": 5, "concurrency": None, "keys": ["alice", "bob"]}
        assert changed.json() == acme
        assert (await client.get("/api/organizations")).json() == {"organizations": [acme]}
        assert (await client.get("/api/organizations/acme")).json() == acme

        used = await client.delete("/api/organizations/acme")
        assert (used.status_code, used.json()["error"]["code"]) == (409, "organization_in_use")
        await client.put("/api/keys/alice/organization", json={"organization": None})
        await client.delete("/api/keys/bob")
        gone = await client.delete("/api/organizations/acme")
        assert (gone.status_code, gone.json()) == (200, {"removed": "acme"})
        assert house.file.contents().organizations == ()


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code", "param"),
    [
        ("GET", "/api/organizations/none", None, 404, "organization_not_found", "name"),
        ("DELETE", "/api/organizations/none", None, 404, "organization_not_found", "name"),
        ("PUT", "/api/organizations/-x", {}, 400, None, "name"),
        ("PUT", "/api/organizations/acme", {"concurrency": 0}, 400, None, "concurrency"),
        ("PUT", "/api/organizations/acme", {"budget": 1}, 400, "unsupported_field", "budget"),
        ("PUT", "/api/keys/none/organization", {"organization": None}, 404, "key_not_found",
         "name"),
        ("PUT", "/api/keys/operator/organization", {"organization": "none"}, 400, None,
         "organization"),
        ("PUT", "/api/keys/operator/organization", {}, 400, "missing_field", "organization"),
        ("POST", "/api/keys", {"name": "x", "organization": "none"}, 400, None, "organization"),
        ("POST", "/api/keys", {"name": "x", "organization": "!"}, 400, None, "organization"),
    ],
)  # fmt: skip
async def test_what_cannot_be_done(
    house: House,
    method: str,
    path: str,
    body: dict[str, Any] | None,
    status: int,
    code: str | None,
    param: str,
) -> None:
    """Names the field; nothing is written."""
    before = house.file.path.read_bytes()
    async with house.client("sk-operator") as client:
        answer = await client.request(method, path, json=body)

    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param)
    assert code is None or error["code"] == code
    assert house.file.path.read_bytes() == before


async def test_without_keys_there_are_none() -> None:
    """The answer says how to have some."""
    app = create_app(FakeService())  # type: ignore[arg-type]
    async with unserved(app) as client:
        for method, path in (
            ("GET", "/api/organizations"), ("PUT", "/api/organizations/a"),
            ("DELETE", "/api/organizations/a"), ("PUT", "/api/keys/a/organization"),
        ):  # fmt: skip
            answer = await client.request(method, path, json={})
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_configured")


async def test_a_limit_says_whose_it_is(house: House) -> None:
    """The key's, or that of all keys of its organization; and when to come again. Both change while
    requests are answered, and limits change from the next request on."""
    house.file.set_organization(Organization(name="acme", requests_per_minute=3, concurrency=2))
    house.add("alice", organization="acme", requests_per_minute=2)
    for name in ("bob", "carol"):
        house.add(name, organization="acme", concurrency=1)
    async with house.client("sk-operator") as client:
        for _ in range(2):
            assert await house.ask("sk-alice") == 200
        own = house.front.enter(x_api_key="sk-alice")
        assert await house.ask("sk-bob") == 200
        others = house.front.enter(x_api_key="sk-bob")
        await client.put("/api/organizations/acme", json={"concurrency": 1})
        live = house.front.enter(x_api_key="sk-bob")
        shown = (await client.get("/api/organizations/acme")).json()["live"]
        busy = house.front.enter(x_api_key="sk-carol")
        assert not isinstance(live, Refused)
        house.front.leave(live.call)
        metrics = (await client.get("/metrics")).text

    assert isinstance(own, Refused)
    assert own.message.startswith("the limit of this key is reached: 2 requests per minute; ")
    assert isinstance(others, Refused)
    assert others.message == (
        "the limit of the organization 'acme' of this key is reached: 3 requests per minute; try "
        "again in 20 s"
    )
    headers = dict(others.headers)
    assert headers["Retry-After"] == "20"
    assert headers["x-ratelimit-remaining-requests"] == "0"
    assert isinstance(busy, Refused)
    assert "'acme' of this key is reached: 1 requests at once" in busy.message
    assert shown == 1
    for line in (
        '{key="alice",limit="requests"}', '{key="bob",limit="organization_requests"}',
        '{key="carol",limit="organization_concurrency"}',
    ):  # fmt: skip
        assert f"appliance_key_rejections_total{line} 1.0" in metrics
