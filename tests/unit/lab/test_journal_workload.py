"""Journals as workloads: requests, box and speed are those of the run that wrote them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from appliance.errors import LabError
from appliance.journal import Entry, Journal, Setup
from appliance.lab.experiments.metrics import measure
from appliance.lab.experiments.run import play
from appliance.lab.hardware import Box, ModelProfile
from appliance.lab.noise import Deviation
from appliance.lab.replay.journal_part import last_part
from appliance.lab.replay.journal_workload import recording
from appliance.lab.sim.simulator import SimulationRun, Start, simulate
from appliance.lab.workload import Arrival
from appliance.scheduling.machine import Machine
from appliance.service.policy_report import PolicyChoice
from appliance.vocabulary import Command, Event, ModelAdded, ModelSpec, TurnEnded
from tests.unit.lab import bench as lab_bench
from tests.unit.lab.bench import SLAB, SLO
from tests.unit.lab.test_simulator import MODELS, arrivals


class WritingMachine(Machine):
    """Writes a journal, as the daemon does."""

    journal: Journal
    drafted: int = 0
    """Tokens that were drafted in each turn, as the journal has it."""

    def handle(self, event: Event, now: float) -> list[Command]:
        commands = super().handle(event, now)
        if isinstance(event, TurnEnded):
            event = replace(event, drafted=self.drafted)
        self.journal.record(now, event, commands)
        return commands


def write(
    path: Path,
    until: float = 1e4,
    policy: str = "aegaeon",
    box: Box | None = None,
    noise: float = 0.0,
    drafted: int = 0,
    slow: Mapping[str, float] | None = None,
    start: Start | None = None,
    asked: Sequence[Arrival] | None = None,
) -> SimulationRun:
    """A journal of a run on two toy instances; `slow` models take so many times as long."""
    setup = Setup(
        models=tuple(
            ModelSpec(name=m, weight_bytes=4 * SLAB, max_context_tokens=400, max_batch=8, slo=SLO)
            for m in MODELS
        ),
        instances=2,
        host_bytes=400 * SLAB,
        slab_bytes=SLAB,
        policy=PolicyChoice(use=(policy,)),
    )
    plain = setup.machine()
    machine = WritingMachine(setup.models, 2, plain.host, setup.stack())
    machine.drafted = drafted
    with Journal(path, setup) as machine.journal:
        profiles = {name: slower(name, (slow or {}).get(name, 1.0)) for name in MODELS}
        return simulate(
            machine,
            lab_bench.box(2) if box is None else box,
            profiles,
            arrivals(120) if asked is None else asked,
            until,
            deviation=Deviation(noise=noise),
            start=start,
        )


def slower(name: str, times: float) -> ModelProfile:
    """A toy model that takes so many times as long to compute anything."""
    plain = lab_bench.profile(name)
    fields = [field for field in plain.__struct_fields__ if "_seconds" in field]
    return replace(plain, **{field: times * getattr(plain, field) for field in fields})


def beside(path: Path, seconds: Callable[[str, float], float] = lambda _, took: took) -> None:
    """Have the journal say how long prompts took only of those in turns that decode, too; of such
    turns `seconds` are said, of the model and those that it took."""
    setup, *lines = map(msgspec.json.decode, path.read_bytes().splitlines())
    running: dict[int, dict[str, Any]] = {}
    for line in lines:
        event = line["event"]
        if event["type"] in ("PrefillDone", "TurnEnded"):
            command = running[event["instance"]]
            if not command.get("requests"):
                event["seconds"] = 0.0
            elif command.get("prompts") and event["type"] == "TurnEnded":
                event["seconds"] = seconds(event["model"], event["seconds"])
        for command in line["commands"]:
            if command["type"] in ("RunPrefill", "RunTurn"):
                running[command["instance"]] = command
    path.write_bytes(b"\n".join(map(msgspec.json.encode, [setup, *lines])))


def test_a_journal_gives_requests_box_and_speed(tmp_path: Path) -> None:
    """All as they were: lengths, promises, slabs, links, and the times of prompts and steps."""
    run = write(tmp_path / "journal")
    found = recording(tmp_path / "journal")
    first = run.recorder.lives[0].arrived
    lives = run.recorder.lives
    assert [
        (a.seconds, a.model, a.prompt_tokens, a.output_tokens, a.max_tokens, a.slo)
        for a in found.setting.arrivals
    ] == [
        (
            pytest.approx(life.arrived - first),
            life.model,
            life.prompt_tokens,
            life.output_tokens,
            life.max_tokens,
            life.slo,
        )
        for life in lives
    ]
    box = found.setting.box
    assert (box.instances, box.slabs, box.slab_bytes, box.tp) == (2, 32, SLAB, 1)
    assert box.gpu.link_bytes_per_second == pytest.approx(4 * SLAB)
    truth = lab_bench.profile()
    for profile in found.setting.profiles.values():
        assert profile.weight_bytes == 4 * SLAB
        assert profile.kv_shape(SLAB, 4) == truth.kv_shape(SLAB, 4)
        assert profile.prefill_seconds(100) == pytest.approx(truth.prefill_seconds(100), rel=0.02)
        assert profile.step_seconds(4, 300) == pytest.approx(truth.step_seconds(4, 300), rel=1e-3)


def test_a_journal_says_what_time_it_was(tmp_path: Path) -> None:
    """At its first request, which is when a replay begins; also if only its end is read."""
    path = tmp_path / "journal"
    run = write(path, start=Start(unix_seconds=1e9, utc_offset_seconds=3600))
    first = run.recorder.lives[0].arrived
    start = recording(path).setting.start
    assert start is not None
    assert start.unix_seconds == pytest.approx(1e9 + first)
    assert start.utc_offset_seconds == 3600
    late = recording(path, part=last_part(path, 40.0)).setting
    assert late.start is not None
    assert late.start.unix_seconds > 1e9 + first + 10.0
    write(path)
    assert recording(path).setting.start is None


def test_its_own_policy_does_in_the_lab_what_it_did(tmp_path: Path) -> None:
    """Requests are as late as they were; what happened is measured like a run."""
    run = write(tmp_path / "journal")
    found = recording(tmp_path / "journal")
    then, again = measure(found.happened), measure(play(found.setting, found.contender).run)
    truth = measure(run)
    assert (then.requests, then.finished, then.tokens) == (120, 120, truth.tokens)
    assert then.ttft_p50_seconds == pytest.approx(truth.ttft_p50_seconds)
    assert then.switches == pytest.approx(truth.switches, rel=0.1)
    # A journal does not say how long a cold prompt waited for its weights.
    busy = truth.busy_share * run.until
    assert then.busy_share * found.happened.until == pytest.approx(busy, rel=0.1)
    # The day is over when it was; somebody may be a little late.
    assert again.finished >= 117
    assert again.tokens == pytest.approx(truth.tokens, rel=0.03)
    assert again.ttft_p50_seconds == pytest.approx(truth.ttft_p50_seconds, rel=0.15)


def test_what_is_neither_computed_nor_copied_is_found(tmp_path: Path) -> None:
    """What orders take on their way, and the rate of loads. Here no turn tells what mapping takes:
    it is part of what prompts are late."""
    truth = lab_bench.box(2)
    truth = replace(truth, order_seconds=0.02, gpu=replace(truth.gpu, mapping_seconds=0.1))
    write(tmp_path / "journal", box=truth, policy="serverlessllm")
    found = recording(tmp_path / "journal").setting
    assert found.box.order_seconds == pytest.approx(0.02, rel=0.01)
    assert found.box.gpu.link_bytes_per_second == pytest.approx(4 * SLAB, rel=0.01)
    assert found.box.gpu.mapping_seconds == 0.0
    assert 0.1 < found.box.interference_seconds < 0.15
    assert not found.informed
    assert found.deviation.noise < 0.05


def test_noise_does_not_make_anything_faster(tmp_path: Path) -> None:
    """Where the same work takes longer or shorter, what is learned takes as long in all."""
    write(tmp_path / "journal", noise=0.5)
    found = recording(tmp_path / "journal")
    assert found.setting.deviation.noise == pytest.approx(0.5, rel=0.25)
    for name, profile in found.setting.profiles.items():
        rows = [row for row in found.measured[name].prompts if row[1] == row[0] ** 2]  # alone
        was = sum(seconds for _, _, _, seconds in rows)
        assert len(rows) > 10
        assert sum(profile.prefill_seconds(int(row[0])) for row in rows) == pytest.approx(was)


def test_turns_with_drafts_teach_nothing(tmp_path: Path) -> None:
    """The lab has no drafts, so what their steps take is not what its steps do."""
    write(tmp_path / "journal", drafted=3)
    found = recording(tmp_path / "journal").measured.values()
    assert not any(rows.steps for rows in found)
    assert any(rows.prompts for rows in found)


def test_only_what_was_seen_in_time_teaches(tmp_path: Path) -> None:
    """Times are learned from a part of a day; its requests are all there."""
    run = write(tmp_path / "journal")
    whole = recording(tmp_path / "journal")
    half = whole.happened.until / 2
    early = recording(tmp_path / "journal", lambda seconds: seconds < half)
    late = recording(tmp_path / "journal", lambda seconds: seconds >= half)
    nothing = recording(tmp_path / "journal", lambda seconds: False)
    count = {
        what: sum(len(rows.steps) for rows in found.measured.values())
        for what, found in (
            ("whole", whole),
            ("early", early),
            ("late", late),
            ("nothing", nothing),
        )
    }
    assert 0 == count["nothing"] < count["early"] < count["whole"]
    assert count["late"] == count["whole"] - count["early"]
    assert early.setting.arrivals == whole.setting.arrivals
    assert len(early.setting.arrivals) == len(run.recorder.lives)
    assert nothing.setting.box.order_seconds == nothing.setting.box.gpu.mapping_seconds == 0.0


def test_a_journal_that_breaks_off_is_replayed_as_far_as_it_goes(tmp_path: Path) -> None:
    """Answers that had not ended have a likely length, the same in what happened and in what is
    replayed: longer than what they had got, and for those that waited, too."""
    write(tmp_path / "journal", until=20.0)
    found = recording(tmp_path / "journal")
    lives = found.happened.recorder.lives
    assert [a.output_tokens for a in found.setting.arrivals] == [x.output_tokens for x in lives]
    ended = [life.produced for life in lives if life.outcome is not None]
    unended = [life for life in lives if life.outcome is None]
    assert min(life.produced for life in unended) == 0
    assert len(ended) > 10
    for life in unended:
        assert life.produced < life.output_tokens <= max(ended)
        assert life.output_tokens > sum(ended) / len(ended)  # those that ended are the short ones
    assert play(found.setting, found.contender).run.recorder.lives


def test_a_refused_request_has_a_likely_length(tmp_path: Path) -> None:
    """Another policy may answer it, and that takes as long as other answers."""
    write(tmp_path / "journal")
    before = recording(tmp_path / "journal").setting.arrivals
    setup, *lines = map(msgspec.json.decode, (tmp_path / "journal").read_bytes().splitlines())
    first = next(x for x in lines if x["event"]["type"] == "RequestArrived")["event"]["request"]
    for line in lines:
        line["commands"] = [
            {"type": "Reject", "request": first["id"], "code": "overloaded", "message": "no"}
            if command["type"] == "Finish" and command["request"] == first["id"]
            else command
            for command in line["commands"]
        ]
        if line["event"]["type"] == "TokensProduced":
            tokens = line["event"]["tokens"]
            line["event"]["tokens"] = [x for x in tokens if x["request"] != first["id"]]
    (tmp_path / "journal").write_bytes(b"\n".join(map(msgspec.json.encode, [setup, *lines])))
    refused, *others = recording(tmp_path / "journal").setting.arrivals
    assert others == list(before[1:])
    same = [one.output_tokens for one in others if one.model == refused.model]
    assert refused.output_tokens == round(sum(same) / len(same))


def test_a_prompt_that_was_embedded_is_one_with_a_token(tmp_path: Path) -> None:
    """It takes as long in the lab: that of its prompt."""
    run = write(tmp_path / "journal")
    setup, *lines = map(msgspec.json.decode, (tmp_path / "journal").read_bytes().splitlines())
    embedded = {life.id for life in run.recorder.lives[::3]}
    seen: set[str] = set()
    for line in lines:
        event = line["event"]
        if event["type"] == "RequestArrived" and event["request"]["id"] in embedded:
            event["request"]["max_tokens"] = 0
        if event["type"] == "TokensProduced":
            kept = [token for token in event["tokens"] if token["request"] not in seen]
            for token in kept:
                if token["request"] in embedded:
                    token |= {"count": 0, "finished": "stop"}
                    seen.add(token["request"])
            event["tokens"] = kept
    (tmp_path / "journal").write_bytes(b"\n".join(map(msgspec.json.encode, [setup, *lines])))
    found = recording(tmp_path / "journal")
    asked = found.setting.arrivals
    assert [(a.output_tokens, a.max_tokens) for a in asked[::3]] == [(1, 1)] * len(embedded)
    assert [a.output_tokens for a in asked[1::3]] == [x.produced for x in run.recorder.lives[1::3]]
    again = play(found.setting, found.contender).run.recorder.lives
    assert sum(life.outcome is not None for life in again) >= len(asked) - 3


def test_a_file_without_requests_is_an_error(tmp_path: Path) -> None:
    """Or one that is no journal."""
    write(tmp_path / "journal")
    first = (tmp_path / "journal").read_bytes().splitlines()[0]
    (tmp_path / "empty").write_bytes(first + b"\n")
    (tmp_path / "other").write_bytes(msgspec.json.encode({"a": 1}) + b"\n")
    with pytest.raises(LabError, match="there are no requests in it"):
        recording(tmp_path / "empty")
    with pytest.raises(LabError, match="other: "):
        recording(tmp_path / "other")


def test_models_that_were_added_are_there(tmp_path: Path) -> None:
    """They are served like those that there were at the start."""
    path = tmp_path / "journal"
    write(path)
    before = recording(path).setting
    head, *lines = path.read_bytes().splitlines()
    setup = msgspec.json.decode(head, type=Setup)
    *first, last = setup.models
    added = Entry(0.0, ModelAdded(model=last, kv_floor_slabs=0), [])
    head, line = (
        msgspec.json.encode(replace(setup, models=tuple(first))),
        msgspec.json.encode(added),
    )
    path.write_bytes(b"".join(one + b"\n" for one in [head, line, *lines]))

    after = recording(path).setting

    assert [model.name for model in after.models] == [model.name for model in before.models]
    assert len(after.arrivals) == len(before.arrivals)


def test_what_was_live_at_a_time_is_carried_over(tmp_path: Path) -> None:
    """As requests that came when they did: what each had got is part of its prompt, and the rest,
    in all as many tokens as before, is still to come, each when it was due."""
    run = write(tmp_path / "journal")
    found = recording(tmp_path / "journal")
    began = run.recorder.lives[0].arrived
    middle = run.recorder.lives[60].arrived - began
    live = [
        life
        for life in found.happened.recorder.lives
        if life.arrived < middle and life.ended is not None and life.ended > middle
    ]
    carried = found.carried(middle)
    assert len(carried) == len(live) > 1
    for one, life in zip(carried, live, strict=True):
        had = one.prompt_tokens - life.prompt_tokens
        due = life.slo.ttft_seconds + had * life.slo.tbt_seconds
        assert (one.seconds, one.model) == (life.arrived, life.model)
        assert one.slo == replace(life.slo, ttft_seconds=due)
        whole = life.prompt_tokens + life.output_tokens
        assert one.prompt_tokens + one.output_tokens == whole
        assert one.prompt_tokens >= life.prompt_tokens
    assert any(
        one.prompt_tokens > life.prompt_tokens for one, life in zip(carried, live, strict=True)
    )
    assert found.carried(found.happened.until + 1) == []


def test_prompts_that_are_only_computed_beside_decoding_have_times_too(tmp_path: Path) -> None:
    """Under a policy that never computes a prompt alone, from what turns take longer with them."""
    write(tmp_path / "journal", policy="appliance")
    found = recording(tmp_path / "journal")
    alone = sum(len(rows.prompts) for rows in found.measured.values())
    assert found.prompts > alone


MEAN_TOKENS = 60
"""Of the prompts in these journals."""


@pytest.mark.parametrize("times", [1.0, 6.0, 1 / 6])
def test_prompts_that_are_never_computed_alone_have_times_too(tmp_path: Path, times: float) -> None:
    """Those of a model of which no such turn is known are as many times slower as its steps."""
    write(tmp_path / "journal", policy="appliance", slow={"a": times})
    beside(tmp_path / "journal", lambda model, took: 0.0 if model == "a" else took)
    found = recording(tmp_path / "journal")
    assert not any(rows.prompts for rows in found.measured.values())
    for name, profile in found.setting.profiles.items():
        truth = slower(name, times if name == "a" else 1.0)
        assert profile.step_seconds(4, 300) == pytest.approx(truth.step_seconds(4, 300), rel=0.02)
        expected = pytest.approx(truth.prefill_seconds(MEAN_TOKENS), rel=0.4)
        assert profile.prefill_seconds(MEAN_TOKENS) == expected


def test_prompts_that_all_find_their_weights_away_have_times_too(tmp_path: Path) -> None:
    """As long as they took, which is no longer than a load more than the truth."""
    models = [MODELS[number % len(MODELS)] for number in range(30)]
    asked = [
        Arrival(seconds=10.0 * (1 + n), model=model, prompt_tokens=60 + n, output_tokens=5)
        for n, model in enumerate(models)
    ]
    write(tmp_path / "journal", box=lab_bench.box(2, slabs=12), asked=asked)
    found = recording(tmp_path / "journal")
    assert found.prompts == len(asked)
    for name, profile in found.setting.profiles.items():
        truth = lab_bench.profile(name).prefill_seconds(75)
        load = 4 * SLAB / found.setting.box.gpu.link_bytes_per_second
        assert truth <= profile.prefill_seconds(75) <= truth + 1.1 * load


def test_a_turn_in_which_the_machine_stood_still_teaches_nothing(tmp_path: Path) -> None:
    """Though it computed a prompt."""
    write(tmp_path / "journal", policy="appliance")
    still = iter([600.0])
    beside(tmp_path / "journal", lambda _, took: next(still, took))
    truth = lab_bench.profile().prefill_seconds(MEAN_TOKENS)
    for profile in recording(tmp_path / "journal").setting.profiles.values():
        assert profile.prefill_seconds(MEAN_TOKENS) == pytest.approx(truth, rel=0.4)


def test_prompts_do_not_cost_nothing(tmp_path: Path) -> None:
    """If turns took no longer with them, how long they take is as unknown as without such turns."""
    profiles = []
    for took in (1e-6, 0.0):
        write(tmp_path / "journal", policy="appliance")
        beside(tmp_path / "journal", lambda *_, took=took: took)
        profiles.append(recording(tmp_path / "journal").setting.profiles)
    assert profiles[0] == profiles[1]
    for one in profiles[0].values():
        assert one.prefill_seconds(2 * MEAN_TOKENS) > one.prefill_seconds(MEAN_TOKENS) > 0
