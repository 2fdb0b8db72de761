"""Sessions that are written down and played again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.tui.bench import NOW, delta, lost, notice, state, tree
from tui.messages import DaemonRefused, Message
from tui.recording import NoRecording, NotRecorded, RecordingPlayer, RecordingWriter, read_recording

SESSION = [
    state(tree()),
    notice(2, "model_load_requested", NOW + 0.5, model="a"),
    delta({"models": {"a": {"load_requested": True}}}, NOW + 2),
    lost("gone", at=NOW + 2),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "session.jsonl"
    recorder = RecordingWriter(path)
    for message in SESSION:
        recorder.write(message)
    recorder.close()
    return path


def test_what_was_written_is_read(path: Path) -> None:
    """Every message as it was, and as lines for other programs."""
    assert list(read_recording(path)) == SESSION
    assert len(path.read_text().splitlines()) == 1 + len(SESSION)


def test_a_file_is_never_overwritten(path: Path) -> None:
    """A session that is there stays, and the error says which and what to do."""
    before = path.read_bytes()
    with pytest.raises(NotRecorded, match="--record makes a new file") as refused:
        RecordingWriter(path)

    assert str(path) in str(refused.value)
    assert path.read_bytes() == before


async def test_it_is_played_in_its_own_time(path: Path) -> None:
    """The waits between messages are those of the session; the clock is that of now."""
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    replay = RecordingPlayer(path, clock=lambda: 7.0, sleep=sleep)
    heard: list[Message] = [message async for message in replay.follow()]

    assert waits == [0.5, 1.5]
    assert heard == [message._replace(at=7.0) for message in SESSION]
    assert (replay.name, replay.live) == ("session.jsonl", False)
    with pytest.raises(DaemonRefused, match="recording"):
        await replay.ask("GET", "/api/models")
    with pytest.raises(DaemonRefused, match="recording"):
        await anext(replay.stream("/v1/chat/completions", {}))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not a session"),
        ('{"some": "json"}\n', "not a session"),
        ("\x7fELF", "not a session"),
        ('{"appliance_session":1}\n{"at": 1, "kind": "delta"}\n', "line 2"),
        ('{"appliance_session":1}\n{"at": 1, "kind": "what", "data": {}}\n', "line 2"),
    ],
)
def test_what_is_no_session_is_refused(tmp_path: Path, text: str, words: str) -> None:
    """By its name, and the line."""
    path = tmp_path / "what"
    path.write_text(text)

    with pytest.raises(NoRecording, match=words) as error:
        list(read_recording(path))
    assert str(path) in str(error.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    """Is said before anything is shown."""
    with pytest.raises(NoRecording, match="No such file"):
        RecordingPlayer(tmp_path / "nothing")
