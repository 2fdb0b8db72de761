"""The configuration of a running daemon, over HTTP and on the command line: shown, compared,
reloaded, and changed for good."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from appliance.api.app import create_app
from appliance.config.checked_text import read_text, without_checksum
from appliance.config.layers import ADMIN_FILE, directory
from appliance.config.loader import load_config
from appliance.daemon.reload import LiveConfig
from appliance.errors import PolicyChoiceError
from appliance.platform import machine_memory
from appliance.platform.machine_memory import MachineMemory
from appliance.service.policy_report import PolicyChoice
from tests.unit.doubles.daemon import Box, setup_of, small
from tests.unit.doubles.serving import Call, commanded, unserved

Make = Callable[..., Path]

GOOD = """\
[api]
max_queue = 100

[devices]
memory = "8MiB"
slab = "64KiB"
host_cache = "16MiB"

[policy]
use = ["serverlessllm"]

[[model]]
name = "tiny"
path = "tiny"
max_context = 1024
slo = { ttft = "3s", tbt = "30ms" }

[[model]]
name = "org/tiny"
path = "tiny"
max_context = 1024
"""


@pytest.fixture
def path(tmp_path: Path, fake_checkpoint: Make) -> Path:
    fake_checkpoint()
    path = tmp_path / "appliance.toml"
    path.write_text(GOOD, encoding="utf-8")
    return path


@pytest.fixture
def admin_file(path: Path) -> Path:
    return directory(path) / ADMIN_FILE


@pytest.fixture
async def box(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Box]:
    models = {"tiny": small("a")["a"], "org/tiny": small("b")["b"]}
    box = Box(monkeypatch, models, setup_of(models, policy="serverlessllm"))
    box.start()
    yield box
    box.daemon.host.close()
    assert box.take_failures() == []


@pytest.fixture
def settings(box: Box, path: Path) -> LiveConfig:
    return LiveConfig(box.daemon, load_config(path), path)


@pytest.fixture
async def client(box: Box, settings: LiveConfig) -> AsyncIterator[httpx.AsyncClient]:
    """A client without a network."""
    app = create_app(box.daemon, settings=settings)
    async with unserved(app) as client:
        yield client


@pytest.fixture
async def call(box: Box, settings: LiveConfig) -> AsyncIterator[Call]:
    """Runs `appliance` against the daemon."""
    async with commanded(create_app(box.daemon, settings=settings)) as call:
        yield call


@pytest.fixture
def log_level() -> logging.Logger:
    """The appliance's logger."""
    return logging.getLogger("appliance")


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def written(path: Path) -> str:
    """What is in a file; nothing if there is none."""
    return without_checksum(read_text(path)) if path.exists() else ""


async def checked(client: httpx.AsyncClient) -> dict[str, Any]:
    answer: dict[str, Any] = (await client.post("/api/config/check")).json()
    return answer


# --- limits and pins -----------------------------------------------------------------------------


async def test_limits_hold_now_and_after_a_restart(
    box: Box, client: httpx.AsyncClient, path: Path, admin_file: Path
) -> None:
    """What is not said stays; the files say the same as the daemon."""
    body = {"slo": {"ttft": "1s", "gap": "2s"}, "batch_slo": {"tbt": "9s"}, "max_queue": 2}

    answer = await client.put("/api/models/org/tiny/limits", json=body)

    assert answer.status_code == 200
    assert answer.json()["terms"] == {
        "slo": {"ttft_seconds": 1.0, "tbt_seconds": 0.1, "gap_seconds": 2.0},
        "batch_slo": {"ttft_seconds": 3600.0, "tbt_seconds": 9.0, "gap_seconds": 0.0},
        "max_queue": 2,
        "pinned": False,
        "aliases": [],
    }
    box.ask("r", "org/tiny")
    assert box.daemon.machine.requests["r"].spec.slo.ttft_seconds == 1.0
    box.settle()
    tiny, other = load_config(path).models
    assert (other.max_queue, other.slo.ttft_seconds, other.batch_slo.tbt_seconds) == (2, 1, 9)
    assert tiny.max_queue == 1024
    assert await checked(client) == {"ok": True, "changes": [], "problems": []}
    assert written(admin_file).splitlines()[2:] == [
        "[[model]]",
        'name = "org/tiny"',
        'slo = {ttft = "1s", gap = "2s"}',
        'batch_slo = {tbt = "9s"}',
        "max_queue = 2",
    ]


async def test_changes_add_up(client: httpx.AsyncClient, path: Path) -> None:
    """A later one keeps what an earlier one said of the same model, and of others."""
    await client.put("/api/models/tiny/limits", json={"slo": {"ttft": "1s"}})
    await client.post("/api/models/org/tiny/pin")
    await client.put("/api/models/tiny/limits", json={"slo": {"tbt": "1s"}, "max_queue": 3})
    await client.post("/api/models/tiny/pin")
    unpinned = await client.post("/api/models/tiny/unpin")

    tiny, other = load_config(path).models

    assert unpinned.json()["terms"]["pinned"] is False
    assert (tiny.slo.ttft_seconds, tiny.slo.tbt_seconds, tiny.max_queue) == (1, 1, 3)
    assert (tiny.pin, other.pin) == (False, True)
    assert (await checked(client))["changes"] == []


async def test_comments_are_kept(client: httpx.AsyncClient, path: Path, admin_file: Path) -> None:
    """What an admin wrote between the tables of models stays when a model is changed."""
    text = '# ours\n[[model]]\nname = "tiny"\nmax_queue = 2 # enough for the printer\n'
    admin_file.parent.mkdir()
    write(admin_file, text)

    await client.put("/api/models/tiny/limits", json={"slo": {"ttft": "1s"}})
    await client.put("/api/models/org/tiny/limits", json={"max_queue": 7})

    assert written(admin_file).startswith(text + 'slo = {ttft = "1s"}\n')
    tiny, other = load_config(path).models
    assert (tiny.max_queue, tiny.slo.ttft_seconds, other.max_queue) == (2, 1, 7)


@pytest.mark.parametrize(
    ("target", "body", "status", "message"),
    [
        ("tiny/limits", {"slo": {"ttft": "soon"}}, 422, 'such as "10s"'),
        ("tiny/limits", {"slo": {"ttft": 'x" }\n[api]\nbind = "0.0.0.0:80'}}, 422, 'such as "10s"'),
        ("tiny/limits", {"max_queue": 0}, 400, "max_queue"),
        ("tiny/limits", {"queue": 1}, 400, "queue"),
        ("nobody/limits", {"max_queue": 1}, 404, "model 'nobody' does not exist"),
        ("tiny/limit", {"max_queue": 1}, 404, "ends with limits"),
    ],
)
async def test_what_cannot_be_used_changes_nothing(
    box: Box,
    client: httpx.AsyncClient,
    admin_file: Path,
    target: str,
    body: dict[str, Any],
    status: int,
    message: str,
) -> None:
    """It is refused by name, neither applied nor written."""
    before = box.daemon.model_activity("tiny")

    answer = await client.put(f"/api/models/{target}", json=body)

    assert (answer.status_code, message in answer.json()["error"]["message"]) == (status, True)
    assert box.daemon.model_activity("tiny") == before
    assert written(admin_file) == ""


async def test_a_pin_that_a_restart_would_refuse_is_refused(
    box: Box, client: httpx.AsyncClient, path: Path
) -> None:
    """The whole configuration with it is read before: here the host cache is too small."""
    edit(path, 'host_cache = "16MiB"', 'host_cache = "512KiB"')

    answer = await client.post("/api/models/tiny/pin")

    assert (answer.status_code, answer.json()["error"]["param"]) == (422, "devices.host_cache")
    assert not box.daemon.machine.models["tiny"].pinned


@pytest.mark.parametrize("what", ["foreign", "broken", "in the way"])
async def test_what_the_operator_wrote_is_not_overwritten(
    box: Box, client: httpx.AsyncClient, admin_file: Path, what: str
) -> None:
    """Nor is anything changed that cannot be written down."""
    if what == "in the way":
        write(admin_file.parent, "a file where the directory should be")
    else:
        admin_file.parent.mkdir()
        text = "[api]\nmax_queue = 5\n" if what == "foreign" else "api = ["
        write(admin_file, text)

    answer = await client.post("/api/models/tiny/pin")

    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "not_saved")
    assert str(admin_file) in answer.json()["error"]["message"]
    assert not box.daemon.machine.models["tiny"].pinned


async def test_without_a_configuration_nothing_lasts(box: Box) -> None:
    """A daemon that was made without a file has no endpoints for what would be written to it."""
    async with unserved(create_app(box.daemon)) as client:
        pin = await client.post("/api/models/tiny/pin")
        config = await client.get("/api/config")

    assert "ends with load, evict, drain or resume" in pin.json()["error"]["message"]
    assert (pin.status_code, config.status_code) == (404, 404)


# --- looking, comparing, reloading ---------------------------------------------------------------


async def test_the_configuration_in_force_is_shown(client: httpx.AsyncClient, path: Path) -> None:
    """As a file would have it, every key, with the files that it came from."""
    await client.put("/api/models/tiny/limits", json={"max_queue": 3})

    shown = (await client.get("/api/config")).json()

    assert shown["files"] == [str(path), str(directory(path) / ADMIN_FILE)]
    assert shown["config"]["devices"]["slab"] == "64KiB"
    assert shown["config"]["api"]["keep_alive"] == "5s"
    assert shown["config"]["policy"]["use"] == ["serverlessllm"]
    assert [model["max_queue"] for model in shown["config"]["model"]] == [3, 1024]
    assert shown["config"]["model"][0]["slo"] == {"ttft": "3s", "tbt": "30ms", "gap": "0s"}


async def test_differences_are_reported_with_what_they_need(
    client: httpx.AsyncClient, path: Path, fake_checkpoint: Make
) -> None:
    """Each key with both values; a model that is new or gone is told of once."""
    fake_checkpoint("more")
    edit(path, "max_queue = 100", 'max_queue = 5\nbind = "127.0.0.1:1"')
    edit(path, 'use = ["serverlessllm"]', 'use = ["aegaeon"]\n[policy.aegaeon]\nmax_group = 4')
    edit(path, 'ttft = "3s"', 'ttft = "4s"')
    edit(path, 'name = "org/tiny"\npath = "tiny"', 'name = "more"\npath = "more"\nmax_batch = 8')
    pooler = 'task = "embed"\npooler_config = { task = "token_embed" }'
    edit(path, 'name = "tiny"', f'name = "tiny"\nmax_logprobs = 50\n{pooler}')

    found = await checked(client)

    told = {row["key"]: (row["old"], row["new"], row["applies"]) for row in found["changes"]}
    assert told == {
        "api.bind": ("127.0.0.1:11500", "127.0.0.1:1", "restart"),
        "api.max_queue": (100, 5, "reload"),
        "policy.use": (["serverlessllm"], ["aegaeon"], "reload"),
        "policy.aegaeon.max_group": (None, 4, "reload"),
        "model.tiny.slo.ttft": ("3s", "4s", "reload"),
        "model.tiny.task": ("auto", "embed", "restart"),
        "model.tiny.max_logprobs": (20, 50, "restart"),
        "model.tiny.pooler_config.task": ("auto", "token_embed", "restart"),
        "model.org/tiny": (str(path.parent / "tiny"), None, "reload"),
        "model.more": (None, str(path.parent / "more"), "reload"),
    }


async def test_a_reload_applies_what_it_can(
    box: Box, client: httpx.AsyncClient, path: Path
) -> None:
    """At once, and says what waits for a restart; that still differs afterwards."""
    edit(path, "max_queue = 100", 'max_queue = 5\nprogress_deadline = "7s"\nmax_body = "1MiB"')
    edit(path, 'use = ["serverlessllm"]', 'use = ["aegaeon"]\nbudget = "20ms"')
    edit(path, 'ttft = "3s"', 'ttft = "4s"')

    answer = (await client.post("/api/config/reload")).json()

    assert [row["key"] for row in answer["restart"]] == ["api.max_body"]
    assert {row["key"] for row in answer["applied"]} == {
        "api.max_queue",
        "api.progress_deadline",
        "policy.use",
        "policy.budget",
        "model.tiny.slo.ttft",
    }
    limits = box.daemon.limits
    assert (limits.queue, limits.progress_seconds, limits.policy_seconds) == (5, 7, 0.02)
    assert (await box.daemon.policies()).active.use == ("aegaeon",)
    assert box.daemon.machine.models["tiny"].slo.ttft_seconds == 4
    assert [row["key"] for row in (await checked(client))["changes"]] == ["api.max_body"]
    again = (await client.post("/api/config/reload")).json()
    assert again["applied"] == []


async def test_policies_that_an_admin_chose_stay(
    box: Box, client: httpx.AsyncClient, path: Path
) -> None:
    """A reload follows the file only where the file changed."""
    await client.put("/api/policies", json={"use": ["aegaeon"]})
    edit(path, "max_queue = 100", "max_queue = 5")

    await client.post("/api/config/reload")

    assert (await box.daemon.policies()).active.use == ("aegaeon",)


async def test_the_autopilot_follows_the_file(
    box: Box, settings: LiveConfig, client: httpx.AsyncClient, path: Path
) -> None:
    """Its keys, too. What an operator chose holds it, until another [policy] is read."""

    async def autopilot() -> tuple[str, bool]:
        found = (await client.get("/api/policies")).json()["autopilot"]
        return found["mode"], found["held"]

    await client.put("/api/policies", json={"use": ["aegaeon"]})
    assert await autopilot() == ("off", True)
    edit(path, "max_queue = 100", "max_queue = 5")
    await client.post("/api/config/reload")
    assert await autopilot() == ("off", True)
    edit(path, "[policy]\n", '[policy]\nautopilot = "propose"\n')
    assert (await client.post("/api/config/reload")).status_code == 422  # there is no journal
    edit(path, "[api]\n", '[journal]\npath = "journal"\n\n[api]\n')
    answer = await client.post("/api/config/reload")
    applied = [row["key"] for row in answer.json()["applied"]]
    assert applied == ["policy.autopilot"]
    assert await autopilot() == ("propose", False)
    await box.daemon.autopilot.stop()


async def test_a_file_that_cannot_be_used_is_not_applied(
    box: Box, client: httpx.AsyncClient, path: Path
) -> None:
    """Not a single key of it; every problem is told with its line."""
    edit(path, "max_queue = 100", 'max_queue = 5\nbnd = "x"')

    answer = await client.post("/api/config/reload")
    found = await checked(client)

    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "config")
    assert answer.json()["error"]["param"] == "api.bnd"
    assert box.daemon.limits.queue == 100
    assert (found["ok"], found["changes"]) == (False, [])
    assert [(row["line"], row["key"]) for row in found["problems"]] == [(3, "api.bnd")]
    assert (await client.get("/api/config")).json()["config"]["api"]["max_queue"] == 100


async def test_a_machine_that_is_too_small_is_a_problem_of_the_file(
    client: httpx.AsyncClient, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reload says what a start would say."""
    monkeypatch.setattr(machine_memory, "read_memory", lambda: MachineMemory(8 << 20, 1 << 20))

    answer = await client.post("/api/config/reload")

    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "config")
    assert "are more than the 8MiB of memory of this machine" in answer.json()["error"]["message"]


async def test_leftovers_of_a_model_are_told_of(
    client: httpx.AsyncClient, path: Path, admin_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A row of a model that no file has any more is ignored by a reload, which logs it."""
    admin_file.parent.mkdir()
    write(admin_file, '[[model]]\nname = "gone"\nenabled = false\n')

    answer = await client.post("/api/config/reload")

    assert answer.json() == {"applied": [], "restart": []}
    assert f"{admin_file}:1: model gone: ignored" in caplog.text


async def test_policies_that_fail_to_load_keep_everything_as_it_was(
    box: Box, client: httpx.AsyncClient, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are first, and nothing follows them."""

    async def fail(choice: PolicyChoice) -> None:
        raise PolicyChoiceError([])

    edit(path, "max_queue = 100", "max_queue = 5")
    edit(path, 'use = ["serverlessllm"]', 'use = ["aegaeon"]')
    monkeypatch.setattr(box.daemon, "set_policy", fail)

    settings = LiveConfig(box.daemon, load_config(path), path)
    edit(path, 'use = ["aegaeon"]', 'use = ["serverlessllm"]')
    edit(path, "max_queue = 5", "max_queue = 6")
    before = box.daemon.limits
    with pytest.raises(PolicyChoiceError):
        await settings.reload()

    assert box.daemon.limits == before
    assert settings.in_force().config["policy"]["use"] == ("aegaeon",)  # type: ignore[index]


async def test_a_spoiled_file_does_not_hide_what_is_in_force(
    client: httpx.AsyncClient, path: Path
) -> None:
    """What was read is still known."""
    write(path, "api = [")

    shown = (await client.get("/api/config")).json()

    assert (shown["files"], shown["config"]["api"]["max_queue"]) == ([str(path)], 100)


# --- the log's level -----------------------------------------------------------------------------


async def test_the_log_has_a_level(client: httpx.AsyncClient, log_level: logging.Logger) -> None:
    """It is set until the daemon ends; a level that there is not is refused."""
    answer = await client.put("/api/log-level", json={"level": "debug"})
    refused = await client.put("/api/log-level", json={"level": "loud"})

    assert answer.json() == (await client.get("/api/log-level")).json() == {"level": "debug"}
    assert log_level.level == logging.DEBUG
    assert refused.status_code == 400


# --- on the command line -------------------------------------------------------------------------


async def test_limits_on_the_command_line(call: Call, admin_file: Path) -> None:
    """What was set is said; without options it is only said."""
    line = ["limit", "tiny", "--ttft", "5s", "--tbt", "100ms", "--batch-tbt", "4s", "--queue", "2"]
    changed, shown = await call(*line), await call("limit", "tiny")
    pinned, unpinned = await call("pin", "tiny"), await call("unpin", "tiny")
    wrong = await call("limit", "tiny", "--ttft", "soon")
    gaps = await call("limit", "tiny", "--gap", "1s", "--batch-gap", "8s")
    below = await call("limit", "tiny", "--gap", "50ms")

    assert changed.stdout == shown.stdout
    assert changed.stdout.splitlines() == [
        "interactive: first token 5 s, then 0.1 s each",
        "batch: first token 3600 s, then 4 s each",
        "at most 2 requests",
    ]
    assert (pinned.stdout, unpinned.stdout) == ("tiny is pinned\n", "tiny is not pinned\n")
    assert 'slo = {ttft = "5s", tbt = "100ms", gap = "1s"}' in written(admin_file)
    assert gaps.stdout.splitlines()[:2] == [
        "interactive: first token 5 s, then 0.1 s each, at most 1 s apart",
        "batch: first token 3600 s, then 4 s each, at most 8 s apart",
    ]
    assert below.exit_code != 0
    assert "slo.gap: 0.05 s are less than the 0.1 s between tokens; use 0.1s or more" in (
        below.stderr
    )
    assert wrong.exit_code == 2
    assert 'such as "10s"' in wrong.stderr


async def test_diff_and_reload_on_the_command_line(call: Call, path: Path) -> None:
    """What differs, what was applied, what waits; status 2 for files that cannot be used."""
    nothing = await call("config", "diff")
    edit(path, "max_queue = 100", 'max_queue = 5\nbind = "127.0.0.1:1"')
    differs, whole = await call("config", "diff"), await call("config", "diff", "--json")
    applied = await call("reload")
    edit(path, "max_queue = 5", "max_queue = 0")
    wrong, refused = await call("config", "diff"), await call("reload")

    assert (nothing.exit_code, nothing.stdout) == (0, "nothing differs\n")
    rows = [line.split() for line in differs.stdout.splitlines()]
    assert rows[1:] == [
        ["api.bind", "127.0.0.1:11500", "127.0.0.1:1", "restart"],
        ["api.max_queue", "100", "5", "reload"],
    ]
    assert len(json.loads(whole.stdout)["changes"]) == 2
    assert applied.stdout.startswith("1 applied, 1 wait for a restart\n")
    assert (wrong.exit_code, refused.exit_code) == (2, 2)
    assert wrong.stderr.startswith(f"{path}:2: api.max_queue: expected `int` >= 1")


async def test_the_log_s_level_on_the_command_line(call: Call, log_level: logging.Logger) -> None:
    """It is shown, or set."""
    log_level.setLevel("INFO")
    shown, changed = await call("log-level"), await call("log-level", "debug")

    assert (shown.stdout, changed.stdout) == ("info\n", "debug\n")
