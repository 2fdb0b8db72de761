"""Organizations in the file of keys: durable as keys are, and never without their limits."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from appliance.access.keys import KeyFile, KeyRing
from appliance.access.organizations import Limits, Organization, make_organization
from appliance.errors import (
    KeyFieldError,
    KeyNotFound,
    KeysError,
    OrganizationInUse,
    OrganizationNotFound,
)
from appliance.platform.checked_file import copy_of
from tests.unit.access.test_keys import key

ACME = Organization(
    name="acme", requests_per_minute=1, tokens_per_minute=2, tokens_per_month=3, concurrency=4
)


@pytest.fixture
def file(tmp_path: Path) -> KeyFile:
    """With one organization."""
    file = KeyFile(tmp_path / "keys.json")
    file.set_organization(ACME)
    return file


def test_what_is_written_is_read_again(file: KeyFile) -> None:
    """Beside keys, which name theirs; other limits take the place of those before."""
    file.add(key(organization="acme"))
    file.add(key("bob", "sk-bob"))
    assert file.contents() == ((key(organization="acme"), key("bob", "sk-bob")), (ACME,))

    file.set_organization(Organization(name="acme"))
    file.set_organization(Organization(name="other"))
    file.assign("alice", "other")
    file.assign("bob", None)

    assert [each.organization for each in file.read()] == ["other", None]
    assert file.contents().organizations == (Organization(name="acme"), Organization(name="other"))


def test_no_key_is_without_its_limits(file: KeyFile) -> None:
    """An organization that there is not has no keys, and one with keys stays."""
    unknown = "organization: there is no organization 'acne'; did you mean acme?"
    with pytest.raises(KeyFieldError, match=re.escape(unknown)):
        file.add(key(organization="acne"))
    file.add(key())
    with pytest.raises(KeyFieldError, match=re.escape(unknown)):
        file.assign("alice", "acne")
    file.assign("alice", "acme")
    with pytest.raises(OrganizationInUse, match="has keys: 'alice'"):
        file.remove_organization("acme")
    file.remove("alice")
    file.remove_organization("acme")
    with pytest.raises(OrganizationNotFound):
        file.remove_organization("acme")
    with pytest.raises(KeyNotFound):
        file.assign("alice", None)
    assert "organizations" not in file.path.read_text()


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"organizations": []}, "'acme' of the key 'alice' is not among its organizations"),
        ({"organizations": [{"name": "acme"}] * 2}, "has an organization more than once"),
        ({"organizations": [{"name": "a", "budget": 1}]}, "is no file of keys"),
        ({"organizations": [{"name": "a", "concurrency": 0}]}, "is no file of keys"),
    ],
)
def test_a_file_that_was_edited_by_hand(
    file: KeyFile, fields: dict[str, object], problem: str
) -> None:
    """Mistakes are said, and a daemon that runs keeps the keys and limits that it has."""
    file.add(key(organization="acme"))
    ring = KeyRing(file.path)
    written = json.loads(file.path.read_text())
    del written["checksum"]
    file.path.write_text(json.dumps(written | fields))

    with pytest.raises(KeysError, match=problem):
        file.read()
    assert ring.find("sk-alice", 1.0) is not None
    assert ring.organizations() == (ACME,)


def test_the_checksum_is_also_of_organizations(file: KeyFile) -> None:
    """A limit that was damaged on the disk does not hold: the copy does."""
    file.path.write_text(file.path.read_text().replace('"concurrency": 4', '"concurrency": 5'))

    assert copy_of(file.path).exists()
    with pytest.raises(KeysError, match="its checksum differs"):
        file.read()
    assert file.contents_or_copy().organizations == (ACME,)


def test_a_name_is_as_that_of_a_key() -> None:
    with pytest.raises(KeyFieldError, match="begins with a letter or a digit"):
        make_organization("../acme", Limits())
