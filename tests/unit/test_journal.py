"""The journal: a run that was written can be read, and replayed to the same commands."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from appliance.errors import LedgerError, PolicyError
from appliance.journal import Entry, Journal, Setup, read, replay
from appliance.policies.loader import installed
from appliance.service.policy_report import PolicyChoice, PolicyChosen
from appliance.vocabulary import (
    Finish,
    FinishReason,
    InstanceUp,
    ModelSpec,
    PrefillDone,
    RequestCancelled,
    RequestClass,
    RunTurn,
)
from tests.unit.doubles.cluster import SLAB, SLO, ClusterDouble, shape
from tests.unit.doubles.instance import ModelDouble

MODELS = {name: ModelDouble(4, shape()) for name in "abc"}


def setup_of(policies: Sequence[str], parameters: dict[str, dict[str, object]]) -> Setup:
    """What `ClusterDouble` makes its machine of."""
    return Setup(
        models=tuple(
            ModelSpec(
                name=name,
                weight_bytes=model.weight_slabs * SLAB,
                max_context_tokens=256,
                max_batch=64,
                slo=SLO,
            )
            for name, model in MODELS.items()
        ),
        instances=2,
        host_bytes=200 * SLAB,
        slab_bytes=SLAB,
        policy=PolicyChoice(use=tuple(policies), parameters=parameters),
    )


def record(path: Path, policy: str = "aegaeon") -> None:
    """A run with everything in it, played under `policy`."""
    cluster = ClusterDouble(MODELS, policy=policy, instances=2)
    cluster.start()
    for index in range(12):
        cluster.ask(f"r{index}", "abc"[index % 3], prompt=10 + 20 * index, output=20)
        cluster.work(index % 2)
    cluster.cancel("r5")
    cluster.lose(1)
    cluster.start(1)
    cluster.quarantine(0)
    cluster.lose(0)
    cluster.ask("late", "a", output=20)
    cluster.release(0)
    cluster.start(0)
    cluster.settle()
    with Journal(path, setup_of([policy], {})) as journal:
        for now, event, commands in cluster.journal:
            journal.record(now, event, commands)


def record_swaps(path: Path) -> None:
    """A run in which each policy that ships decides for a while."""
    names = [one.name for one in installed() if one.shipped and not one.lab_only]
    cluster = ClusterDouble(MODELS, policy=names[-1], instances=2)
    cluster.start()
    for index in range(4 * len(names)):
        kind = RequestClass.BATCH if index % 5 == 3 else RequestClass.INTERACTIVE
        model = "abc"[index // 2 % 3]
        cluster.ask(f"r{index}", model, prompt=10 + 30 * (index % 8), output=20, kind=kind)
        cluster.work(index % 2)
        if index % 7 == 6:
            cluster.cancel(f"r{index - 3}")
        if index % 4 == 3:
            cluster.set_policy([names[index // 4]])
            cluster.work(0)
    cluster.settle()
    with Journal(path, setup_of([names[-1]], {})) as journal:
        for now, event, commands in cluster.journal:
            journal.record(now, event, commands)


def test_policies_may_change_meanwhile(tmp_path: Path) -> None:
    """A run in which every policy of ours decides for a while, over both classes of requests, with
    prompts in mixed turns and requests that are cancelled, is replayed to the same commands."""
    path = tmp_path / "journal"
    record_swaps(path)

    count, differences = replay(path)

    entries = list(read(path)[1])
    commands = [command for entry in entries for command in entry.commands]
    assert any(isinstance(command, RunTurn) and command.prompts for command in commands)
    assert sum(isinstance(entry.event, PolicyChosen) for entry in entries) >= 10
    assert (count, differences) == (len(entries), [])


@pytest.mark.parametrize("policy", ["serverlessllm", "aegaeon"])
def test_a_replay_gives_no_difference(tmp_path: Path, policy: str) -> None:
    """What was written, read back and handled by a fresh machine gives the same commands."""
    path = tmp_path / "journal"
    record(path, policy)

    count, differences = replay(path)

    assert count == len(path.read_bytes().splitlines()) - 1
    assert count > 100
    assert differences == []


def test_what_was_written_is_read(tmp_path: Path) -> None:
    """The first line is the setup, every other one an event with its time and commands."""
    path = tmp_path / "journal"
    setup = setup_of(["serverlessllm"], {"aegaeon": {"q_max_seconds": 2.5}})
    up = InstanceUp(instance=0, slabs=7)
    ended = Finish(request="r", reason=FinishReason.STOP)
    with Journal(path, setup) as journal:
        journal.record(0.1, up, [ended])
        journal.record(1 / 3, up, [])

    again, entries = read(path)

    assert again == setup
    assert list(entries) == [
        Entry(now=0.1, event=up, commands=[ended]),
        Entry(now=1 / 3, event=up, commands=[]),
    ]


def test_a_tampered_line_is_reported(tmp_path: Path) -> None:
    """A line with other commands than the machine gives is named by its number, with both."""
    path = tmp_path / "journal"
    record(path)
    lines = path.read_bytes().splitlines()
    index = next(index for index, line in enumerate(lines) if b'"RunTurn"' in line)
    entry = msgspec.json.decode(lines[index], type=Entry)
    lines[index] = msgspec.json.encode(msgspec.structs.replace(entry, commands=[]))
    path.write_bytes(b"\n".join(lines) + b"\n")

    _, differences = replay(path)

    assert [difference.line for difference in differences] == [index + 1]
    assert differences[0].recorded == []
    assert differences[0].replayed == entry.commands


def change_setup(path: Path, **changes: object) -> None:
    first, rest = path.read_bytes().split(b"\n", 1)
    setup = msgspec.structs.replace(msgspec.json.decode(first, type=Setup), **changes)
    path.write_bytes(msgspec.json.encode(setup) + b"\n" + rest)


@pytest.mark.parametrize(
    "choice",
    [
        PolicyChoice(use=("serverlessllm",)),
        PolicyChoice(use=("aegaeon",), decisions={"round": "serverlessllm"}),
        PolicyChoice(use=("aegaeon",), parameters={"aegaeon": {"max_group": 1}}),
    ],
)
def test_a_replay_under_another_setup_says_where_it_parts(
    tmp_path: Path, choice: PolicyChoice
) -> None:
    """Under another policy or other parameters the machine decides otherwise; the first line where
    it does is told even if what was recorded makes no sense to it later."""
    path = tmp_path / "journal"
    record(path)
    change_setup(path, policy=choice)

    _, differences = replay(path)

    first = differences[0]
    assert first.replayed != first.recorded
    assert all(difference.line >= first.line for difference in differences)


def test_a_setup_that_cannot_be_loaded(tmp_path: Path) -> None:
    """A run under a policy that is not installed here cannot be replayed."""
    path = tmp_path / "journal"
    record(path)
    change_setup(path, policy=PolicyChoice(use=("none such",)))

    with pytest.raises(PolicyError, match="none such"):
        replay(path)


def test_a_line_of_another_form_is_an_error(tmp_path: Path) -> None:
    """A line that is whole but says something else is not passed over."""
    path = tmp_path / "journal"
    record(path)
    path.write_bytes(path.read_bytes() + b"{}\n")

    with pytest.raises(msgspec.DecodeError):
        replay(path)


def test_a_killed_daemon_leaves_a_journal_that_can_be_read(tmp_path: Path) -> None:
    """A last line that was cut off is passed over; the run before it is replayed."""
    path = tmp_path / "journal"
    record(path)
    whole, _ = replay(path)
    path.write_bytes(path.read_bytes()[:-20])

    assert replay(path) == (whole - 1, [])


def test_the_journal_of_the_run_before_is_kept(tmp_path: Path) -> None:
    """A restart does not overwrite what is needed to understand the last run."""
    path = tmp_path / "journal"
    record(path)
    before = path.read_bytes()
    record(path)

    assert (tmp_path / "journal.previous").read_bytes() == before


def test_a_run_that_contradicts_itself_is_an_error(tmp_path: Path) -> None:
    """If the very machine that wrote the journal could not have gone on, nothing is explained by a
    difference, and the contradiction itself is told."""
    path = tmp_path / "journal"
    setup = setup_of(["aegaeon"], {})
    up = InstanceUp(instance=0, slabs=7)
    impossible = PrefillDone(instance=0, model="a", request="r", kv_slabs=8, seconds=0.1)
    with Journal(path, setup) as journal:
        journal.record(0.1, up, setup.machine().handle(up, 0.1))
        journal.record(0.2, impossible, [])

    with pytest.raises(LedgerError, match="need 8 slabs"):
        replay(path)


def test_a_journal_has_a_largest_size(tmp_path: Path) -> None:
    """What it has then can be read."""
    path = tmp_path / "journal"
    with Journal(path, setup_of(["appliance"], {}), max_bytes=4000) as journal:

        def record(events: int) -> None:
            for number in range(events):
                journal.record(number, RequestCancelled(request="r"), [])

        with pytest.raises(OSError, match=r"journal\.max_size"):
            record(500)
    assert path.stat().st_size <= 4000

    _, entries = read(path)
    times = [entry.now for entry in entries]
    assert times == list(range(len(times)))
    assert 5 <= len(times) < 500


def test_a_replay_expects_what_the_run_expected(tmp_path: Path) -> None:
    """How fast weights were thought to load is in the journal; older ones have the first guess."""
    setup = setup_of(["appliance"], {})
    measured = msgspec.structs.replace(setup, load_bytes_per_second=2.0 * SLAB)
    Journal(tmp_path / "run", measured).close()

    again, _ = read(tmp_path / "run")
    older = msgspec.json.decode(
        msgspec.json.encode(
            {
                key: value
                for key, value in msgspec.to_builtins(setup).items()
                if key != "load_bytes_per_second"
            }
        ),
        type=Setup,
    )

    assert again.machine().costs.switch_seconds("a") == 2.0
    assert older.machine().costs.switch_seconds("a") == 4 * SLAB / 5e9
