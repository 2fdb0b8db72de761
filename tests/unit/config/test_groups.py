"""Groups of instances in a configuration, and which models they may serve."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.config.checks import warnings
from appliance.config.groups import InstancePlan, devices_of, instances_of, plan_instances
from appliance.config.loader import load_config
from appliance.config.schema import Config, DeviceGroup, Devices
from appliance.config.sizing import kv_floor_slabs, read_model, uncached
from appliance.daemon.served_model import served_model
from appliance.errors import ConfigError, Problem
from appliance.policies.stack import PolicyStack
from appliance.units import Memory
from appliance.vocabulary import BuildModel, FinishReason, RunPrefill, RunTurn
from tests.unit.doubles.cluster import ClusterDouble, shape
from tests.unit.doubles.instance import ModelDouble
from tests.unit.doubles.pretend_nvml import install
from tests.unit.scheduling.machine.test_groups import SHIPPED

GIB = 1 << 30

Make = Callable[..., Path]

DEVICES = """\
[devices]
kind = "cpu"
memory = "1MiB"
slab = "64KiB"
host_cache = "16MiB"
"""
PAIR = """
[[devices.group]]
name = "pair"
tensor_parallel = 2
"""
SINGLES = """
[[devices.group]]
name = "singles"
instances = 2
"""
MODEL = """
[[model]]
name = "{name}"
path = "tiny"
max_context = {context}
dtype = "float32"
groups = {groups}
"""


def model(name: str = "tiny", *groups: str, context: int = 1024) -> str:
    return MODEL.format(name=name, groups=list(groups), context=context)


@pytest.fixture
def read(tmp_path: Path, fake_checkpoint: Make) -> Callable[..., Config]:
    """Read a configuration of these texts."""
    fake_checkpoint()

    def of(*texts: str, check_files: bool = True, devices: str = DEVICES) -> Config:
        path = tmp_path / "appliance.toml"
        path.write_text("".join([devices, *texts]))
        return load_config(path, check_files=check_files)

    return of


def test_a_mixed_box(read: Callable[..., Config]) -> None:
    """A group of one instance of two ranks beside two single ones, and each model on its group."""
    devices = DEVICES.replace("1MiB", "2MiB")
    config = read(PAIR, SINGLES, model("large", "pair"), model("small", "singles"), devices=devices)

    assert plan_instances(config.devices) == (
        InstancePlan("pair", 2),
        InstancePlan("singles", 1),
        InstancePlan("singles", 1),
    )
    large, small = config.models
    assert instances_of(large, config.devices) == {0}
    assert instances_of(small, config.devices) == {1, 2}
    assert devices_of(large, config.devices).tensor_parallel == 2
    assert devices_of(small, config.devices).instances == 2
    assert warnings(config) == []

    entries = [read_model(one, config.devices) for one in config.models]
    assert uncached(config, entries) == []
    for number, key in enumerate(("tensor_parallel = 2\n", "instances = 2\n")):
        alone = read(key, model(config.models[number].name), devices=devices)
        wanted = kv_floor_slabs(alone, [read_model(alone.models[0], alone.devices)])
        assert kv_floor_slabs(config, entries[number : number + 1]) == wanted


def test_what_fits_two_ranks_need_not_fit_one(read: Callable[..., Config]) -> None:
    """The same model is refused in a group of single ranks; the message has their number."""
    found = problem(read, PAIR, SINGLES, model("tiny", "singles"))

    assert found.key == "model[0]"
    assert "on each of" not in found.wrong
    assert read(PAIR, SINGLES, model("tiny", "pair"))


def test_without_groups_all_instances_are_one(read: Callable[..., Config]) -> None:
    """`instances` and `tensor_parallel` mean what they did."""
    text = "instances = 3\ntensor_parallel = 2\n"
    config = read(text, model())

    assert plan_instances(config.devices) == (InstancePlan("", 2),) * 3
    assert instances_of(config.models[0], config.devices) is None
    assert devices_of(config.models[0], config.devices) == config.devices


def test_a_model_without_groups_is_on_all(read: Callable[..., Config]) -> None:
    """If they have the same number of ranks."""
    other = PAIR.replace("pair", "other")
    config = read(PAIR, other, model())

    assert instances_of(config.models[0], config.devices) is None
    assert devices_of(config.models[0], config.devices).tensor_parallel == 2
    assert len(plan_instances(config.devices)) == 2


@pytest.mark.parametrize(
    ("texts", "key", "wrong"),
    [
        ([PAIR, SINGLES, model()], "model[0].groups", "groups of 1 and 2 ranks"),
        ([PAIR, model("tiny", "piar")], "model[0].groups", "no group 'piar'"),
        ([model("tiny", "pair")], "model[0].groups", "no group 'pair'"),
        ([PAIR, PAIR, model()], "devices.group[1].name", "another group"),
        (["instances = 2\n", PAIR, model()], "devices.instances", "for itself"),
        (["tensor_parallel = 2\n", PAIR, model()], "devices.tensor_parallel", "for itself"),
        ([PAIR, "gpus = [0, 1]\n", model()], "devices.group[0].gpus", "run on the CPU"),
        ([PAIR.replace("2", "0"), model()], "devices.group[0].tensor_parallel", ">= 1"),
        ([PAIR.replace("pair", "a pair"), model()], "devices.group[0].name", "matching"),
        (["group = 1\n", model()], "devices.group", "expected tables"),
        ([SINGLES, "rank = 1\n", model()], "devices.group[0].rank", "unknown key"),
        (['host_cache_codec = "exp7"\n', PAIR, model()], "devices.host_cache_codec", "ranks"),
    ],
)
def test_what_cannot_be_is_refused(
    read: Callable[..., Config], texts: list[str], key: str, wrong: str
) -> None:
    """Each with its key, what is wrong, and a remedy."""
    with pytest.raises(ConfigError) as caught:
        read(*texts, check_files=False)

    (found,) = caught.value.problems
    assert found.key == key
    assert wrong in found.wrong
    assert found.remedy


@pytest.fixture
def choose(read: Callable[..., Config]) -> Callable[..., Config]:
    """A configuration of three instances, with a model of these lines."""

    def of(*lines: str) -> Config:
        text = model() + "\n".join(lines) + "\n"
        return read("instances = 3\n", text, devices=DEVICES.replace("1MiB", "2MiB"))

    return of


def test_a_model_names_its_instances(choose: Callable[..., Config]) -> None:
    """The daemon gets them, and one that no model may be served by is worth a word."""
    config = choose("instances = [2, 0]")
    (row,) = config.models

    served = served_model(row, read_model(row, config.devices), instances_of(row, config.devices))
    assert served.spec.instances == {0, 2}
    assert devices_of(row, config.devices).instances == 2
    assert warnings(config) == ["devices.instances: no model may be served by instance 1"]


def test_instances_of_groups_are_numbered_in_their_order(read: Callable[..., Config]) -> None:
    """A group of which a model uses a part is used."""
    devices = DEVICES.replace("1MiB", "2MiB")
    config = read(PAIR, SINGLES, model() + "instances = [2]\n", devices=devices)
    (row,) = config.models

    assert instances_of(row, config.devices) == {2}
    assert devices_of(row, config.devices).tensor_parallel == 1
    assert warnings(config) == ["devices.group: no model may be served by pair"]


@pytest.mark.parametrize("policy", SHIPPED)
def test_every_policy_keeps_to_the_instances_of_a_model(
    choose: Callable[..., Config], policy: str
) -> None:
    """Also where another model may be anywhere."""
    config = choose("instances = [0, 2]")
    only = {"a": instances_of(config.models[0], config.devices)}
    models = {name: ModelDouble(4, shape()) for name in "ab"}
    cluster = ClusterDouble(models, policy=policy, instances=3, only=only)
    cluster.start()

    lives = [cluster.ask(f"{name}{n}", name, output=60) for n in range(6) for name in "ab"]
    cluster.settle()

    assert {life.outcome for life in lives} == {FinishReason.LENGTH}
    for kind in (BuildModel, RunPrefill, RunTurn):
        at = {command.instance for command in cluster.commands(kind) if command.model == "a"}
        assert at <= {0, 2}
    assert isinstance(cluster.stack, PolicyStack)
    assert cluster.stack.faults == []


@pytest.mark.parametrize(
    ("texts", "wrong"),
    [
        (["instances = 3\n", model() + "instances = [0, 3]\n"], "there is no instance 3"),
        ([PAIR, model("tiny", "pair") + "instances = [0]\n"], "groups says where"),
        ([PAIR, SINGLES, model() + "instances = [0, 1]\n"], "instances of 1 and 2 ranks"),
        ([model() + "instances = [-1]\n"], ">= 0"),
    ],
)
def test_instances_that_cannot_be_are_refused(
    read: Callable[..., Config], texts: list[str], wrong: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(*texts, check_files=False)

    (found,) = caught.value.problems
    assert found.key.startswith("model[0].instances")
    assert wrong in found.wrong
    assert found.remedy


@pytest.mark.parametrize(
    ("aliases", "wrong"),
    [('["tiny"]', "tiny is a name of tiny already"), ('["x", "x"]', "x is a name of tiny already")],
)
def test_an_alias_means_one_model(choose: Callable[..., Config], aliases: str, wrong: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose(f"aliases = {aliases}")

    (found,) = caught.value.problems
    assert (found.key, found.wrong) == ("model[0].aliases", wrong)


def test_an_alias_is_no_other_models_name(read: Callable[..., Config]) -> None:
    other = model("other") + 'aliases = ["tiny", "new"]\n'
    with pytest.raises(ConfigError, match="tiny is a name of tiny already"):
        read(model(), other)


def test_the_daemon_gets_aliases_and_what_is_to_be_loaded(choose: Callable[..., Config]) -> None:
    config = choose('aliases = ["gpt-4o", "org/x"]', "load = true")
    (row,) = config.models
    served = served_model(row, read_model(row, config.devices))

    assert served.front.aliases == served.aliases == ("gpt-4o", "org/x")
    assert served.load


def test_a_group_that_no_model_uses_is_worth_a_word(read: Callable[..., Config]) -> None:
    """It takes its memory for nothing."""
    config = read(PAIR, SINGLES, model("tiny", "pair"))

    assert warnings(config) == ["devices.group: no model may be served by singles"]


def test_gpus_are_dealt_to_groups() -> None:
    """Those that a group names are its own; the others get the lowest that none names."""

    def plans(*groups: DeviceGroup) -> list[tuple[str, int, tuple[int, ...]]]:
        devices = Devices(memory_bytes=Memory.read("1GiB"), kind="cuda", groups=groups)
        return [tuple(plan) for plan in plan_instances(devices)]

    assert plans(
        DeviceGroup(name="single"),
        DeviceGroup(name="quad", tensor_parallel=2, gpus=(0, 2, 4, 5)),
        DeviceGroup(name="more", instances=2),
    ) == [
        ("single", 1, (1,)),
        ("quad", 2, (0, 2)),
        ("quad", 2, (4, 5)),
        ("more", 1, (3,)),
        ("more", 1, (6,)),
    ]


def test_gpus_that_make_no_instance_are_reported(
    monkeypatch: pytest.MonkeyPatch, read: Callable[..., Config]
) -> None:
    """One GPU for a group of two ranks."""
    install(monkeypatch, [16 * GIB])
    devices = DEVICES.replace("cpu", "cuda").replace("1MiB", "2GiB")
    devices += 'runtime = "1GiB"\n'

    with pytest.raises(ConfigError) as caught:
        read(PAIR, "gpus = [0]\n", model(), check_files=False, devices=devices)

    found = [(one.key, one.wrong) for one in caught.value.problems]
    wrong = "1 GPUs are not divisible into instances of 2 ranks"
    assert ("devices.group[0].gpus", wrong) in found


def problem(read: Callable[..., Config], *texts: str) -> Problem:
    with pytest.raises(ConfigError) as caught:
        read(*texts)
    (one,) = caught.value.problems
    return one
