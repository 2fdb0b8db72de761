"""Scenarios: what a file says becomes a setting, and what is wrong with it is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import fmean

import msgspec
import pytest

from appliance.errors import LabError
from appliance.lab.experiments import scenario
from appliance.lab.experiments.run import SAME_MECHANISM
from appliance.lab.experiments.scenario import (
    Arrivals,
    Deviates,
    FleetTable,
    GivenProfile,
    Hardware,
    ModelGroup,
    RatePhase,
    Scenario,
    ScenarioPolicy,
    SloTargets,
    SystemTable,
)
from appliance.lab.hardware import EFFICIENCY, profile
from appliance.lab.noise import EXACT, Deviation
from appliance.memory.ceilings.stored import (
    Ceilings,
    ChunkRates,
    DiskCeilings,
    GpuCeilings,
    MemoryCeilings,
    write_ceilings,
)
from appliance.vocabulary import RequestClass, Slo

ROOT = Path(__file__).parents[3]
SCENARIOS = ROOT / "benchmarks/scenarios"
TEXT = """
title = "Small"
duration = "100s"

[hardware]
gpu = "H800"
count = 4
host_cache = "1TiB"

[slo]
ttft = "10s"
tbt = "100ms"

[[models]]
count = 3
mix = ["Qwen2.5-7B", "Yi-9B"]
context = 4096

[arrivals]
rate = 0.5
lengths = "lengths.csv"
"""


def written(directory: Path, text: str = TEXT) -> Path:
    (directory / "lengths.csv").write_text(
        "prompt_tokens,output_tokens\n100,10\n300,30\n5000,5000\n"
    )
    path = directory / "small.toml"
    path.write_text(text)
    return path


def test_a_file_becomes_a_setting(tmp_path: Path) -> None:
    """Models of the mix in turn, the box of the hardware, requests until the end."""
    chosen = scenario.read(written(tmp_path))
    setting = chosen.setting(1, tmp_path)
    assert [model.name for model in setting.models] == ["m000", "m001", "m002"]
    assert [setting.profiles[m.name].name for m in setting.models] == [
        "Qwen2.5-7B",
        "Yi-9B",
        "Qwen2.5-7B",
    ]
    assert {model.slo for model in setting.models} == {Slo(ttft_seconds=10.0, tbt_seconds=0.1)}
    assert (setting.box.instances, setting.box.host_bytes) == (4, 1 << 40)
    assert (setting.seconds, setting.deviation, chosen.warmup_seconds) == (100.0, EXACT, 0.0)
    assert setting.informed
    assert len(setting.arrivals) == pytest.approx(150, abs=40)
    assert max(a.prompt_tokens + a.output_tokens for a in setting.arrivals) <= 4096
    times = [arrival.seconds for arrival in setting.arrivals]
    assert times == sorted(times)
    assert times[-1] < 100.0


def test_the_halves_of_a_promise_are_scaled_apart(tmp_path: Path) -> None:
    """Both scales and the common one multiply every promise, a model's own and that of batch."""
    changes = {
        "models.0.count": "1",
        "models.0.slo": '{ ttft = "2s", tbt = "50ms", gap = "600ms" }',
        "models.0.batch_backlog": "1",
        "slo.batch": '{ ttft = "60s", tbt = "1s" }',
        "slo.scale": "0.5",
        "slo.ttft_scale": "10",
        "slo.tbt_scale": "3",
    }
    setting = scenario.read(written(tmp_path), changes).setting(1, tmp_path)

    [model] = setting.models
    assert (model.slo.ttft_seconds, model.slo.tbt_seconds) == pytest.approx((10.0, 0.075))
    assert model.slo.gap_seconds == pytest.approx(0.3)
    [batch] = [arrival.slo for arrival in setting.arrivals if arrival.slo is not None]
    assert (batch.ttft_seconds, batch.tbt_seconds) == pytest.approx((300.0, 1.5))
    assert batch.gap_seconds == 0.0


def test_keys_can_be_changed(tmp_path: Path) -> None:
    """By dotted key, into tables that are there or not; words without quotes are strings."""
    changes = {
        "hardware.gpu": "A100",
        "hardware.pcie_gbps": "20",
        "hardware.efficiency": "0.5",
        "hardware.tp": "1",
        "hardware.gpus_per_root": "2",
        "hardware.root_gbps": "30",
        "models.0.count": "1",
        "models.0.rate": "1.5",
        "models.0.slo": '{ ttft = "2s", tbt = "50ms" }',
        "slo.scale": "0.5",
        "seeds": "[7, 8]",
        "policies.aegaeon.parameters.aegaeon.prefill_share": "0.2",
        "deviation.noise": "0.1",
        "deviation.learned": "true",
    }
    chosen = scenario.read(written(tmp_path), changes)
    setting = chosen.setting(7, tmp_path)
    [model] = setting.models
    assert model.slo == Slo(ttft_seconds=1.0, tbt_seconds=0.025)
    assert setting.profiles["m000"] == profile("Qwen2.5-7B", "A100").with_step_overhead(0.0003)
    assert setting.box.gpu.link_bytes_per_second == 10e9
    assert (setting.box.gpus_per_root, setting.box.root_bytes_per_second) == (2, 15e9)
    assert len(setting.arrivals) == pytest.approx(150, abs=40)
    assert chosen.seeds == (7, 8)
    assert chosen.contender("aegaeon").parameters == {"aegaeon": {"prefill_share": 0.2}}
    assert setting.deviation == Deviation(noise=0.1, seed=7)
    assert not setting.informed


def test_loads_are_relayed_if_the_scenario_says_so(tmp_path: Path) -> None:
    """Over the NVLink of the table, or another; copies reach the same share of it as of PCIe."""
    path = written(tmp_path)
    assert not scenario.read(path).hardware.box().relay
    box = scenario.read(path, {"hardware.relay": "true"}).hardware.box()
    assert (box.relay, box.gpus_per_host) == (True, 8)
    assert box.gpu.peer_bytes_per_second == 200e9 * box.gpu.efficiency
    other = {"hardware.relay": "true", "hardware.gpu": "A10", "hardware.nvlink_gbps": "100"}
    assert scenario.read(path, other).hardware.box().gpu.nvlink_bytes_per_second == 100e9


def test_what_is_not_computing_has_a_cost(tmp_path: Path) -> None:
    """Not none unless a scenario says so; the hosts' memory grows with them."""
    path = written(tmp_path)
    box = scenario.read(path).setting(1, tmp_path).box
    assert (box.gpu.map_seconds_per_slab, box.order_seconds) == (31.5e-6, 0.0013)
    assert box.host_bytes_per_second == 614.4e9
    nine = scenario.read(path, {"hardware.count": "9"}).hardware.box()
    assert nine.host_bytes_per_second == 2 * 614.4e9
    changes = {
        "hardware.map_seconds_per_slab": "0s",
        "hardware.order_seconds": "5ms",
        "hardware.step_overhead": "2ms",
        "hardware.host_gbps": "100",
    }
    setting = scenario.read(path, changes).setting(1, tmp_path)
    assert (setting.box.gpu.map_seconds_per_slab, setting.box.order_seconds) == (0.0, 0.005)
    assert setting.box.host_bytes_per_second == 100e9
    [slow, plain] = setting.profiles["m000"], profile("Qwen2.5-7B", "H800")
    for seconds, own in [
        (slow.step_seconds(8, 4000), plain.step_seconds(8, 4000)),
        (slow.prefill_seconds(500), plain.prefill_seconds(500)),
        (slow.mixed_step_seconds(8, 400, [(9, 0)]), plain.mixed_step_seconds(8, 400, [(9, 0)])),
    ]:
        assert seconds == pytest.approx(own + 0.002)


def test_hardware_may_be_what_was_measured(tmp_path: Path) -> None:
    """A file of `appliance doctor --ceilings` has the slowest GPU and disk; what is given counts
    before it, and the link's efficiency is in what was measured."""
    path = written(tmp_path)
    slow = MemoryCeilings(
        copied_bytes=1,
        chunks=(ChunkRates(chunk_bytes=1, into_pool=12e9, out_of_pool=11e9),),
        within_pool=1e12,
        slab_bytes=2 << 20,
        map_slab_seconds=12e-6,
        unmap_slab_seconds=8e-6,
    )
    fast = msgspec.structs.replace(
        slow, chunks=(ChunkRates(chunk_bytes=1, into_pool=50e9, out_of_pool=50e9),)
    )
    gpus = tuple(
        GpuCeilings(uuid=f"{n}", name="", driver="", at=0.0, version="", memory=memory)
        for n, memory in enumerate((fast, slow))
    )
    disks = tuple(
        DiskCeilings(folder=f"/{n}", at=0.0, version="", read=n * 1e9, read_bytes=1) for n in (3, 2)
    )
    file = tmp_path / "ceilings.json"
    write_ceilings(file, Ceilings(machine="any", gpus=gpus, disks=disks))
    use = {"hardware.ceilings": '"ceilings.json"'}

    box = scenario.read(path, use).hardware.box()

    assert box.gpu.link_bytes_per_second == 12e9
    assert box.gpu.disk_bytes_per_second == 2e9
    assert box.gpu.map_seconds_per_slab == pytest.approx(10e-6)
    given = scenario.read(path, {**use, "hardware.pcie_gbps": "32", "hardware.disk_gbps": "9"})
    assert given.hardware.box().gpu.link_bytes_per_second == 32e9 * EFFICIENCY
    assert given.hardware.box().gpu.disk_bytes_per_second == 9e9
    write_ceilings(file, Ceilings(machine="any"))
    with pytest.raises(LabError, match=r"hardware.ceilings: ceilings.json has no GPU; measure"):
        scenario.read(path, use)
    file.unlink()
    with pytest.raises(LabError, match=r"hardware.ceilings: there is no file"):
        scenario.read(path, use)


def test_a_policy_is_a_table_or_an_installed_one(tmp_path: Path) -> None:
    """Two tables may have the same policy with other parameters."""
    text = TEXT + (
        '[policies.few]\nuse = ["aegaeon"]\ndecisions = { evict = "static" }\n'
        "parameters.aegaeon = { prefill_share = 0.2 }\n"
    )
    chosen = scenario.read(written(tmp_path, text))
    assert chosen.contender("few").use == ("aegaeon",)
    assert chosen.contender("few").parameters == {"aegaeon": {"prefill_share": 0.2}}
    assert chosen.contender("few").decisions == {"evict": "static"}
    assert chosen.contender("other").use == ("other",)


def test_a_baseline_may_pay_for_its_own_switches(tmp_path: Path) -> None:
    """As published: that policy's instances stand still, and copy as fast as its system does; the
    estimates of the first switches say so."""
    text = TEXT + (
        '[policies."serverlessllm, as published"]\nuse = ["serverlessllm"]\n'
        'system = { activation = "2.5s", efficiency = 0.25, prefetch = false }\n'
        "[policies.aegaeon]\n"
    )
    chosen = scenario.read(written(tmp_path, text))
    theirs = chosen.contender("serverlessllm, as published")
    assert str(theirs.system) == "2.5s, 25% of the link, no prefetch"
    assert theirs.stack({}).asked()["prefetch"][0] == "serverlessllm"
    assert chosen.contender("aegaeon").system == SAME_MECHANISM
    setting = chosen.setting(1, tmp_path)
    weight_bytes = setting.profiles["m000"].weight_bytes
    box = theirs.system.box(setting.box)
    assert SAME_MECHANISM.box(setting.box) == setting.box
    assert (box.activation_seconds, box.gpu.link_bytes_per_second) == (2.5, 16e9)
    costs = replace(setting, box=box).costs()
    assert costs.switch_seconds("m000") == pytest.approx(2.5 + weight_bytes / 16e9)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"hardware.gpus": "3"}, r"small.toml:5: hardware: .*unknown field `gpus`"),
        ({"models.0.count": "0"}, r"small.toml:15: models\[0\].count: expected `int` >= 1"),
        ({"slo.ttft": "5"}, r"small.toml:11: slo.ttft: expected a duration"),
        ({"hardware.step_overhead": "1"}, r"hardware.step_overhead: expected a duration"),
        ({"hardware.order_seconds": '"-1ms"'}, r"hardware.order_seconds: expected a duration"),
        ({"hardware.map_seconds_per_slab": '"1"'}, r"hardware.map_seconds_per_slab: expected a"),
        ({"hardware.host_gbps": "0"}, r"hardware.host_gbps: expected `float` > 0"),
        ({"hardware.nvlink_gbps": "0"}, r"hardware.nvlink_gbps: expected `float` > 0"),
        ({"hardware.relay": "1"}, r"hardware.relay: expected `bool`"),
        ({"policies.aegaeon.share": "1"}, r"policies.*unknown field `share`"),
        ({"nothing": "1"}, r"the file: .*unknown field `nothing`"),
        ({"models.1.count": "1"}, r"--set models.1.count: there is no such key"),
        ({"models.x": "1"}, r"--set models.x: there is no such key"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(
    tmp_path: Path, changes: dict[str, str], what: str
) -> None:
    """With its line and key."""
    with pytest.raises(LabError, match=what):
        scenario.read(written(tmp_path), changes)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"hardware.gpu": "B42"}, "no GPU 'B42' is known"),
        ({"hardware.tp": "3"}, "4 GPUs are no instances of 3"),
        ({"hardware.gpus_per_root": "3", "hardware.tp": "2"}, "cut by roots of 3"),
        (
            {"hardware.gpu": "A10", "hardware.relay": "true"},
            "hardware.relay: the A10 has no NVLink to relay over; give hardware.nvlink_gbps, or",
        ),
        (
            {"slo.gap": '"99ms"'},
            r"slo.gap: 0.099 s are less than the 0.1 s between tokens; give slo.gap as much or",
        ),
        ({"warmup": '"100s"'}, "nothing is left of 100 s to measure"),
        ({"models.0.mix": '["GPT-9"]'}, "no profile of GPT-9 on H800"),
        ({"models.0.names": '["a", "a"]', "models.0.count": "2"}, "a name is there twice"),
        ({"models.0.names": '["a"]'}, "1 names for 3 models"),
        ({"arrivals.lengths": '"none.csv"'}, r"arrivals.lengths: there is no file .*none.csv"),
        ({"arrivals": "{ rate = 1.0 }"}, "give a trace, or a rate and lengths"),
        ({"arrivals.trace": '"trace.csv"'}, "not both"),
        (
            {"arrivals.phases": '[{ at = "9s", scale = 2 }, { at = "8s", scale = 1 }]'},
            "in the order of time",
        ),
        ({"arrivals": '{ trace = "trace.csv" }'}, "no model unheard-of in the scenario"),
    ],
)
def test_what_cannot_be_made_of_it_is_named(
    tmp_path: Path, changes: dict[str, str], what: str
) -> None:
    """What is not in a table, or not in a file."""
    path = written(tmp_path)
    (tmp_path / "trace.csv").write_text(
        "arrival_s,model,prompt_tokens,output_tokens\n1.0,unheard-of,5,5\n"
    )
    with pytest.raises(LabError, match=what):
        scenario.read(path, changes).setting(1, tmp_path)


def test_a_file_that_is_no_toml_is_an_error(tmp_path: Path) -> None:
    """And so is one that is not there."""
    with pytest.raises(LabError, match=r"small.toml"):
        scenario.read(written(tmp_path, "title ="))
    with pytest.raises(LabError, match=r"none.toml"):
        scenario.read(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("start", "shown"),
    [
        ("2026-11-27T21:55:00", (1795816500.0, 0)),
        ("2026-11-27T21:55:00+01:00", (1795812900.0, 3600)),
    ],
)
def test_a_scenario_says_what_time_it_is(
    tmp_path: Path, start: str, shown: tuple[float, int]
) -> None:
    """Without an offset it is UTC; without a start no clock is set."""
    found = scenario.read(written(tmp_path), {"start": start}).setting(1, tmp_path).start
    assert found is not None
    assert (found.unix_seconds, found.utc_offset_seconds) == shown
    assert scenario.read(written(tmp_path)).setting(1, tmp_path).start is None


def test_requests_have_keys_if_the_scenario_says_so(tmp_path: Path) -> None:
    """All of them, in shares."""
    path = written(tmp_path)
    keys = {"arrivals.keys": "{ acme = 3, beta = 1 }"}
    arrivals = scenario.read(path, keys).setting(1, tmp_path).arrivals
    assert {arrival.key for arrival in arrivals} == {"acme", "beta"}
    assert {a.key for a in scenario.read(path).setting(1, tmp_path).arrivals} == {""}


def test_a_trace_is_scaled_and_cut(tmp_path: Path) -> None:
    """Its classes have their own promises; what is after the end does not come."""
    path = written(tmp_path)
    (tmp_path / "trace.csv").write_text(
        "arrival_s,model,prompt_tokens,output_tokens,class\n"
        "20.0,m000,10,4,batch\n10.0,m001,20,8,\n300.0,m001,20,8,\n"
    )
    changes = {
        "arrivals": '{ trace = "trace.csv", rate_scale = 2, output_scale = 1.5, max_tokens = 9 }',
        "slo.batch": '{ ttft = "1h", tbt = "1s" }',
    }
    arrivals = scenario.read(path, changes).setting(1, tmp_path).arrivals
    assert [(a.seconds, a.model, a.prompt_tokens, a.output_tokens) for a in arrivals] == [
        (5.0, "m001", 20, 12),
        (10.0, "m000", 10, 6),
    ]
    assert {a.max_tokens for a in arrivals} == {9}
    assert [a.request_class for a in arrivals] == [RequestClass.INTERACTIVE, RequestClass.BATCH]
    assert [a.slo for a in arrivals] == [None, Slo(ttft_seconds=3600.0, tbt_seconds=1.0)]


def test_models_may_have_lengths_and_batch_work_of_their_own(tmp_path: Path) -> None:
    """Beside a rate of interactive requests, or without one; batch work has its own promise."""
    path = written(tmp_path)
    (tmp_path / "short.csv").write_text("prompt_tokens,output_tokens\n7,8\n")
    changes = {
        "models.0.lengths": '"short.csv"',
        "models.0.batch_rate": "0.2",
        "models.0.batch_backlog": "5",
        "models.0.batch_at": "50s",
        "slo.batch": '{ ttft = "1h", tbt = "1s" }',
    }
    arrivals = scenario.read(path, changes).setting(1, tmp_path).arrivals
    assert {(a.prompt_tokens, a.output_tokens) for a in arrivals} == {(7, 8)}
    assert [a.seconds for a in arrivals] == sorted(a.seconds for a in arrivals)
    batch = [a for a in arrivals if a.request_class is RequestClass.BATCH]
    assert {a.slo for a in batch} == {Slo(ttft_seconds=3600.0, tbt_seconds=1.0)}
    assert sum(a.seconds == 50.0 for a in batch) == 15
    assert len(batch) == pytest.approx(15 + 60, abs=25)
    plain = scenario.read(path, {"models.0.lengths": '"short.csv"'}).setting(1, tmp_path).arrivals
    assert [a for a in arrivals if a.request_class is RequestClass.INTERACTIVE] == plain
    alone = {"arrivals": '{ lengths = "short.csv" }', "models.0.batch_backlog": "2"}
    assert len(scenario.read(path, alone).setting(1, tmp_path).arrivals) == 6


def test_batch_work_may_come_with_a_trace(tmp_path: Path) -> None:
    """With lengths of its models; a trace says its own."""
    path = written(tmp_path)
    (tmp_path / "trace.csv").write_text(
        "arrival_s,model,prompt_tokens,output_tokens\n10.0,m001,20,8\n"
    )
    changes = {
        "arrivals": '{ trace = "trace.csv" }',
        "models.0.lengths": '"lengths.csv"',
        "models.0.batch_backlog": "2",
    }
    arrivals = scenario.read(path, changes).setting(1, tmp_path).arrivals
    assert [a.seconds for a in arrivals] == [0.0] * 6 + [10.0]


def test_a_profile_may_be_given(tmp_path: Path) -> None:
    """For a model that the built-in table does not have."""
    text = (
        TEXT
        + """
[[profiles]]
name = "GPT-9"
weight_bytes = 1000000
layers = 4
hidden = 8
kv_bytes_per_token = 100
prefill_base_seconds = 0.01
prefill_seconds_per_token = 0.001
prefill_seconds_per_token2 = 0
step_base_seconds = 0.01
step_seconds_per_kv_token = 0
step_seconds_per_sequence = 0.001
"""
    )
    chosen = scenario.read(written(tmp_path, text), {"models.0.mix": '["GPT-9"]'})
    found = chosen.setting(1, tmp_path).profiles["m002"]
    assert found.step_seconds(3, 100) == pytest.approx(0.013 + 0.0003)
    changes = {"models.0.mix": '["GPT-9"]', "hardware.tp": "2"}
    with pytest.raises(LabError, match="GPT-9 is of 1 GPUs, not 2"):
        scenario.read(written(tmp_path, text), changes).setting(1, tmp_path)


@pytest.mark.parametrize("path", sorted(SCENARIOS.glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_scenarios_can_be_played(path: Path) -> None:
    """Everything that they name is there."""
    chosen = scenario.read(path)
    setting = chosen.setting(chosen.seeds[0], path.parent)
    assert setting.arrivals
    assert chosen.policies


@pytest.mark.parametrize(
    ("name", "models", "rate", "prompt", "output"),
    [
        ("72x0.1", 72, 0.1, 714, 296),
        ("80x0.1", 80, 0.1, 714, 296),
        ("40x0.5", 40, 0.5, 714, 296),
        ("60x0.1_outputs_4", 60, 0.1, 257, 940),
        ("40x0.1_outputs_8", 40, 0.1, 257, 1880),
    ],
)
def test_the_reference_rows_are_what_they_say(
    name: str, models: int, rate: float, prompt: float, output: float
) -> None:
    """Models, rate and mean lengths; sixteen GPUs; six, two and two of ten."""
    path = SCENARIOS / f"reference_{name}.toml"
    setting = scenario.read(path).setting(1, path.parent)
    profiles = [setting.profiles[model.name].name for model in setting.models]
    assert profiles[:10] == ["Qwen2.5-7B"] * 6 + ["Yi-9B"] * 2 + ["Llama-2-13B"] * 2
    assert (len(profiles), setting.box.instances) == (models, 16)
    assert len(setting.arrivals) == pytest.approx(models * rate * 600, rel=0.05)
    assert fmean(a.prompt_tokens for a in setting.arrivals) == pytest.approx(prompt, rel=0.05)
    assert fmean(a.output_tokens for a in setting.arrivals) == pytest.approx(output, rel=0.05)


@pytest.mark.parametrize(
    "section",
    [
        *(Scenario, Hardware, SloTargets, ModelGroup, Arrivals, RatePhase),
        *(ScenarioPolicy, SystemTable, Deviates, FleetTable, GivenProfile),
    ],
)
def test_every_key_is_documented(section: type) -> None:
    """In docs/lab.md."""
    text = (ROOT / "docs/lab.md").read_text()
    text = text[text.index("| table | keys |") :]
    tables = {"hardware", "slo", "models", "arrivals", "policies", "deviation", "profiles", "fleet"}
    for field in msgspec.structs.fields(section):
        if field.encode_name in tables:
            assert f"[{field.encode_name}" in text
        else:
            assert f"`{field.encode_name}`" in text or f"{field.encode_name} " in text, field
