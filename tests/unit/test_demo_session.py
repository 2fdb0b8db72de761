"""The recording of the demonstration: what was told from its start to its end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from appliance.api.app import create_app
from appliance.demo.session import recorded
from tests.unit.daemon_double import Box, setup_of, small
from tests.unit.serving import served
from tui.messages import Kind
from tui.recording import NotRecorded, read_recording
from tui.state import State


@pytest.fixture
async def box(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Box]:
    models = small("ab")
    box = Box(monkeypatch, models, setup_of(models))
    box.start()
    yield box
    box.daemon.host.close()
    assert box.take_failures() == []


async def test_all_of_it_is_recorded(box: Box, tmp_path: Path) -> None:
    """The state before it began, what changed last, and that in the end nothing is missing."""
    path = tmp_path / "session.jsonl"
    async with served(create_app(box.daemon)) as port:
        async with recorded(f"http://127.0.0.1:{port}", path):
            assert [message.kind for message in read_recording(path)] == [Kind.STATE]
            box.daemon.drain_model("a", True)
        box.daemon.feed.close()

    state = State()
    for message in read_recording(path):
        state.hear(message)
    assert state.rows("models")["a"]["draining"]
    assert [notice["kind"] for notice in state.notices] == ["model_changed"]
    assert state.lost is None


async def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    """It is an error before anything begins."""
    path = tmp_path / "session.jsonl"
    path.write_text("mine")
    with pytest.raises(NotRecorded):
        async with recorded("http://127.0.0.1:9", path):
            pytest.fail("it began")
    assert path.read_text() == "mine"
