"""Journals that the lab wrote, of boxes with a wrong policy and with a right one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from appliance.errors import LabError, PolicyError
from appliance.lab.advice.advise import Advice, advise
from appliance.lab.advice.cpu_time import CpuMeter, OutOfCpuTime
from appliance.lab.advice.halving import OUT_OF_BUDGET
from appliance.lab.advice.roles import conflict
from appliance.lab.advice.window import (
    Score,
    current_choice,
    observed,
    replayed,
    value_of,
    window_of,
)
from appliance.lab.experiments.run import Contender
from appliance.lab.replay.journal_part import last_part
from appliance.lab.replay.journal_workload import recording
from appliance.service.policy_report import PolicyChoice, PolicyChosen
from tests.unit.lab import bench as lab_bench
from tests.unit.lab.test_journal_workload import write
from tests.unit.policies.strangers import install

pytestmark = pytest.mark.thorough


class StepMeter:
    """A clock on which everything that is limited takes a second; what may take less than `least`
    is stopped at once."""

    def __init__(self, least: float = 1.0) -> None:
        self.now = 0.0
        self._least = least
        self.stopped: list[float] = []
        """What may have taken so long."""

    def seconds(self) -> float:
        return self.now

    @contextmanager
    def limited(self, seconds: float) -> Iterator[None]:
        if seconds < self._least:
            self.stopped.append(seconds)
            raise OutOfCpuTime
        yield
        self.now += 1.0


def advice(journal: Path, seconds: float = 25.0, minutes: float = 10.0) -> Advice:
    return advise(journal, minutes, seconds, StepMeter())


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A journal of a box with two instances of different roles, where five models share both."""
    path = tmp_path_factory.mktemp("wrong") / "journal"
    write(path, policy="aegaeon", noise=0.2)
    return path


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of the same requests under our own policy."""
    path = tmp_path_factory.mktemp("right") / "journal"
    write(path, policy="appliance", noise=0.2)
    return path


@pytest.fixture(scope="module")
def advised(wrong: Path) -> Advice:
    """What is said of the wrong one."""
    return advice(wrong)


# --- the whole of it -----------------------------------------------------------------------------


def test_a_better_policy_is_advised(wrong: Path, advised: Advice) -> None:
    """One that keeps far more in the lab, by more than other requests would change that; and it is
    true: the lab itself, with the box as it was written, keeps more under it."""
    found = advised
    chosen = found.verdict.candidate
    assert found.current == PolicyChoice(use=("aegaeon",))
    assert chosen is not None
    assert chosen.choice.use in {("appliance",), ("muxserve",), ("prism",)}
    assert not chosen.changed
    assert found.verdict.gain > 0.5 > 0.2 > found.verdict.error
    really = write(wrong.parent / "then", policy=chosen.choice.use[0], noise=0.2)
    assert sum(life.outcome is not None for life in really.recorder.lives) == 120
    again = recording(wrong.parent / "then")
    kept = observed(again, window_of(again, 10.0))
    assert kept.value - found.observed.value > found.verdict.gain / 2


def test_what_is_to_be_tried_first_is_replayed(wrong: Path, advised: Advice) -> None:
    """Though it is the last one otherwise, which the CPU time does not suffice for."""
    never = next(row for row in advised.rows if row.dropped == OUT_OF_BUDGET and row.score is None)
    found = advise(wrong, 10.0, 25.0, StepMeter(), also=(never.candidate.choice,))
    (row,) = [row for row in found.rows if row.candidate == never.candidate]
    assert row.score is not None


def test_whole_requests_on_a_shared_box(tmp_path: Path) -> None:
    """Two instances are shared by five models, and a load takes two seconds: a policy that serves
    request by request is late, and one that switches between tokens is advised."""
    box = lab_bench.box(2)
    slow = replace(box, gpu=replace(box.gpu, pcie_bytes_per_second=4 * lab_bench.SLAB))
    write(tmp_path / "journal", policy="serverlessllm", noise=0.1, box=slow)
    # For `StepMeter` a short replay costs as much as a long one, so more is kept for the last rung.
    found = advice(tmp_path / "journal", seconds=60.0)
    assert found.verdict.candidate is not None
    assert found.verdict.candidate.choice.use in {("appliance",), ("muxserve",), ("prism",)}
    assert found.verdict.gain > found.verdict.error > 0.02


def test_a_good_policy_is_kept(right: Path) -> None:
    """Nothing is ahead by more than the error, and the reason says so."""
    found = advice(right)
    assert found.verdict.candidate is None
    assert found.verdict.reason.startswith("Keep what you have: ")
    assert found.rows[0].candidate.choice == PolicyChoice(use=("appliance",))
    assert found.observed.value > 0.9


def test_the_table_has_all_candidates(advised: Advice) -> None:
    """The current policy first, with no difference to itself; then those that were replayed
    longest; what was not tried says why."""
    found = advised
    first, *others = found.rows
    assert (first.candidate.name, first.difference, first.share) == ("aegaeon", 0.0, 1.0)
    assert first.score is not None
    assert len({str(row.candidate.choice) for row in found.rows}) == len(found.rows)
    assert [row.share for row in others] == sorted((row.share for row in others), reverse=True)
    for row in others:
        assert (row.score is None) == (row.replays == 0) == (row.share == 0.0)
        assert row.score is not None or row.dropped == "the CPU time was used up"
    assert [one.policy for one in found.unsuited] == ["serverlessllm_sjf"]
    assert found.cpu_seconds <= found.cpu_budget_seconds == 25.0
    assert msgspec.json.decode(msgspec.json.encode(found), type=dict)["requests"] == found.requests


def test_the_same_journal_makes_the_same_advice(wrong: Path, advised: Advice) -> None:
    """Where CPU time is counted the same."""
    assert msgspec.json.encode(advice(wrong)) == msgspec.json.encode(advised)


def test_a_policy_that_fails_is_given_up(
    wrong: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in the table, with the question that it could not answer; others are tried."""
    monkeypatch.syspath_prepend(str(tmp_path))
    body = "    @hookimpl\n    def round(self, instance):\n        raise ValueError('boo')\n"
    install(tmp_path, "a_stranger", body)
    found = advice(wrong)
    (row,) = [row for row in found.rows if row.candidate.name == "a_stranger"]
    assert row.score is None
    assert "it could not answer" in row.dropped
    assert "boo" in row.dropped
    assert found.verdict.candidate is not None


# --- what cannot be advised on -------------------------------------------------------------------


def rewritten(journal: Path, target: Path, change: dict[str, object]) -> Path:
    """The same journal with another first line."""
    first, _, rest = journal.read_bytes().partition(b"\n")
    target.write_bytes(json.dumps(json.loads(first) | change).encode() + b"\n" + rest)
    return target


def test_too_few_requests(wrong: Path, tmp_path: Path) -> None:
    """The option, how many there are, and what to do: more minutes, or a longer journal."""
    with pytest.raises(LabError, match=r"^--minutes: \d+ requests .*: give more than 0.2 minutes"):
        advice(wrong, minutes=0.2)
    write(tmp_path / "journal", until=20.0)
    with pytest.raises(LabError, match=r"^--minutes: .*: the journal is not longer. .*previous"):
        advice(tmp_path / "journal")


def test_recorded_with_another_policy(wrong: Path, tmp_path: Path) -> None:
    """Only what the last policy decided is compared with it; and it has to be the configured one,
    if there is one."""
    lines = wrong.read_bytes().splitlines(keepends=True)
    middle = len(lines) * 2 // 3
    now = json.loads(lines[middle])["now"]
    chosen = PolicyChosen(choice=PolicyChoice(use=("serverlessllm",)))
    event = {"now": now, "event": chosen, "commands": []}
    lines.insert(middle, msgspec.json.encode(event) + b"\n")
    changed = tmp_path / "journal"
    changed.write_bytes(b"".join(lines))
    assert current_choice(recording(changed)) == PolicyChoice(use=("serverlessllm",))
    with pytest.raises(LabError, match=r"was recorded with another policy .* Ask again when"):
        advice(changed)
    with pytest.raises(LabError, match=r"^policy: .*recorded with another policy \(aegaeon\)"):
        advise(wrong, 10.0, 40.0, StepMeter(), configured=PolicyChoice(use=("appliance",)))
    same = PolicyChoice(use=("aegaeon",))
    assert advise(wrong, 10.0, 8.0, StepMeter(), configured=same).current == same


@pytest.mark.parametrize(
    ("untimed", "what"),
    [
        ({"PrefillDone", "TurnEnded"}, r"0 prompts and 0 turns; .*record a new one"),
        ({"ModelLoaded"}, "no load of weights was timed"),
    ],
)
def test_nothing_to_calibrate_from(
    wrong: Path, tmp_path: Path, untimed: set[str], what: str
) -> None:
    """A journal without the times of prompts and turns, or of loads, says too little of the box."""
    old = tmp_path / "journal"
    lines = [json.loads(line) for line in wrong.read_bytes().splitlines()]
    for line in lines[1:]:
        if line["event"]["type"] in untimed:
            line["event"]["seconds"] = 0.0
    old.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(LabError, match=f"^--from: .*{what}"):
        advice(old)


def test_the_lab_reads_on_until_it_has_seen_a_load(right: Path, tmp_path: Path) -> None:
    """All loads that were timed are ten minutes old: more is read, and no more is replayed."""
    quiet = tmp_path / "journal"
    setup, *lines = [json.loads(line) for line in right.read_bytes().splitlines()]
    for line in lines:
        if line["now"] > 5:
            line["now"] += 600
            if line["event"]["type"] == "ModelLoaded":
                line["event"]["seconds"] = 0.0
    quiet.write_text("".join(json.dumps(line) + "\n" for line in [setup, *lines]))
    assert not recording(quiet, part=last_part(quiet, 90.0)).link_known
    found = advice(quiet, seconds=8.0, minutes=0.5)
    assert found.seconds == pytest.approx(30.0)
    assert found.rows[0].share == 1.0
    assert found.rows[0].replays in {1, 2, 3}
    assert found.rows[1].share == 1.0  # of the best other one
    assert found.rows[1].replays == found.rows[0].replays


def test_policies_that_are_not_installed(wrong: Path, tmp_path: Path) -> None:
    """The name is given; nothing can be compared with a policy that is not there."""
    gone = rewritten(wrong, tmp_path / "journal", {"policy": {"use": ["gone"]}})
    with pytest.raises(PolicyError, match="no policy 'gone' is installed"):
        advice(gone)


def test_what_is_no_journal(tmp_path: Path) -> None:
    """The file, what is wrong with it, and what is wanted."""
    (tmp_path / "journal").write_text("[]\n")
    with pytest.raises(LabError, match=r"^--from: .*journal: .*Give a journal that a daemon"):
        advice(tmp_path / "journal")


@pytest.mark.parametrize(
    ("seconds", "what"),
    [
        (0.5, "more CPU time than that to read it: give more"),
        (1.5, "more CPU time than that and its policies to be made: give more"),
        (3.5, "the current policy could not be replayed"),
    ],
)
def test_too_little_cpu_time(wrong: Path, seconds: float, what: str) -> None:
    """Whatever it did not suffice for."""
    with pytest.raises(LabError, match=r"^--cpu-seconds: ") as raised:
        advice(wrong, seconds)
    assert what in str(raised.value)


# --- parts ---------------------------------------------------------------------------------------


def test_a_window_has_a_warm_up(right: Path) -> None:
    """Before what is measured, of 30 seconds, or a quarter of a shorter journal; the last part of
    a window has one, too."""
    found = recording(right)
    end = found.happened.until
    whole, last = window_of(found, 10.0), window_of(found, 0.5)
    assert (whole.warm_from, whole.begin, whole.end) == (0.0, end / 4, end)
    assert last.seconds == pytest.approx(30.0)
    assert last.begin - last.warm_from == pytest.approx(end / 4)
    half = whole.last(0.5)
    assert (half.end, half.seconds) == (end, pytest.approx(whole.seconds / 2))
    assert half.begin - half.warm_from == pytest.approx(30.0)
    assert 0 < half.requests(found.setting) < whole.requests(found.setting) < 120


def test_a_replay_is_like_what_happened(right: Path) -> None:
    """The current policy is about as good in the lab as it was, over the same requests."""
    found = recording(right)
    window = window_of(found, 10.0)
    then = observed(found, window)
    again = replayed(found, window, Contender("appliance", ("appliance",)), seed=1)
    assert isinstance(again, Score)
    assert again.value == pytest.approx(then.value, abs=0.05)
    assert again.refused == then.refused == 0
    for one in (then, again):
        assert value_of(one.parts) == pytest.approx(one.value)
        assert sum(part.requests for part in one.parts) <= window.requests(found.setting)
        assert all(part.requests for part in one.parts)


def test_roles_that_leave_a_model_without_an_instance(wrong: Path) -> None:
    """Where models are on all instances every plan suits; where one is on the first instance only,
    a policy that has it compute prompts only does not."""
    setting = recording(wrong).setting
    split, mixed = PolicyChoice(use=("pd_disaggregated",)), PolicyChoice(use=("appliance",))
    everywhere = setting.models
    here = [
        replace(one, instances=frozenset({0})) if one.name == "a" else one for one in everywhere
    ]
    assert conflict(split, everywhere, setting.profiles, setting.box) == ""
    assert conflict(mixed, here, setting.profiles, setting.box) == ""
    assert conflict(split, here, setting.profiles, setting.box) == (
        "it splits instances by role, and no instance of a decodes it then"
    )


def work_for_ever() -> None:
    """As a policy might that never gives up."""
    while True:
        try:
            sum(range(1000))
        except Exception:
            continue


def test_what_takes_too_long_is_stopped() -> None:
    """Python code is interrupted once the process used so much more CPU time, even if it catches
    every `Exception`; what is quick is not."""
    meter = CpuMeter()
    with meter.limited(60.0):
        pass
    before = meter.seconds()
    with pytest.raises(OutOfCpuTime), meter.limited(0.2):
        work_for_ever()
    assert meter.seconds() - before >= 0.1
    with pytest.raises(OutOfCpuTime), meter.limited(0.0):
        pytest.fail("there is no time")


def test_an_end_that_was_lost_comes_again() -> None:
    """As in a finalizer, whose exceptions Python drops."""
    lost = False

    def work_on() -> None:
        nonlocal lost
        try:
            work_for_ever()
        except OutOfCpuTime:
            lost = True
        work_for_ever()

    with pytest.raises(OutOfCpuTime), CpuMeter().limited(0.05):
        work_on()
    assert lost


def test_no_timer_is_too_long() -> None:
    with CpuMeter().limited(float("inf")):
        pass
