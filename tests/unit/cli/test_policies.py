"""Policies over HTTP and on the command line, in front of a daemon over worker doubles."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner, Result

from appliance.api.app import create_app
from appliance.cli.main import cli
from appliance.service.autopilot import AutopilotMode, AutopilotTerms
from appliance.service.policy_report import PolicyChoice
from tests.unit.doubles.daemon import Box, setup_of, small
from tests.unit.doubles.serving import Call, commanded, unserved
from tests.unit.policies.strangers import install


@pytest.fixture
def box(monkeypatch: pytest.MonkeyPatch) -> Iterator[Box]:
    """A box under `serverlessllm`, with its worker up."""
    models = small("ab")
    box = Box(monkeypatch, models, setup_of(models, policy="serverlessllm"))
    yield box
    box.daemon.host.close()
    assert box.take_failures() == []


@pytest.fixture
async def client(box: Box) -> AsyncIterator[httpx.AsyncClient]:
    """A client without a network."""
    async with unserved(create_app(box.daemon)) as client:
        yield client


@pytest.fixture
async def call(box: Box) -> AsyncIterator[Call]:
    """Runs `appliance policy` against the daemon."""
    async with commanded(create_app(box.daemon), "policy") as call:
        yield call


def rows(result: Result) -> list[list[str]]:
    """The words of each line."""
    return [line.split() for line in result.stdout.splitlines()]


# --- over HTTP -----------------------------------------------------------------------------------


async def test_the_report_is_whole(client: httpx.AsyncClient) -> None:
    """What is installed, with its parameters; who decides; how each fares; what was before."""
    report = (await client.get("/api/policies")).json()

    (serverlessllm,) = [
        policy for policy in report["installed"] if policy["name"] == "serverlessllm"
    ]
    assert (
        serverlessllm["parameters"]["$defs"]["ServerlessLlm"]["properties"]["max_group"]["default"]
        == 64
    )
    assert report["active"] == {"use": ["serverlessllm"], "decisions": {}, "parameters": {}}
    assert report["decisions"]["round"] == ["serverlessllm", "built-in aegaeon"]
    assert report["decisions"]["flow"] == ["built-in aegaeon"]
    assert [state["name"] for state in report["policies"]] == ["serverlessllm", "built-in aegaeon"]
    assert report["previous"] == report["events"] == []


async def test_a_choice_is_put(client: httpx.AsyncClient) -> None:
    """The answer is the report afterwards; going back answers likewise, and at last there is no
    more to go back to."""
    choice = {
        "use": ["aegaeon"],
        "decisions": {"phase": "serverlessllm"},
        "parameters": {"aegaeon": {"q_max_seconds": 3}},
    }
    put = await client.put("/api/policies", json=choice)
    back = await client.post("/api/policies/rollback")
    further = await client.post("/api/policies/rollback")

    assert put.status_code == back.status_code == 200
    assert put.json()["active"] == choice
    assert put.json()["decisions"]["phase"] == ["serverlessllm", "aegaeon", "built-in aegaeon"]
    assert back.json()["active"]["use"] == ["serverlessllm"]
    assert (further.status_code, further.json()["error"]["code"]) == (409, "nothing_previous")


@pytest.mark.parametrize(
    ("body", "status", "param", "message"),
    [
        ({"use": ["lifo"]}, 422, "use", "no policy 'lifo' is installed"),
        (
            {"use": ["serverlessllm"], "decisions": {"rond": "serverlessllm"}},
            422,
            "decisions.rond",
            "mean round?",
        ),
        (
            {"use": ["serverlessllm"], "parameters": {"serverlessllm": {"max_grop": 1}}},
            422,
            "parameters.serverlessllm.max_grop",
            "mean max_group?",
        ),
        ({"use": "serverlessllm"}, 400, "use", "Expected `array`"),
        ({}, 400, "use", "required"),
        ({"use": ["serverlessllm"], "uses": 1}, 400, "uses", "not supported"),
        ({"use": ["serverlessllm"], "decisions": {"round": 1}}, 400, "decisions", "Expected `str`"),
    ],
)
async def test_what_is_wrong_with_a_choice_is_named(
    client: httpx.AsyncClient, body: dict[str, Any], status: int, param: str, message: str
) -> None:
    """400 for what is no choice, 422 for one that cannot be used; nothing changes."""
    answer = await client.put("/api/policies", json=body)

    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param)
    assert message in error["message"]
    assert (await client.get("/api/policies")).json()["events"] == []


async def test_a_body_that_is_no_json(client: httpx.AsyncClient) -> None:
    """That is told, too."""
    answer = await client.put("/api/policies", content=b"{")

    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")


async def test_enabling(client: httpx.AsyncClient) -> None:
    """Whoever decides can be enabled; nobody else."""
    good = await client.post("/api/policies/serverlessllm/enable")
    bad = await client.post("/api/policies/aegaeon/enable")

    assert good.json()["events"][0]["what"] == "enabled"
    assert (bad.status_code, bad.json()["error"]["code"]) == (404, "policy_not_active")


# --- on the command line -------------------------------------------------------------------------


async def test_list(call: Call) -> None:
    """A line for each installed policy, and whether it decides; as JSON with everything."""
    table = rows(await call("list"))
    whole = json.loads((await call("list", "--json")).stdout)

    assert table[0] == ["NAME", "DECIDES", "VERSION", "DISTRIBUTION", "ABOUT"]
    assert ["serverlessllm", "yes"] in [row[:2] for row in table]
    assert "yes" not in next(row for row in table if row[0] == "aegaeon")
    assert {"aegaeon", "serverlessllm"} <= {policy["name"] for policy in whole}


async def test_list_says_why_one_cannot_be_used(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place of what it is about."""
    monkeypatch.syspath_prepend(tmp_path)
    install(tmp_path, "odd", "", head="1 / 0\n")

    result = await call("list")

    assert "ZeroDivisionError" in next(
        line for line in result.stdout.splitlines() if line.startswith("odd ")
    )


async def test_set_show_and_rollback(call: Call, box: Box) -> None:
    """What is set is shown, with parameters and decisions; going back shows what was before."""
    done = await call(
        "set", "aegaeon", "--decision", "phase=serverlessllm", "--param", "aegaeon.q_max_seconds=3",
        "--param", "aegaeon.max_group=2",
    )  # fmt: skip
    shown = await call("show")
    whole = json.loads((await call("show", "--json")).stdout)

    assert done.exit_code == shown.exit_code == 0
    assert done.stdout == shown.stdout
    assert ["phase", "serverlessllm,", "aegaeon,", "built-in", "aegaeon"] in rows(shown)
    assert ["aegaeon.q_max_seconds", "3"] in rows(shown)
    assert ["aegaeon", "asked", "2", "0"] in rows(shown)
    (place,) = [row for row in rows(shown) if row[:2] == ["aegaeon", "place"]]
    assert place[2:4] == ["1", "0"]
    assert all(float(microseconds) >= 0 for microseconds in place[4:])
    assert len(place) == 8
    assert whole["active"]["parameters"] == {"aegaeon": {"q_max_seconds": 3, "max_group": 2}}
    assert "installed" not in whole
    assert [row[2:] for row in rows(shown)][-1] == ["chosen", "aegaeon;", "phase:", "serverlessllm"]

    back = await call("rollback")
    assert ["phase", "serverlessllm,", "built-in", "aegaeon"] in rows(back)
    again = await call("rollback")
    assert again.exit_code == 1
    assert "no earlier choice" in again.stderr


async def test_parameters_may_be_tables(
    call: Call, box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of a key with other characters is in quotation marks, as in the configuration."""
    monkeypatch.syspath_prepend(tmp_path)
    body = (
        "    shares: 'dict[str, int]' = {}\n    hours: 'dict[str, list[int]]' = {}\n"
        "    @hookimpl\n    def preempt(self):\n        return 0.0\n"
    )
    install(tmp_path, "fairish", body)

    done = await call(
        "set", "fairish", "--param", "fairish.shares.acme=3",
        "--param", 'fairish.shares."team@x.y"=2', "--param", "fairish.hours.night=[22, 6]",
    )  # fmt: skip

    assert done.exit_code == 0, done.stderr
    shown = json.loads((await call("show", "--json")).stdout)
    assert shown["active"]["parameters"] == {
        "fairish": {"shares": {"acme": 3, "team@x.y": 2}, "hours": {"night": [22, 6]}}
    }


async def test_a_policy_that_failed_is_shown_and_enabled(
    call: Call, box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state, its faults and why; it is asked again when it is enabled."""
    monkeypatch.syspath_prepend(tmp_path)
    body = "    @hookimpl\n    def place(self):\n        raise OSError('no cluster')\n"
    install(tmp_path, "clumsy", body)
    assert (await call("set", "clumsy", "serverlessllm")).exit_code == 0
    for _ in range(2):
        box.now += 10.0
        box.start()

    shown = await call("show")
    assert ["clumsy", "disabled", "3", "3"] in rows(shown)
    fault = next(row for row in rows(shown) if "fault" in row)
    assert fault[2:6] == ["fault", "x3", "clumsy", "place"]
    assert "no cluster" in shown.stdout

    enabled = await call("enable", "clumsy")
    assert ["clumsy", "asked", "3", "3"] in rows(enabled)
    assert (await call("enable", "aegaeon")).exit_code == 1


async def test_the_autopilot_is_shown(call: Call, box: Box) -> None:
    """What it may do, its budget, and what it did; not while it is off."""
    assert "autopilot" not in (await call("show")).stdout
    terms = AutopilotTerms(mode=AutopilotMode.PROPOSE)
    box.daemon.autopilot.configure(terms, PolicyChoice(use=("serverlessllm",)))
    box.now += 301.0
    box.daemon.autopilot.tick()

    shown = await call("show")
    assert (
        "autopilot: propose, waiting; CPU time charged in the last hour: 0 s of 360 s"
        in shown.stdout
    )
    found = next(row for row in rows(shown) if "failed" in row)
    assert found[2:7] == ["failed", "-", "-", "-", "-"]
    assert "no journal is written" in " ".join(found)
    held = await call("set", "aegaeon")
    assert "waiting; an operator chose policies, so it only proposes" in held.stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["set"], "Missing argument"),
        (["set", "lifo"], "no policy 'lifo' is installed"),
        (["set", "serverlessllm", "--decision", "round"], "'round' has no value"),
        (["set", "serverlessllm", "--decision", "=serverlessllm"], "has no value"),
        (["set", "serverlessllm", "--param", "max_group=3"], "'max_group' is not NAME.KEY"),
        (["set", "serverlessllm", "--param", "serverlessllm.max_group=few"], "Expected `int`"),
        (
            ["set", "serverlessllm", "--param", "a.b=1", "--param", "a.b.c=1"],
            "b has a value already",
        ),
        (["set", "serverlessllm", "--param", "a.b.c=1", "--param", "a.b=1"], "are set already"),
        (["set", "serverlessllm", "--param", "a.b c=1"], "'a.b c' is not NAME.KEY"),
        (
            ["set", "serverlessllm", "--param", "serverlessllm.max_grup=2"],
            "did you mean max_group?",
        ),
    ],
)
async def test_a_wrong_command_line_is_status_2(
    call: Call, box: Box, arguments: list[str], told: str
) -> None:
    """Whether it is seen here or there; nothing changes."""
    result = await call(*arguments)

    assert result.exit_code == 2
    assert told in result.stderr
    assert (await box.daemon.policies()).events == ()


def test_no_daemon_is_status_1() -> None:
    """With what to do about it."""
    result = CliRunner().invoke(cli, ["policy", "rollback", "--url", "http://127.0.0.1:9"])

    assert result.exit_code == 1
    assert "appliance serve" in result.stderr
