"""`/api/timeline`: what instances computed in the last half hour, for an admin alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from appliance.access.auth import Access
from appliance.access.keys import Key, KeyFile, KeyRing, Scope, digest
from appliance.api.app import create_app
from appliance.observability.span_history import PAGE_SPANS
from appliance.observability.timeline import KEPT
from tests.unit.doubles.daemon import Box, setup_of, small
from tests.unit.doubles.serving import unserved

PATH = "/api/timeline"
Answer = dict[str, Any]


@pytest.fixture
async def box(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Box]:
    models = small("ab")
    box = Box(monkeypatch, models, setup_of(models, policy="serverlessllm"))
    box.start()
    yield box
    box.daemon.host.close()
    assert box.take_failures() == []


async def asked(box: Box, **query: object) -> httpx.Response:
    async with unserved(create_app(box.daemon)) as client:
        return await client.get(PATH, params={key: str(value) for key, value in query.items()})


async def test_it_goes_back_further_than_the_state(box: Box) -> None:
    """A state has the newest spans; of those before none is lost, and each has its requests."""
    for number in range(KEPT):
        box.ask(f"r{number}", "ab"[number % 2])
        box.settle()
    found: Answer = (await asked(box)).json()
    numbers = [span["number"] for span in found["spans"]]

    assert len(box.daemon.snapshot().spans) == KEPT < len(numbers)
    assert set(numbers) >= {span.number for span in box.daemon.snapshot().spans}
    assert numbers == sorted(set(numbers))
    prompts = [name for span in found["spans"] for name in span.get("prompts", ())]
    assert prompts == [f"r{number}" for number in range(KEPT)]
    assert (found["before"], found["kept_since_unix_seconds"]) == (None, None)


async def test_a_window(box: Box) -> None:
    """Only what went on in it."""
    box.ask("r", "a")
    box.settle()
    spans = (await asked(box)).json()["spans"]
    load = next(span for span in spans if span["kind"] == "load")
    window = {"since": load["began_unix_seconds"], "until": load["ended_unix_seconds"]}
    found = (await asked(box, **window)).json()["spans"]

    assert load in found
    assert all(span["ended_unix_seconds"] >= window["since"] for span in found)
    assert (await asked(box, since=load["ended_unix_seconds"] + 1000)).json()["spans"] == []


async def test_pages(box: Box) -> None:
    """The newest first; `before` leads to the one before."""
    number = 0
    while len(box.daemon.timeline(0.0, float("inf"), None).spans) < PAGE_SPANS // 2:
        box.ask(f"r{number}", "ab"[number % 2])
        box.settle()
        number += 1
    assert (await asked(box, before=0)).json()["spans"] == []
    whole = (await asked(box)).json()["spans"]
    part = (await asked(box, before=1)).json()["spans"]

    assert part == whole[: len(part)]
    assert 0 < len(part) < len(whole)


@pytest.mark.parametrize(
    ("name", "value"),
    [("since", "soon"), ("since", "nan"), ("until", "-1"), ("until", "1e400"), ("before", "x"),
     ("before", "-1"), ("before", "1" * 19), ("since", "")],
)  # fmt: skip
async def test_what_cannot_be_asked(box: Box, name: str, value: str) -> None:
    """The answer names the field, and says what it is."""
    answer = await asked(box, **{name: value})

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
    assert answer.json()["error"]["message"].startswith(f"{name} is ")


async def test_it_is_for_admins(box: Box, tmp_path: Path) -> None:
    """It names requests of all keys: a key of the scope `infer` sees nothing."""
    file = KeyFile(tmp_path / "keys.json")
    for name, scope in (("alice", Scope.INFER), ("root", Scope.ADMIN)):
        file.add(Key(name=name, sha256=digest(f"sk-{name}"), created_seconds=0.0, scopes=(scope,)))
    app = create_app(box.daemon, access=Access(KeyRing(file.path)))
    async with unserved(app) as client:
        assert (await client.get(PATH)).status_code == 401
        assert (await client.get(PATH, headers={"x-api-key": "sk-alice"})).status_code == 403
        assert (await client.get(PATH, headers={"x-api-key": "sk-root"})).status_code == 200
