"""`appliance key`: what it writes and prints, and what it refuses."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from appliance.access.keys import Key, KeyFile, KeyRing, Scope
from appliance.cli.main import cli
from appliance.vocabulary import RequestClass


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def call(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["key", *map(str, arguments)])


def test_a_key_is_shown_once_and_works(path: Path) -> None:
    """On standard output alone, so that a script can take it; afterwards only its hash is known."""
    made = call("create", "alice", "--file", path)

    assert (made.exit_code, made.stdout.count("\n")) == (0, 1)
    secret = made.stdout.strip()
    assert secret.startswith("sk-")
    assert "only time" in made.stderr
    assert KeyRing(path).find(secret, time.time()) == KeyFile(path).read()[0]
    assert secret not in path.read_text() + call("list", "--file", path, "--json").stdout


def test_everything_that_a_key_may_allow(path: Path) -> None:
    """Each option ends up in the key."""
    before = time.time()
    made = call(
        "create", "bob", "--file", path, "--scope", "infer", "--scope", "admin", "--model", "a",
        "--model", "b", "--class", "batch", "--slo", "--no-guides", "--expires", "30d",
        "--requests-per-minute", 1, "--tokens-per-minute", 2, "--concurrency", 3, "--json",
    )  # fmt: skip

    assert made.exit_code == 0, made.output
    (key,) = KeyFile(path).read()
    assert key.expires_seconds is not None
    assert 0 <= key.expires_seconds - before - 30 * 86_400 < 60
    assert key == Key(
        name="bob", sha256=key.sha256, created_seconds=key.created_seconds,
        expires_seconds=key.expires_seconds, scopes=(Scope.INFER, Scope.ADMIN), models=("a", "b"),
        classes=(RequestClass.BATCH,), slo=True, guides=False, requests_per_minute=1,
        tokens_per_minute=2, concurrency=3,
    )  # fmt: skip
    assert json.loads(made.stdout)["key"].startswith("sk-")


def test_listing(path: Path) -> None:
    """One line for each key; `-` where nothing binds."""
    call("create", "alice", "--file", path)
    call("create", "bob", "--file", path, "--model", "a", "--concurrency", 3)

    header, alice, bob = [line.split() for line in call("list", "--file", path).stdout.splitlines()]

    assert header == [
        "NAME", "SCOPES", "MODELS", "CLASSES", "CREATED", "EXPIRES", "RPM", "TPM",
        "MONTHLY", "AT", "ONCE", "ORGANIZATION",
    ]  # fmt: skip
    assert alice[:4] == ["alice", "infer", "all", "interactive,batch"]
    assert alice[-6:] == ["never", "-", "-", "-", "-", "-"]
    assert (bob[2], bob[-2]) == ("a", "3")
    assert [key["name"] for key in json.loads(call("list", "--file", path, "--json").stdout)] == [
        "alice", "bob",
    ]  # fmt: skip


def test_revoking(path: Path) -> None:
    """By name; a name that nobody has went wrong."""
    call("create", "alice", "--file", path)

    assert call("revoke", "alice", "--file", path).stdout == "alice is revoked\n"
    again = call("revoke", "alice", "--file", path)
    assert (again.exit_code, again.stderr) == (1, "error: there is no key 'alice'\n")
    assert KeyFile(path).read() == ()


@pytest.mark.parametrize(
    ("arguments", "status", "reason"),
    [
        (["a b"], 2, "NAME"),
        (["taken"], 1, "there is a key 'taken' already"),
        (["x", "--scope", "all"], 2, "--scope"),
        (["x", "--expires", "soon"], 2, "30d"),
        (["x", "--expires", "0d"], 2, "30d"),
        (["x", "--concurrency", "0"], 2, "--concurrency"),
    ],
)
def test_refusals(path: Path, arguments: list[str], status: int, reason: str) -> None:
    """Nothing is written."""
    call("create", "taken", "--file", path)
    before = path.read_text()

    result = call("create", *arguments, "--file", path)

    assert (result.exit_code, result.stdout) == (status, "")
    assert reason in result.stderr
    assert path.read_text() == before


def test_the_configuration_names_the_file(tmp_path: Path) -> None:
    """Relative to itself; one without keys says what to add."""
    config = tmp_path / "my.toml"
    rest = '[devices]\nmemory = "8MiB"\n[[model]]\nname = "m"\npath = "m"\nmax_context = 64\n'
    config.write_text(f'[api]\nkeys = "mine.json"\n{rest}')

    assert call("create", "alice", "--config", config).exit_code == 0
    assert [key.name for key in KeyFile(tmp_path / "mine.json").read()] == ["alice"]
    config.write_text(rest)
    none = call("list", "--config", config)
    assert (none.exit_code, "add keys =" in none.stderr) == (2, True)
    config.write_text("x = 1")
    assert call("revoke", "alice", "--config", config).exit_code == 2
    (tmp_path / "mine.json").write_text("{")
    broken = call("list", "--file", tmp_path / "mine.json")
    assert (broken.exit_code, "no file of keys" in broken.stderr) == (1, True)


def test_a_model_that_there_is_not(tmp_path: Path, fake_checkpoint: Callable[..., Path]) -> None:
    """A key for it would be of no use: the name is refused, with the nearest that there is. With
    --file nothing says which models there are."""
    fake_checkpoint()
    config = tmp_path / "appliance.toml"
    config.write_text(
        '[api]\nkeys = "keys.json"\n[devices]\nmemory = "8MiB"\n'
        '[[model]]\nname = "tiny"\npath = "tiny"\nmax_context = 64\n'
        '[[model.adapter]]\nname = "legal"\npath = "legal"\n',
        encoding="utf-8",
    )
    wrong = call("create", "a", "--config", config, "--model", "tiny", "--model", "tiney")
    right = call("create", "a", "--config", config, "--model", "tiny", "--model", "tiny:legal")
    unknown = call("create", "b", "--file", tmp_path / "keys.json", "--model", "other")

    assert wrong.exit_code == 2
    assert "there is no model 'tiney'; did you mean tiny?" in wrong.stderr
    assert (right.exit_code, unknown.exit_code) == (0, 0), right.stderr
    names = [(key.name, key.models) for key in KeyFile(tmp_path / "keys.json").read()]
    assert names == [("a", ("tiny", "tiny:legal")), ("b", ("other",))]


def test_organizations(path: Path) -> None:
    """They are set, have keys, are listed, and removed once they have none."""
    made = call("organization", "set", "acme", "--file", path, "--tokens-per-month", 9)
    assert made.stdout == "acme: tokens per month 9\n"
    call("create", "alice", "--file", path, "--organization", "acme")
    call("create", "bob", "--file", path)
    moved = call("assign", "bob", "--file", path, "--organization", "acme")
    assert moved.stdout == "bob belongs to acme\n"

    listed = call("organization", "list", "--file", path).stdout.splitlines()
    assert [line.split() for line in listed] == [
        ["NAME", "RPM", "TPM", "MONTHLY", "AT", "ONCE", "KEYS"],
        ["acme", "-", "-", "9", "-", "alice,bob"],
    ]
    (as_json,) = json.loads(call("organization", "list", "--file", path, "--json").stdout)
    assert (as_json["tokens_per_month"], as_json["keys"]) == (9, ["alice", "bob"])
    assert call("organization", "remove", "acme", "--file", path).exit_code == 1

    call("revoke", "alice", "--file", path)
    assert call("assign", "bob", "--file", path, "--no-organization").exit_code == 0
    removed = call("organization", "remove", "acme", "--file", path)
    assert (removed.exit_code, removed.stdout) == (0, "acme is removed\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("create", "x", "--organization", "none"), "--organization: there is no organization"),
        (("assign", "bob", "--organization", "none"), "--organization: there is no organization"),
        (("assign", "bob"), "give --organization or --no-organization"),
        (("assign", "none", "--no-organization"), "there is no key 'none'"),
        (("organization", "set", "-x"), "No such option"),
        (("organization", "set", "a/b"), "NAME: begins with a letter"),
        (("organization", "set", "a", "--concurrency", 0), "0 is not in the range"),
    ],
)
def test_mistakes_with_organizations(path: Path, arguments: tuple[object, ...], said: str) -> None:
    """What is wrong is named."""
    call("create", "bob", "--file", path)
    failed = call(*arguments, "--file", path)

    assert failed.exit_code in (1, 2)
    assert said in failed.stderr


def test_a_configuration_without_keys(tmp_path: Path) -> None:
    """It may be another one than the daemon's, such as the sample of a checkout."""
    file = tmp_path / "my.toml"
    file.write_text(
        '[devices]\nmemory = "8MiB"\n[[model]]\nname = "m"\npath = "m"\nmax_context = 64\n'
    )

    failed = call("create", "bob", "--config", file)

    assert failed.exit_code == 2
    assert "my.toml has no keys: name the configuration that the daemon runs with" in failed.stderr
