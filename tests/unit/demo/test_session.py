"""The recording of the demonstration: what was told from its start to its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from appliance.api.app import create_app
from appliance.demo.session import recorded
from tests.patience import PATIENCE_SECONDS
from tests.unit.doubles.daemon import Box, box_maker
from tests.unit.doubles.serving import served
from tui.messages import Kind, Message
from tui.recording import NotRecorded, RecordingWriter, read_recording
from tui.state import State


@pytest.fixture
async def box(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Box]:
    with box_maker(monkeypatch, slabs=20) as make_box:
        box = make_box()
        box.start()
        yield box


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


async def test_nothing_is_waited_for_when_all_was_received(
    box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon says nothing more then; patience is for what is still to come."""
    monkeypatch.setattr("appliance.demo.session.PATIENCE_SECONDS", 10 * PATIENCE_SECONDS)
    async with served(create_app(box.daemon)) as port, asyncio.timeout(PATIENCE_SECONDS):
        async with recorded(f"http://127.0.0.1:{port}", tmp_path / "session.jsonl") as session:
            pass
        box.daemon.feed.close()
    assert session.broken is None


async def test_a_recording_that_breaks(
    box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is recorded goes on, is not held up, and hears of it at the end."""

    def refuse(recorder: RecordingWriter, message: Message) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RecordingWriter, "write", refuse)
    monkeypatch.setattr("appliance.demo.session.PATIENCE_SECONDS", 10 * PATIENCE_SECONDS)
    async with served(create_app(box.daemon)) as port, asyncio.timeout(PATIENCE_SECONDS):
        async with recorded(f"http://127.0.0.1:{port}", tmp_path / "session.jsonl") as session:
            box.daemon.drain_model("a", True)
        box.daemon.feed.close()
    assert session.broken is not None
    assert "No space left on device" in session.broken


async def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    """It is an error before anything begins."""
    path = tmp_path / "session.jsonl"
    path.write_text("mine")
    with pytest.raises(NotRecorded):
        async with recorded("http://127.0.0.1:9", path):
            pytest.fail("it began")
    assert path.read_text() == "mine"
