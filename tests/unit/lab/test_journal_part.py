"""The last seconds of a journal are read as they are in all of it, with the box of before."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.errors import LabError
from appliance.journal import Entry, Journal, Setup, read
from appliance.lab.replay.journal_part import LASTING, JournalPart, entries, last_part
from appliance.lab.replay.journal_workload import recording
from appliance.service.policy_report import PolicyChoice, PolicyChosen
from appliance.vocabulary import InstanceUp, RequestArrived, Ticked
from tests.unit.lab.test_journal_workload import write

SETUP = Setup(
    models=(), instances=1, host_bytes=0, slab_bytes=1, policy=PolicyChoice(use=("aegaeon",))
)


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run on two toy instances."""
    path = tmp_path_factory.mktemp("journal") / "journal"
    write(path)
    return path


@given(seconds=st.floats(0, 100))
def test_what_is_read_are_the_last_seconds(journal: Path, seconds: float) -> None:
    """Every line that is no older, in its order; and before them lines that say what there is."""
    everything = list(read(journal)[1])
    since = everything[-1].now - seconds
    late = [entry for entry in everything if entry.now >= since]
    lasting = [e for e in everything if e.now < since and isinstance(e.event, LASTING)]
    assert list(entries(journal, last_part(journal, seconds))) == [*lasting, *late]


def test_the_box_is_that_of_the_whole_journal(journal: Path) -> None:
    """Instances, models and sizes are known from lines before; requests are the late ones."""
    whole = recording(journal)
    late = recording(journal, part=last_part(journal, 40.0))
    assert late.happened.until == pytest.approx(40.0, abs=1.0)
    began = whole.happened.until - late.happened.until
    assert [a.model for a in late.setting.arrivals] == [
        a.model for a in whole.setting.arrivals if a.seconds >= began - 1e-9
    ]
    assert late.setting.models == whole.setting.models
    assert late.setting.box.slabs == whole.setting.box.slabs
    assert whole.link_known
    assert not late.link_known  # a load that begins before the part teaches nothing
    for name, profile in late.setting.profiles.items():
        assert profile.weight_bytes == whole.setting.profiles[name].weight_bytes


def test_a_prompt_may_have_come_before_the_part(tmp_path: Path) -> None:
    """It waited, and is computed in it, together with the load of its weights: how long it was is
    not known. Here as if two of three had."""
    whole, path = tmp_path / "whole", tmp_path / "journal"
    write(whole, policy="serverlessllm")
    setup, everything = read(whole)
    arrived = 0
    with Journal(path, setup) as writer:
        for entry in everything:
            event = entry.event
            if isinstance(event, RequestArrived):
                arrived += 1
                event = Ticked() if arrived % 3 else event
            writer.record(entry.now, event, list(entry.commands))
    found = recording(path)
    assert len(found.setting.arrivals) == arrived // 3
    assert found.setting.box.interference_seconds >= 0


def test_what_the_daemon_writes_meanwhile_is_not_read(journal: Path, tmp_path: Path) -> None:
    """Nor a last line that was cut off: so that two readings of a part are of the same lines."""
    lines = journal.read_bytes().splitlines(keepends=True)
    growing = tmp_path / "journal"
    growing.write_bytes(b"".join(lines[:300]) + lines[300][:20])
    part = last_part(growing, 10.0)
    before = list(entries(growing, part))
    growing.write_bytes(b"".join(lines))
    assert list(entries(growing, part)) == before


def test_policies_that_were_chosen_before(tmp_path: Path) -> None:
    """The last choice counts, however long ago it was."""
    path = tmp_path / "journal"
    chosen = PolicyChosen(choice=PolicyChoice(use=("qlm",)))
    with Journal(path, SETUP) as writer:
        writer.record(0.0, InstanceUp(instance=0, slabs=7), [])
        writer.record(1.0, chosen, [])
        for second in range(2, 1000):
            writer.record(float(second), Ticked(), [])
    found = list(entries(path, last_part(path, 3.0)))
    assert found[:2] == [
        Entry(now=0.0, event=InstanceUp(instance=0, slabs=7), commands=[]),
        Entry(now=1.0, event=chosen, commands=[]),
    ]
    assert [entry.now for entry in found[2:]] == [996.0, 997.0, 998.0, 999.0]


def test_journals_of_nothing(tmp_path: Path) -> None:
    """No line, one line, or one that is no journal's."""
    path = tmp_path / "journal"
    path.touch()
    assert last_part(path, 1.0) == JournalPart(0, 0)
    with Journal(path, SETUP):
        pass
    size = path.stat().st_size
    assert last_part(path, 1.0) == JournalPart(size, size)
    assert list(entries(path, JournalPart(size, size))) == []
    with pytest.raises(LabError, match="there are no requests"):
        recording(path, part=last_part(path, 1.0))
    path.write_text("{}\n[]\n")
    with pytest.raises(msgspec.DecodeError):
        last_part(path, 1.0)
