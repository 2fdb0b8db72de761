"""One file of keys on several boxes: followed and never written, with a share of its limits."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from appliance.access.auth import Access, Credentials
from appliance.access.keys import Key, KeyFile, KeyRing, Scope, digest
from appliance.access.organizations import Organization
from appliance.api.app import create_app
from appliance.cli.main import cli
from appliance.config.diff import as_written
from appliance.config.loader import load_config
from appliance.errors import ConfigError, KeysReadOnly
from tests.unit.doubles.fake_service import FakeService
from tests.unit.doubles.serving import unserved

NOW = 1000.0


def key(name: str, **fields: Any) -> Key:
    return Key(name=name, sha256=digest(f"sk-{name}"), created_seconds=0.0, **fields)


class Fleet:
    """The file where keys are changed, and its copy on a box."""

    def __init__(self, folder: Path) -> None:
        (folder / "origin").mkdir()
        (folder / "box").mkdir()
        self.origin = KeyFile(folder / "origin" / "keys.json")
        self.box = folder / "box" / "keys.json"

    def hand_out(self) -> None:
        """As a tool does that replaces the file at once."""
        fresh = self.box.with_name("keys.json.new")
        fresh.write_bytes(self.origin.path.read_bytes())
        fresh.chmod(0o600)
        fresh.replace(self.box)


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    fleet = Fleet(tmp_path)
    fleet.origin.set_organization(Organization(name="acme", tokens_per_minute=10, concurrency=7))
    fleet.origin.add(key("root", scopes=(Scope.ADMIN, Scope.INFER)))
    limits = {"requests_per_minute": 60, "tokens_per_minute": 1001, "tokens_per_month": 3}
    fleet.origin.add(key("alice", organization="acme", concurrency=2, **limits))
    fleet.hand_out()
    return fleet


def test_nothing_is_written_on_a_box(fleet: Fleet) -> None:
    """Neither the file, nor a copy, nor a lock next to it; the error says where to change it."""
    file = KeyFile(fleet.box, read_only=True)
    before = fleet.box.read_bytes()
    changes = [
        lambda: file.add(key("bob")),
        lambda: file.remove("alice"),
        lambda: file.remove("nobody"),
        lambda: file.assign("alice", None),
        lambda: file.set_organization(Organization(name="acme")),
        lambda: file.remove_organization("acme"),
    ]
    for change in changes:
        with pytest.raises(KeysReadOnly, match=r"api\.keys_read_only.*--file FILE"):
            change()

    assert fleet.box.read_bytes() == before
    assert [path.name for path in fleet.box.parent.iterdir()] == ["keys.json"]


def test_what_is_handed_out_holds_from_the_next_request_on(fleet: Fleet) -> None:
    """New keys and revoked ones."""
    ring = KeyRing(fleet.box, read_only=True)
    assert ring.find("sk-alice", NOW) is not None
    fleet.origin.remove("alice")
    fleet.origin.add(key("bob"))
    assert ring.find("sk-alice", NOW) is not None  # not handed out yet
    fleet.hand_out()

    assert ring.find("sk-alice", NOW) is None
    assert ring.find("sk-bob", NOW) is not None
    assert [path.name for path in fleet.box.parent.iterdir()] == ["keys.json"]


@pytest.mark.parametrize("cut", [0, 40, -20])
def test_a_file_that_was_not_replaced_whole_changes_nothing(fleet: Fleet, cut: int) -> None:
    """Half of one has no keys that anybody made; the next whole one holds again."""
    ring = KeyRing(fleet.box, read_only=True)
    fleet.origin.remove("alice")
    whole = fleet.origin.path.read_bytes()
    fleet.box.write_bytes(whole[:cut])
    assert ring.find("sk-alice", NOW) is not None
    fleet.hand_out()
    assert ring.find("sk-alice", NOW) is None


async def test_changes_over_http_are_409_with_the_remedy(fleet: Fleet) -> None:
    """Reading goes on, and shows the limits of the file."""
    ring = KeyRing(fleet.box, read_only=True, share=Fraction(1, 4))
    app = create_app(FakeService(), access=Access(ring, wall_clock=lambda: NOW))  # type: ignore[arg-type]
    async with unserved(app) as client:
        client.headers["x-api-key"] = "sk-root"
        answers = [
            await client.post("/api/keys", json={"name": "bob"}),
            await client.delete("/api/keys/alice"),
            await client.put("/api/keys/alice/organization", json={"organization": None}),
            await client.put("/api/organizations/acme", json={}),
            await client.delete("/api/organizations/acme"),
        ]
        listed = (await client.get("/api/keys/alice")).json()
        organization = (await client.get("/api/organizations/acme")).json()

    assert {(one.status_code, one.json()["error"]["code"]) for one in answers} == {
        (409, "keys_read_only")
    }
    assert all("change it where it comes from" in one.text for one in answers)
    assert (listed["requests_per_minute"], organization["concurrency"]) == (60, 7)


def test_a_share_of_every_limit(fleet: Fleet) -> None:
    """Rounded down, so that the boxes together have no more; one is the least."""
    ring = KeyRing(fleet.box, share=Fraction("1/3"))
    alice = ring.find("sk-alice", NOW)
    assert alice is not None
    assert (alice.requests_per_minute, alice.tokens_per_minute) == (20, 333)
    assert (alice.tokens_per_month, alice.concurrency) == (1, 1)
    of = ring.held_organizations["acme"]
    assert (of.tokens_per_minute, of.concurrency, of.requests_per_minute) == (3, 2, None)
    root = ring.find("sk-root", NOW)
    assert root is not None
    assert root.requests_per_minute is None
    assert ring.all()[1].requests_per_minute == 60


def test_a_share_is_what_is_counted(fleet: Fleet) -> None:
    """Also after a change of the file."""
    ring = KeyRing(fleet.box, read_only=True, share=Fraction("0.5"))
    access = Access(ring, clock=lambda: 0.0, wall_clock=lambda: NOW)
    asking = Credentials({"x-api-key": "sk-alice"})
    left = dict(access.rate_headers(access.caller(asking, Scope.INFER)))
    assert left["x-ratelimit-limit-requests"] == "30"
    assert left["x-ratelimit-limit-tokens"] == "5"  # of the organization
    fleet.origin.remove("alice")
    fleet.origin.add(key("alice", requests_per_minute=8))
    fleet.hand_out()

    left = dict(access.rate_headers(access.caller(asking, Scope.INFER)))
    assert left == {
        "x-ratelimit-limit-requests": "4",
        "x-ratelimit-remaining-requests": "4",
        "x-ratelimit-reset-requests": "0ms",
    }


CONFIG = '[api]\nkeys = "keys.json"\nkeys_read_only = true\nlimits_share = {}\n'
MODEL = '[[model]]\nname = "m"\npath = "m"\n'


@pytest.mark.parametrize(
    ("written", "share"), [("0.25", "1/4"), ('"1/4"', "1/4"), ("1", "1"), ('"2/3"', "2/3")]
)
def test_a_share_may_be_written_in_both_ways(tmp_path: Path, written: str, share: str) -> None:
    file = tmp_path / "appliance.toml"
    file.write_text(CONFIG.format(written) + MODEL)
    found = load_config(file, check_files=False)
    assert found.api.limits_share.fraction == Fraction(share)
    assert found.api.keys_read_only


@pytest.mark.parametrize(
    "written",
    ["0", "1.5", "-0.5", "true", '"3/2"', '"0/4"', '"1/0"', '"a"', '"1e-3"', "[]"],
)
def test_what_is_no_share(tmp_path: Path, written: str) -> None:
    file = tmp_path / "appliance.toml"
    file.write_text(CONFIG.format(written) + MODEL)
    with pytest.raises(ConfigError, match=r"api\.limits_share.*share of more than 0"):
        load_config(file, check_files=False)


def test_without_keys_there_is_nothing_to_share(tmp_path: Path) -> None:
    file = tmp_path / "appliance.toml"
    file.write_text("[api]\nkeys_read_only = true\nlimits_share = 0.5\n" + MODEL)
    with pytest.raises(ConfigError) as caught:
        load_config(file, check_files=False)
    keys = [problem.key for problem in caught.value.problems]
    assert keys == ["api.keys_read_only", "api.limits_share"]


def test_the_command_changes_the_origin_and_not_a_box(fleet: Fleet) -> None:
    """By the configuration of a box it refuses; the origin is named as a file."""
    file = fleet.box.with_name("appliance.toml")
    file.write_text(CONFIG.format('"1/2"') + MODEL)
    run = CliRunner().invoke
    refused = run(cli, ["key", "create", "bob", "--config", str(file)])
    assert refused.exit_code == 1
    assert "read only here" in refused.output
    listed = run(cli, ["key", "list", "--json", "--config", str(file)])
    assert [each["name"] for each in json.loads(listed.stdout)] == ["root", "alice"]
    made = run(cli, ["key", "create", "bob", "--file", str(fleet.origin.path)])
    assert made.exit_code == 0


def test_what_is_in_force_can_be_shown(tmp_path: Path) -> None:
    """As JSON, and as a file would have it."""
    file = tmp_path / "appliance.toml"
    file.write_text(CONFIG.format('"1/4"') + MODEL)
    shown = as_written(load_config(file, check_files=False).api)
    assert msgspec.json.decode(msgspec.json.encode(shown))["limits_share"] == "1/4"
