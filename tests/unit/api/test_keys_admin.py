"""`/api/keys`: keys are listed, made and revoked over HTTP, and shown once."""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest

from appliance.access.keys import KeyFile, Scope
from appliance.api.app import create_app
from appliance.vocabulary import RequestClass
from tests.unit.api.test_keys import House, bearer
from tests.unit.doubles.fake_service import FakeService
from tests.unit.doubles.serving import unserved

ADMIN = (Scope.ADMIN,)
DAY_SECONDS = 24 * 3600.0


@pytest.fixture
def house(tmp_path: Path) -> House:
    """Its operator has a key of the scope `admin`."""
    house = House(tmp_path / "keys.json")
    house.add("operator", scopes=ADMIN)
    return house


async def listed(client: httpx.AsyncClient) -> dict[str, dict[str, Any]]:
    """All keys by name."""
    return {key["name"]: key for key in (await client.get("/api/keys")).json()["keys"]}


async def test_a_key_that_is_made_works_at_once(house: House) -> None:
    """It is in the answer, which nobody may store, and nowhere else; the file has all it allows."""
    wanted = {
        "name": "ci", "scopes": ["infer", "admin"], "models": ["small", "small"],
        "classes": ["batch"], "slo": True, "guides": False, "expires": "30d",
        "requests_per_minute": 60, "tokens_per_minute": 20_000, "concurrency": 4,
    }  # fmt: skip
    async with house.client("sk-operator") as client:
        made = await client.post("/api/keys", json=wanted)
        told = made.json()
        secret = told.pop("key")

        assert (made.status_code, made.headers["cache-control"]) == (201, "no-store")
        assert told == {
            "name": "ci", "created_unix_seconds": 1000.0,
            "expires_unix_seconds": 1000.0 + 30 * DAY_SECONDS, "expired": False,
            "scopes": ["infer", "admin"], "models": ["small"], "classes": ["batch"], "slo": True,
            "guides": False, "requests_per_minute": 60, "tokens_per_minute": 20_000,
            "tokens_per_month": None,
            "concurrency": 4, "organization": None, "use": None,
        }  # fmt: skip
        assert (await client.get("/api/keys/ci")).json() == told
        asked = await client.get("/api/keys/ci", headers=bearer(secret))
        assert asked.json()["use"] == {
            "live": 0, "requests": 0, "prompt_tokens": 0, "output_tokens": 0, "refusals": 0,
        }  # fmt: skip


async def test_what_is_left_out(house: House) -> None:
    """A key for everything that infers, for ever, without limits; as the command makes it."""
    async with house.client("sk-operator") as client:
        told = (await client.post("/api/keys", json={"name": "alice"})).json()
        assert await house.ask(told["key"]) == 200

    key = next(key for key in house.file.read() if key.name == "alice")
    assert (key.scopes, key.models, key.classes) == ((Scope.INFER,), (), tuple(RequestClass))
    assert (key.expires_seconds, key.slo, key.concurrency) == (None, False, None)
    assert key.guides


async def test_a_list_has_no_secrets(house: House) -> None:
    """Neither keys nor their hashes; but what each has had, and which are over."""
    house.add("alice", requests_per_minute=1)
    house.add("old", expires_seconds=1000.0)
    async with house.client("sk-operator") as client:
        for _ in range(2):  # the second one is refused
            await house.ask("sk-alice")
        text = (await client.get("/api/keys")).text
        keys = await listed(client)

    assert "sk-" not in text
    assert not any(key.sha256 in text for key in house.file.read())
    assert list(keys) == ["operator", "alice", "old"]
    assert [key["expired"] for key in keys.values()] == [False, False, True]
    use = keys["alice"]["use"]
    assert (use["live"], use["requests"], use["refusals"]) == (0, 1, 1)
    assert use["prompt_tokens"] > 0
    assert use["output_tokens"] == 5
    assert keys["old"]["use"] is None


async def test_a_revoked_key_is_none(house: House) -> None:
    """From the next request on; its name may be taken again, and what was counted is gone."""
    secret = house.add("alice")
    async with house.client("sk-operator") as client:
        assert await house.ask(secret) == 200
        answer = await client.delete("/api/keys/alice")
        assert answer.json() == {"revoked": "alice", "admin_keys": 1}
        assert await house.ask(secret) == 401
        for method in ("GET", "DELETE"):
            gone = await client.request(method, "/api/keys/alice")
            assert (gone.status_code, gone.json()["error"]["code"]) == (404, "key_not_found")
        assert (await client.post("/api/keys", json={"name": "alice"})).status_code == 201
        assert (await listed(client))["alice"]["use"] is None


async def test_a_key_that_revokes_itself(house: House) -> None:
    """It is answered, with how many operators are left; then it is nobody."""
    house.add("second", scopes=ADMIN)
    house.add("over", scopes=ADMIN, expires_seconds=1000.0)
    async with house.client("sk-operator") as client:
        for name, left in (("second", 1), ("operator", 0)):
            answer = await client.delete(f"/api/keys/{name}")
            assert answer.json() == {"revoked": name, "admin_keys": left}
        assert (await client.get("/api/keys")).status_code == 401


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        ({}, 400, "missing_field", "name"),
        ({"name": ""}, 400, None, "name"),
        ({"name": "../x"}, 400, None, "name"),
        ({"name": "x\n"}, 400, None, "name"),
        ({"name": "x", "secret": "sk-mine"}, 400, "unsupported_field", "secret"),
        ({"name": "x", "scopes": []}, 400, None, "scopes"),
        ({"name": "x", "scopes": ["root"]}, 400, None, "scopes[0]"),
        ({"name": "x", "classes": []}, 400, None, "classes"),
        ({"name": "x", "expires": "0d"}, 400, None, "expires"),
        ({"name": "x", "expires": "tomorrow"}, 400, None, "expires"),
        ({"name": "x", "concurrency": 0}, 400, None, "concurrency"),
        ({"name": "x", "models": ["smal"]}, 422, "model_not_found", "models"),
        ({"name": "operator"}, 409, "key_exists", "name"),
    ],
)
async def test_what_cannot_be_made(
    house: House, body: dict[str, Any], status: int, code: str | None, param: str
) -> None:
    """Names the field; nothing is written."""
    before = house.file.path.read_bytes()
    async with house.client("sk-operator") as client:
        answer = await client.post("/api/keys", json=body)

    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param), error
    assert param in error["message"] or code == "key_exists"
    assert house.file.path.read_bytes() == before


async def test_a_model_is_meant(house: House) -> None:
    """The one that was probably meant is named."""
    async with house.client("sk-operator") as client:
        answer = await client.post("/api/keys", json={"name": "x", "models": ["smal"]})

    message = "models: there is no model 'smal'; did you mean small?"
    assert answer.json()["error"]["message"] == message


async def test_operators_alone(house: House) -> None:
    """A key that infers sees none, makes none and revokes none."""
    secret = house.add("alice")
    async with house.client(secret) as client:
        for method, path in (
            ("GET", "/api/keys"), ("GET", "/api/keys/alice"), ("POST", "/api/keys"),
            ("DELETE", "/api/keys/alice"),
        ):  # fmt: skip
            assert (await client.request(method, path, json={"name": "x"})).status_code == 403
    assert [key.name for key in house.file.read()] == ["operator", "alice"]


async def test_without_keys_it_says_how_to_have_some() -> None:
    """By the name of the setting."""
    async with unserved(create_app(FakeService())) as client:
        for method, path in (
            ("GET", "/api/keys"), ("GET", "/api/keys/x"), ("POST", "/api/keys"),
            ("DELETE", "/api/keys/x"),
        ):  # fmt: skip
            answer = await client.request(method, path, json={"name": "x"})
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (404, "not_configured")
            assert 'add keys = "keys.json" to [api]' in error["message"]


async def test_a_file_that_cannot_be_changed(house: House) -> None:
    """The keys in force are told; why none is made or revoked, too."""
    async with house.client("sk-operator") as client:
        assert list(await listed(client)) == ["operator"]
        house.file.path.write_text("{", encoding="utf-8")
        assert list(await listed(client)) == ["operator"]
        for method, path in (("POST", "/api/keys"), ("DELETE", "/api/keys/operator")):
            answer = await client.request(method, path, json={"name": "x"})
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (409, "not_saved")
            assert "is no file of keys" in error["message"]


async def test_others_are_answered_while_the_file_is_locked(house: House) -> None:
    """Who changes it waits for whoever else does, in a thread of its own."""
    lock = house.file.path.with_name("keys.json.lock")
    async with house.client("sk-operator") as client:
        with lock.open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            making = [
                asyncio.create_task(client.post("/api/keys", json={"name": name}))
                for name in ("a", "b")
            ]
            assert list(await listed(client)) == ["operator"]
            assert not any(task.done() for task in making)
        assert [answer.status_code for answer in await asyncio.gather(*making)] == [201, 201]
        assert {"a", "b"} < set(await listed(client))


async def test_keys_whose_names_are_changed_by_hand(house: House) -> None:
    """What is counted for a name begins anew; two that change names do not take each other's."""
    house.add("alice")
    house.add("bob")
    async with house.client("sk-operator") as client:
        for secret in ("sk-alice", "sk-alice", "sk-bob"):
            await house.ask(secret)
        text = house.file.path.read_text(encoding="utf-8")
        for old, new in (("alice", "carol"), ("bob", "alice"), ("carol", "bob")):
            text = text.replace(f'"{old}"', f'"{new}"')
        edited = json.loads(text)
        del edited["checksum"]
        house.file.path.write_text(json.dumps(edited), encoding="utf-8")

        found = await listed(client)
        assert [found[name]["use"]["requests"] for name in ("alice", "bob")] == [0, 0]
        await house.ask("sk-alice")
        assert (await listed(client))["bob"]["use"]["requests"] == 1
        metrics = (await client.get("/metrics")).text
    assert 'appliance_key_requests_total{key="bob"} 1.0' in metrics
    assert 'appliance_key_requests_total{key="alice"}' not in metrics


async def test_the_log_has_names_alone(house: House, caplog: pytest.LogCaptureFixture) -> None:
    """Who was made and revoked; nothing that opens anything."""
    caplog.set_level(logging.DEBUG)
    async with house.client("sk-operator") as client:
        made = (await client.post("/api/keys", json={"name": "ci"})).json()
        await house.ask(made["key"])
        await client.delete("/api/keys/ci")

    assert "the key ci was made" in caplog.text
    assert "the key ci was revoked" in caplog.text
    assert made["key"] not in caplog.text
    assert "sha256" not in json.dumps(made)
    assert KeyFile(house.file.path).read()[0].name == "operator"
