"""API keys on disk: hashed, private, replaced whole, and followed by whoever reads them."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from appliance.access import keys as keys_module
from appliance.access.keys import Contents, Key, KeyFile, KeyRing, Scope, digest, new_secret
from appliance.errors import KeysError
from appliance.platform import checked_file
from appliance.platform.checked_file import copy_of
from appliance.vocabulary import RequestClass


def key(name: str = "alice", secret: str = "sk-alice", **fields: object) -> Key:
    return Key(name=name, sha256=digest(secret), created_seconds=1.0, **fields)  # type: ignore[arg-type]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def test_secrets_are_long_and_never_twice() -> None:
    """256 random bits behind the prefix that clients know."""
    made = {new_secret() for _ in range(100)}

    assert len(made) == 100
    assert all(secret.startswith("sk-") and len(secret) == 3 + 43 for secret in made)


def test_what_is_written_is_read_again(path: Path) -> None:
    """With everything that a key allows, in the order in which keys were made."""
    rich = key(
        "bob", "sk-bob", expires_seconds=9.0, scopes=(Scope.ADMIN,), models=("a",),
        classes=(RequestClass.BATCH,), slo=True, guides=False, requests_per_minute=1,
        tokens_per_minute=2, concurrency=3,
    )  # fmt: skip
    file = KeyFile(path)
    file.add(key())
    file.add(rich)

    assert KeyFile(path).read() == (key(), rich)


def test_the_file_is_private_and_holds_no_secret(path: Path) -> None:
    """Mode 0600 whatever the umask, and hashes only; nothing else is left beside it."""
    before = os.umask(0)
    try:
        KeyFile(path).add(key())
    finally:
        os.umask(before)

    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "sk-alice" not in path.read_text()
    assert {p.name: stat.S_IMODE(p.stat().st_mode) for p in path.parent.iterdir()} == {
        "keys.json": 0o600,
        "keys.json.copy": 0o600,
        "keys.json.lock": 0o600,
    }


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[int, int]]:
    """Whoever runs the tests is root, and gives files to nobody but here: inode -> owner."""
    given: dict[int, tuple[int, int]] = {}
    monkeypatch.setattr(keys_module, "_ROOT", os.geteuid())
    monkeypatch.setattr(
        os, "fchown", lambda made, *owner: given.update({os.fstat(made).st_ino: owner})
    )
    return given


def test_what_root_makes_is_its_directorys_owners(
    path: Path, given: dict[int, tuple[int, int]]
) -> None:
    """The file and its lock, also a lock that root left before: a daemon of another user changes
    keys, too."""
    lock = path.with_name("keys.json.lock")
    owner = path.parent.stat()
    for name in ("alice", "bob"):
        KeyFile(path).add(key(name, f"sk-{name}"))
        files = (path, copy_of(path), lock)
        assert given == {one.stat().st_ino: (owner.st_uid, owner.st_gid) for one in files}
        given.clear()


def test_a_lock_that_is_another_file_too_is_refused(
    path: Path, given: dict[int, tuple[int, int]]
) -> None:
    """Who may write in the folder could have root give them any file of its own."""
    precious = path.with_name("precious")
    precious.touch()
    path.with_name("keys.json.lock").hardlink_to(precious)

    KeyFile(path).add(key())

    assert set(given) == {path.stat().st_ino, copy_of(path).stat().st_ino}


def test_a_lock_that_cannot_be_handed_over(
    path: Path, given: dict[int, tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is said, and it is not held open."""
    opened: list[int] = []

    def refuse(made: int, *owner: int) -> None:
        opened.append(made)
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "fchown", refuse)

    with pytest.raises(KeysError, match="lock: cannot be written: Operation not permitted"):
        KeyFile(path).add(key())
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[0])
    assert not path.exists()


def test_another_process_changes_the_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are waited for, but not for ever; then nothing is changed."""
    file = KeyFile(path)
    file.add(key())
    held = path.with_name("keys.json.lock").open()
    fcntl.flock(held, fcntl.LOCK_EX)
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)

    with pytest.raises(KeysError, match="is locked; try again later"):
        file.add(key("bob"))
    assert file.read() == (key(),)
    assert 1 < sum(pauses) < 10

    monkeypatch.setattr(time, "sleep", lambda _: held.close())
    file.remove("alice")
    assert file.read() == ()


def test_a_folder_that_cannot_be_synced(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The key is in the file, and counts: it is told, and the log has the rest."""
    really = os.open

    def refuse(opened: object, *rest: int) -> int:
        if opened == path.parent:
            raise PermissionError(13, "Permission denied")
        return really(opened, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refuse)

    KeyFile(path).add(key())

    assert KeyFile(path).read() == (key(),)
    assert f"{path}: may be lost in a power cut: Permission denied" in caplog.text


def test_names_are_unique_and_removed_by_name(path: Path) -> None:
    """A name that is taken, and one that nobody has, are refused and change nothing."""
    file = KeyFile(path)
    file.add(key())

    with pytest.raises(KeysError, match="there is a key 'alice' already"):
        file.add(key(secret="sk-other"))
    with pytest.raises(KeysError, match="there is no key 'bob'"):
        file.remove("bob")
    assert file.read() == (key(),)
    assert file.remove("alice") == key()
    assert file.read() == ()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "is no file of keys"),
        ('{"version": 2, "keys": []}', "version 2"),
        ('{"keys": [{"name": "a"}]}', "missing required field"),
        ('{"keys": [], "more": 1}', "unknown field"),
    ],
)
def test_a_file_that_is_none_is_refused_by_name(path: Path, text: str, reason: str) -> None:
    """Nothing is guessed, and a change of it is refused, too."""
    path.write_text(text)

    with pytest.raises(KeysError, match=reason) as caught:
        KeyFile(path).read()
    assert str(path) in str(caught.value)
    with pytest.raises(KeysError):
        KeyFile(path).add(key())
    assert path.read_text() == text


def test_keys_are_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In number and in bytes."""
    file = KeyFile(path)
    monkeypatch.setattr(keys_module, "MAX_KEYS", 2)
    file.add(key("a"))
    file.add(key("b"))

    with pytest.raises(KeysError, match="more than 2 keys"):
        file.add(key("c"))
    file.remove("b")
    before = path.read_bytes()
    monkeypatch.setattr(keys_module, "MAX_FILE_BYTES", len(before))
    with pytest.raises(KeysError, match=f"would be larger than {len(before)} bytes"):
        file.add(key("b"))
    assert path.read_bytes() == before
    assert file.read() == (key("a"),)
    monkeypatch.setattr(keys_module, "MAX_FILE_BYTES", 100)
    with pytest.raises(KeysError, match="larger than 100 bytes"):
        file.read()


def test_a_name_that_is_there_twice(path: Path) -> None:
    """Somebody wrote that by hand: the file is wrong, and not the key that is wanted."""
    path.write_bytes(msgspec.json.encode({"keys": [key(), key(secret="sk-other")]}))

    for change in (lambda: KeyFile(path).add(key("bob")), lambda: KeyFile(path).remove("alice")):
        with pytest.raises(KeysError, match="has more than one key 'alice'") as caught:
            change()
        assert type(caught.value) is KeysError
        assert str(path) in str(caught.value)


def test_a_directory_that_is_not_there(path: Path) -> None:
    """Keys cannot be written there, and that is said."""
    with pytest.raises(KeysError, match="cannot be written"):
        KeyFile(path.parent / "none" / "keys.json").add(key())


@pytest.mark.parametrize("name", ["", "a b", "a\n", "-a", "a" * 65])
def test_names_are_plain(name: str) -> None:
    """They are printed in tables and logs."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"name": name, "sha256": "0" * 64, "created_seconds": 1}, Key)


# --- the keys of a running appliance -------------------------------------------------------------


def test_a_key_is_found_by_its_secret_until_it_ends(path: Path) -> None:
    """Others are not, whatever their length."""
    KeyFile(path).add(key(expires_seconds=10.0))
    ring = KeyRing(path)

    assert ring.find("sk-alice", 9.9) == key(expires_seconds=10.0)
    assert ring.find("sk-alice", 10.0) is None
    for other in ("", "sk-alic", digest("sk-alice"), "x" * 10_000, "sk-älice", "\udc80"):
        assert ring.find(other, 1.0) is None


def test_changes_hold_from_the_next_request_on(path: Path) -> None:
    """Keys that are made, revoked, or gone with their file; listeners are told who is left."""
    ring = KeyRing(path)
    told: list[frozenset[str]] = []
    ring.on_change(lambda keys: told.append(frozenset(keys)))
    assert ring.find("sk-alice", 1.0) is None

    KeyFile(path).add(key())
    assert ring.find("sk-alice", 1.0) == key()
    KeyFile(path).add(key("bob", "sk-bob"))
    KeyFile(path).remove("alice")
    assert ring.find("sk-alice", 1.0) is None
    assert ring.find("sk-bob", 1.0) == key("bob", "sk-bob")
    path.unlink()
    assert ring.find("sk-bob", 1.0) is None
    assert told == [
        frozenset({digest("sk-alice")}),
        frozenset({digest("sk-bob")}),
        frozenset(),
    ]


def test_a_broken_file_changes_nothing(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The keys stay as they were, which is logged once."""
    KeyFile(path).add(key())
    ring = KeyRing(path)
    path.write_text("{")

    assert ring.find("sk-alice", 1.0) == key()
    assert ring.find("sk-alice", 1.0) == key()
    assert caplog.text.count("the keys were not reloaded") == 1
    assert "sk-alice" not in caplog.text


def test_a_damaged_file_has_a_copy(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A flipped bit that still is JSON would have another key fail, or last longer. A daemon that
    starts then reads the copy; changes are refused, as the file may have been edited."""
    KeyFile(path).add(key())
    path.write_bytes(path.read_bytes().replace(b"alice", b"alicd"))

    assert KeyRing(path).all() == (key(),)
    assert "its checksum differs" in caplog.text
    for change in (lambda: KeyFile(path).add(key("bob")), lambda: KeyFile(path).remove("alice")):
        with pytest.raises(KeysError, match="delete `checksum`"):
            change()
    path.write_bytes(copy_of(path).read_bytes())
    KeyFile(path).add(key("bob", "sk-bob"))
    assert [one.name for one in KeyRing(path).all()] == ["alice", "bob"]


def test_a_copy_does_not_bring_back_what_was_removed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it could not be written just then."""
    KeyFile(path).add(key())
    KeyFile(path).add(key("bob"))
    really = checked_file.replace

    def full(target: Path, *rest: Any) -> int:
        if target == copy_of(path):
            raise OSError(28, "No space left on device")
        return really(target, *rest)

    monkeypatch.setattr(checked_file, "replace", full)
    KeyFile(path).remove("alice")
    path.write_text("{")

    with pytest.raises(KeysError, match="is no file of keys"):
        KeyFile(path).read()


def test_a_file_that_is_written_by_hand(path: Path) -> None:
    """It needs no checksum. The copy does not bring back a key that was removed so."""
    for name in ("alice", "bob"):
        KeyFile(path).add(key(name, f"sk-{name}"))
    found = json.loads(path.read_text())
    del found["checksum"], found["keys"][1]
    path.write_text(json.dumps(found))

    assert [one.name for one in KeyFile(path).read()] == ["alice"]
    path.write_text("")
    with pytest.raises(KeysError):
        KeyRing(path)


def test_a_file_that_is_gone_takes_its_copy_along(path: Path) -> None:
    KeyFile(path).add(key())
    path.unlink()
    assert KeyFile(path).read() == ()
    path.write_text("{")

    with pytest.raises(KeysError):
        KeyRing(path)


def test_a_copy_that_cannot_be_written_is_no_failure(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The key was added: its caller has to get the secret."""
    copy_of(path).mkdir()
    KeyFile(path).add(key())

    assert KeyFile(path).read() == (key(),)
    assert "has no copy that is up to date" in caplog.text


def test_a_file_that_is_mended_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it looks as it did when it could not be read."""
    KeyFile(path).add(key())
    ring = KeyRing(path)
    KeyFile(path).remove("alice")
    with monkeypatch.context() as patch:

        def refuse(_: KeyFile) -> Contents:
            raise KeysError("not now")

        patch.setattr(KeyFile, "contents", refuse)
        assert ring.find("sk-alice", 1.0) == key()

    assert ring.find("sk-alice", 1.0) is None


def test_a_broken_file_is_no_start(path: Path) -> None:
    """An appliance does not begin with keys that it cannot read."""
    path.write_text("{")

    with pytest.raises(KeysError):
        KeyRing(path)
