"""`auto` chooses sizes that the daemon's own checks accept, as large as there is a use for, and
says why."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.checkpoints.checkpoint import CatalogEntry
from appliance.cli.main import cli
from appliance.config.auto import FEW_REQUESTS, SHORT_TOKENS, Room, choose
from appliance.config.diff import as_written
from appliance.config.layers import Layers
from appliance.config.loader import load_config
from appliance.config.machine_room import check_machine, host_needs, refuse_now
from appliance.config.problems import ProblemReport
from appliance.config.schema import Config, Devices, Model
from appliance.config.sizing import check_sizes, kv_floor, least, uncached
from appliance.errors import ConfigError
from appliance.platform import machine_memory
from appliance.platform.machine_memory import MachineMemory
from appliance.units import Bytes, Memory
from tests.published import WEIGHT_BYTES, published

Make = Callable[..., Path]
MIB, GIB, TIB = 1 << 20, 1 << 30, 1 << 40


@pytest.fixture(scope="module")
def entries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CatalogEntry]:
    return {name: published(tmp_path_factory.mktemp(name), name) for name in WEIGHT_BYTES}


def model(name: str, max_context: int = 0, *, pin: bool = False) -> Model:
    return Model(name=name, path=f"/models/{name}", max_context=max_context, pin=pin)


def chosen(
    config: Config, entries: dict[str, CatalogEntry], available: int, gpu_bytes: int | None = None
) -> Config:
    room = Room.of(config, available, 1, gpu_bytes)
    return choose(config, [entries[one.name] for one in config.models], room)


def problems(config: Config, entries: dict[str, CatalogEntry], machine: MachineMemory) -> list[str]:
    """What `config check` says of the sizes on this machine."""
    layers = Layers()
    layers.add(Path("appliance.toml"), "", {})
    report = ProblemReport(layers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine_memory, "read_memory", lambda: machine)
        check_machine(config.devices, report)
    check_sizes(config, [entries[one.name] for one in config.models], report)
    return [str(problem) for problem in report.problems]


class Machine(NamedTuple):
    """What is to be divided, and among which models."""

    names: list[str]
    instances: int
    total: int
    used: float
    max_context: int
    pin: bool
    slab: int


MACHINES: Final = st.builds(
    Machine,
    names=st.lists(st.sampled_from(sorted(WEIGHT_BYTES)), min_size=1, max_size=4, unique=True),
    instances=st.integers(1, 3),
    total=st.integers(4 * GIB, TIB),
    used=st.floats(0, 1),
    max_context=st.sampled_from([0, 0, 2048, 8192]),
    pin=st.booleans(),
    slab=st.sampled_from([2 << 20, 16 << 20]),
)


@pytest.mark.parametrize("open_keys", ["both", "memory", "host_cache"])
@settings(deadline=None, max_examples=30)
@given(box=MACHINES)
def test_checks_accept_what_is_chosen(
    box: Machine,
    open_keys: str,
    entries: dict[str, CatalogEntry],
) -> None:
    """A daemon starts on any machine with what `auto` chose for it, unless the largest model with
    one request has no room there."""
    available = box.total - int(box.total * box.used**3)
    models = tuple([model(name, box.max_context, pin=box.pin) for name in box.names])
    given_bytes = available // 4 // box.slab * box.slab
    devices = Devices(
        kind="cpu",
        instances=box.instances,
        slab_bytes=Bytes(box.slab),
        memory_bytes=Memory(given_bytes // box.instances if open_keys == "host_cache" else 0),
        host_cache_bytes=Bytes(given_bytes if open_keys == "memory" else 0),
    )
    config = chosen(Config(devices=devices, models=models), entries, available)
    machine = MachineMemory(box.total, available)
    used = [entries[one.name] for one in config.models]
    sizes = [
        least(one, min(box.max_context or 256, one.max_positions), config.devices) for one in used
    ]

    refuse_now(config.devices, machine)
    if problems(config, entries, machine):
        pools = box.instances * max(size.slabs for size in sizes)
        floors = max(size.kv for size in sizes) + box.pin * sum(size.weights for size in sizes)
        room = Room.of(config, available, 1, None).host_bytes
        needed = 1.07 * (pools + floors) * box.slab
        written = 0 if open_keys == "both" else given_bytes
        assert room < written + needed or 0 < written < max(pools, floors) * box.slab


def test_all_models_have_room_where_there_is_much(entries: dict[str, CatalogEntry]) -> None:
    """All weights in the pool and in the host cache, several requests of each model, contexts as
    long as the models read; and not the whole machine."""
    names = ("qwen3-0.6b", "llama-3.2-1b")
    config = Config(devices=Devices(kind="cpu"), models=tuple(map(model, names)))
    config = chosen(config, entries, 256 * GIB)
    used = [entries[name] for name in names]
    needs = [least(one, SHORT_TOKENS, config.devices) for one in used]

    weights = sum(need.weights for need in needs)
    assert config.devices.slabs >= weights + FEW_REQUESTS * sum(need.kv for need in needs)
    assert uncached(config, used) == []
    assert host_needs(config.devices).bytes < 32 * GIB
    for one, of in zip(used, config.models, strict=True):
        assert SHORT_TOKENS < of.max_context <= one.max_positions


def test_a_small_machine_has_one_model_at_a_time(entries: dict[str, CatalogEntry]) -> None:
    """Rather than none; contexts are as long as there is room for, and no longer."""
    config = Config(devices=Devices(kind="cpu"), models=(model("llama-3.1-8b-instruct"),))
    config = chosen(config, entries, 22 * GIB)
    (tokens,) = [one.max_context for one in config.models]
    longer = msgspec.structs.replace(config.models[0], max_context=tokens + 256)
    large = entries["llama-3.1-8b-instruct"]
    slabs = config.devices.host_cache_bytes // config.devices.slab_bytes

    assert problems(config, entries, MachineMemory(24 * GIB, 22 * GIB)) == []
    assert tokens >= 8192
    assert (
        least(large, tokens + 256, config.devices).slabs > config.devices.slabs
        or kv_floor(longer, large, config.devices) > slabs
    )


def test_a_model_that_barely_fits_is_served(entries: dict[str, CatalogEntry]) -> None:
    """With a context that has room, though not the usual one: memory is divided so that its
    weights are there before all else."""
    config = Config(devices=Devices(kind="cpu"), models=(model("llama-3.1-8b-instruct"),))
    large = entries["llama-3.1-8b-instruct"]
    smallest = 15 * GIB + 512 * MIB
    config = choose(config, [large], Room(smallest))
    usual = least(large, 8192, config.devices)

    assert usual.slabs * config.devices.slab_bytes > smallest
    assert problems(config, entries, MachineMemory(24 * GIB, 20 * GIB)) == []
    assert 256 <= config.models[0].max_context < 8192


def test_a_model_that_has_no_room_is_refused(entries: dict[str, CatalogEntry]) -> None:
    """With what helps: there is no key to make larger."""
    config = Config(devices=Devices(kind="cpu"), models=(model("llama-3.1-8b-instruct"),))
    config = chosen(config, entries, 8 * GIB)
    found = problems(config, entries, MachineMemory(8 * GIB, 8 * GIB))

    assert "needs 15.0GiB for its weights" in found[0]
    assert "end what else uses memory, restart a daemon that runs" in found[0]
    assert "set devices.memory" not in found[0]


def test_a_host_cache_that_is_too_small_is_the_problem_of_a_model(
    entries: dict[str, CatalogEntry],
) -> None:
    """Of that with the longest KV cache: there is no key to make larger."""
    names = ("qwen3-0.6b", "llama-3.1-8b-instruct")
    models = tuple(map(model, names, (4096, 8192)))
    config = Config(devices=Devices(kind="cuda"), models=models)
    config = chosen(config, entries, GIB, 80 * GIB)

    (found,) = problems(config, entries, MachineMemory(8 * GIB, GIB))

    assert "model[1]: llama-3.1-8b-instruct needs host memory for the KV cache" in found
    assert "more than devices.host_cache (0B) has; end what else uses memory, restart" in found
    assert found.endswith(", or give it a shorter max_context")
    written = msgspec.structs.replace(config, chosen=())
    (found,) = problems(written, entries, MachineMemory(8 * GIB, GIB))
    assert "devices.host_cache: 0B do not hold the KV cache of one request" in found
    assert "; set it to " in found


def test_sizes_on_gpus(entries: dict[str, CatalogEntry]) -> None:
    """A pool is a share of the GPU, of which some is for activations; batches are larger."""
    names = ("llama-3.1-8b-instruct", "qwen3-0.6b")
    models = tuple(msgspec.structs.replace(model(name), max_batch=0) for name in names)
    config = Config(devices=Devices(kind="cuda"), models=models)
    large = chosen(config, entries, 256 * GIB, 80 * GIB)
    small = chosen(config, entries, 256 * GIB, 24 * GIB)

    assert (large.devices.memory_bytes, large.devices.runtime_bytes) == (72 * GIB, 4 * GIB)
    assert small.devices.runtime_bytes < 3 * GIB
    assert problems(large, entries, MachineMemory(256 * GIB, 256 * GIB)) == []
    assert problems(small, entries, MachineMemory(256 * GIB, 256 * GIB)) == []
    assert [one.max_batch for one in large.models] == [106, 152]
    assert small.models[0].max_batch == FEW_REQUESTS
    assert large.models[0].max_context == entries["llama-3.1-8b-instruct"].max_positions
    assert small.models[0].max_context < large.models[0].max_context


def test_what_is_written_stays(entries: dict[str, CatalogEntry]) -> None:
    """`auto` changes no other key."""
    devices = Devices(kind="cpu", memory_bytes=Memory(8 * GIB), host_cache_bytes=Bytes(5 * GIB))
    config = Config(devices=devices, models=(model("qwen3-0.6b", 1000),))

    assert chosen(config, entries, 64 * GIB) == config


def test_every_choice_has_a_reason(entries: dict[str, CatalogEntry]) -> None:
    """One line for each key."""
    models = (msgspec.structs.replace(model("qwen3-0.6b"), max_batch=0),)
    config = chosen(Config(devices=Devices(kind="cpu"), models=models), entries, 64 * GIB)

    assert [str(one) for one in config.chosen] == [
        "devices.memory = 5.8GiB: room for all models at once, each with 8 requests of 4,096 "
        "tokens",
        "devices.host_cache = 5.9GiB: room for all weights, and the KV cache of 8 requests of "
        "4,096 tokens of each model",
        "model.qwen3-0.6b.max_context = 40960: as long as the model reads",
        "model.qwen3-0.6b.max_batch = 10: 10 requests of 4,096 tokens have room",
    ]


def test_a_running_daemon_keeps_its_choices(entries: dict[str, CatalogEntry]) -> None:
    """Its own memory is no reason to choose anew; a model that is added gets what has room."""
    before = Config(devices=Devices(kind="cpu"), models=(model("qwen3-0.6b"),))
    running = chosen(before, entries, 64 * GIB)
    more = msgspec.structs.replace(before, models=(*before.models, model("lfm2-1.2b")))
    room = Room.of(more, 30 * GIB, 1, None)
    found = choose(more, [entries[one.name] for one in more.models], room, running)

    assert found.devices == running.devices
    assert found.models[0] == running.models[0]
    assert found.models[1].max_context == entries["lfm2-1.2b"].max_positions
    moved = dataclasses.replace(entries["qwen3-0.6b"], path=Path("/elsewhere"))
    other = msgspec.structs.replace(before.models[0], path=str(moved.path), max_context=0)
    again = choose(
        msgspec.structs.replace(before, models=(other,)), [moved], Room(64 * GIB), running
    )
    assert again.is_chosen("model", "qwen3-0.6b", "max_context")


def test_two_keys_are_a_configuration(
    tmp_path: Path, fake_checkpoint: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of a model and its directory; the rest is `auto`, and `config check` says what that
    means. `now` counts what other programs use."""
    fake_checkpoint()
    memory = MachineMemory(64 * GIB, 3 * GIB)
    monkeypatch.setattr(machine_memory, "read_memory", lambda: memory)
    path = tmp_path / "appliance.toml"
    path.write_text('[[model]]\nname = "tiny"\npath = "tiny"\n', encoding="utf-8")
    idle, now = load_config(path), load_config(path, now=True)
    checked = CliRunner().invoke(cli, ["config", "check", str(path)])

    assert idle.models[0].max_context == 2048
    assert now.devices.memory_bytes < idle.devices.memory_bytes
    refuse_now(now.devices, memory)
    assert [f"auto: {one}" in checked.stdout.splitlines() for one in idle.chosen] == [True] * 3


def test_auto_may_be_written(
    tmp_path: Path, fake_checkpoint: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each of the five keys; what a table of the API says of a key that is open is `auto`."""
    fake_checkpoint()
    monkeypatch.setattr(machine_memory, "read_memory", lambda: MachineMemory(64 * GIB, 64 * GIB))
    path = tmp_path / "appliance.toml"
    path.write_text(
        '[devices]\nkind = "cpu"\nmemory = "auto"\nhost_cache = "auto"\nruntime = "auto"\n'
        '[[model]]\nname = "tiny"\npath = "tiny"\nmax_context = "auto"\nmax_batch = "auto"\n',
        encoding="utf-8",
    )
    config = load_config(path)

    assert [one.key[-1] for one in config.chosen] == [
        "memory",
        "host_cache",
        "max_context",
        "max_batch",
    ]
    assert config.models[0].max_batch == 32
    assert as_written(config.devices)["runtime"] == "auto"
    path.write_text(path.read_text().replace("max_batch", "max_sequences"), encoding="utf-8")
    with pytest.raises(ConfigError, match="max_sequences: expected `int`"):
        load_config(path)
