"""`appliance fit` says what then happens: to models that are loaded one after another, and to
requests that come all at once, in the daemon's own machine with its ledgers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import pytest
from click.testing import CliRunner

from appliance.checkpoints.checkpoint import CatalogEntry
from appliance.cli.main import cli
from appliance.config.fit import Fit, fit
from appliance.config.groups import devices_of
from appliance.config.schema import Config, Devices, Model
from appliance.config.sizing import kv_shape, least, uncached
from appliance.platform import machine_memory
from appliance.platform.machine_memory import MachineMemory
from appliance.units import Bytes, Memory
from appliance.vocabulary import RunTurn
from tests.published import published
from tests.unit.doubles.cluster import SLAB, ClusterDouble
from tests.unit.doubles.instance import ModelDouble

Make = Callable[..., Path]
MIB, GIB = 1 << 20, 1 << 30
RATE: Final = 5e9
OUTPUT: Final = 48
"""Tokens of an answer: its request is at its longest while the others are there."""


class Case(NamedTuple):
    names: tuple[str, ...]
    memory: str
    max_context: int = 8192
    max_batch: int = 32
    cuda: bool = False
    slab: int = 2 * MIB
    host_cache: str = "128GiB"


CASES: Final = [
    Case(("qwen3-0.6b",), "4GiB"),
    Case(("qwen3-0.6b", "llama-3.2-1b"), "6GiB", 4096, host_cache="5GiB"),
    Case(("qwen3-0.6b", "llama-3.2-1b", "gemma-3-1b-it", "lfm2-1.2b"), "5GiB", 4096),
    Case(("gemma-3-1b-it",), "3GiB", 32_768),
    Case(("lfm2-1.2b", "gemma-3-1b-it"), "4GiB", 16_384, slab=16 * MIB),
    Case(("llama-3.1-8b-instruct", "qwen3-0.6b"), "24GiB", 16_384),
    Case(("llama-3.1-8b-instruct", "llama-3.2-1b"), "21GiB", 4096, cuda=True),
    Case(("llama-3.1-8b-instruct", "qwen3-0.6b", "lfm2-1.2b"), "72GiB", 32_768, 8, cuda=True),
    Case(("deepseek-v2-lite", "qwen3-0.6b"), "40GiB", 32_768, 64),
    Case(("deepseek-v2-lite", "llama-3.1-8b-instruct"), "72GiB", 8192, 64, cuda=True),
]


def configured(case: Case, folder: Path) -> tuple[Config, list[CatalogEntry]]:
    config = Config(
        devices=Devices(
            kind="cuda" if case.cuda else "cpu",
            memory_bytes=Memory.read(case.memory),
            runtime_bytes=Bytes(2 * GIB),
            host_cache_bytes=Bytes.read(case.host_cache),
            slab_bytes=Bytes(case.slab),
        ),
        models=tuple(
            [
                Model(name=n, path=n, max_context=case.max_context, max_batch=case.max_batch)
                for n in case.names
            ]
        ),
    )
    return config, [published(folder, name, cuda=case.cuda) for name in case.names]


def cluster(config: Config, entries: list[CatalogEntry], names: list[str]) -> ClusterDouble:
    """A machine with one instance whose engines report what is expected of them."""
    devices = config.devices
    models = {
        model.name: (model, entry) for model, entry in zip(config.models, entries, strict=True)
    }
    doubles = {}
    for name in names:
        model, entry = models[name]
        own = devices_of(model, devices)
        shape = kv_shape(entry, model.max_context, own)
        # The slabs of the double are smaller.
        scaled = shape.block_bytes * SLAB // devices.slab_bytes
        shape = msgspec.structs.replace(shape, block_bytes=scaled)
        doubles[name] = ModelDouble(least(entry, 1, own).weights, shape)
    made = ClusterDouble(
        doubles,
        policy="appliance",
        slabs=devices.slabs,
        host_slabs=devices.host_cache_bytes // devices.slab_bytes,
        max_context=config.models[0].max_context,
        max_batch=config.models[0].max_batch,
    )
    made.start()
    made.settle()
    return made


def resident(box: ClusterDouble) -> int:
    return sum(engine.on_device for engine in box.machine.instances[0].engines.values())


def most_at_once(box: ClusterDouble, tokens: int) -> int:
    """Models that are in the pool together, at most, while they are asked in turn."""
    most = 0
    for name in box.world.models:
        life = box.ask(name, name, prompt=tokens - OUTPUT, output=OUTPUT)
        box.settle()
        assert life.outcome == "length"
        most = max(most, resident(box))
    return most


def together(box: ClusterDouble, name: str, tokens: int, expected: int) -> int:
    """Requests that are computed in one turn, at most, where more come at once."""
    lives = [
        box.ask(f"{name}-{number}", name, prompt=tokens - OUTPUT, output=OUTPUT)
        for number in range(expected + 3)
    ]
    box.settle()
    assert {life.outcome for life in lives} == {"length"}
    return max(len(turn.requests) for turn in box.turns() if turn.model == name)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{'+'.join(case.names)}-{case.memory}")
def test_what_is_said_happens(case: Case, tmp_path: Path) -> None:
    """Models at once exactly, whichever come first; requests at once within a tenth."""
    config, entries = configured(case, tmp_path)
    found = fit(config, entries, RATE)
    by_size = sorted(case.names, key=lambda n: entries[case.names.index(n)].weight_bytes)
    short = min(4096, case.max_context)

    assert most_at_once(cluster(config, entries, by_size), short) == found.most_at_once
    largest = by_size[::-1][: found.fewest_at_once + 1]
    assert most_at_once(cluster(config, entries, largest), short) == found.fewest_at_once
    for one in found.models:
        for tokens, said in (
            (case.max_context, one.requests_at_max_context),
            (short, one.requests_at_4k),
        ):
            seen = together(cluster(config, entries, [*case.names]), one.name, tokens, said)
            assert abs(seen - said) <= 0.1 * said, (one.name, tokens)


@pytest.mark.parametrize(
    ("memory", "max_context", "max_batch", "expected"),
    [("8GiB", 384, 32, 5), ("8GiB", 384, 3, 3), ("8GiB", 4096, 32, 1), ("1610MiB", 384, 32, 4)],
)
def test_prompts_that_are_embedded(
    memory: str, max_context: int, max_batch: int, expected: int, tmp_path: Path
) -> None:
    """As many as a step has tokens for, as the batch takes, and as have room in the pool; a small
    host cache does not matter."""
    case = Case(("qwen3-0.6b",), memory, max_context, max_batch, host_cache="2GiB")
    config, entries = configured(case, tmp_path)
    model = msgspec.structs.replace(config.models[0], task="embed")
    config = msgspec.structs.replace(config, models=(model,))
    box = cluster(config, entries, [model.name])
    lives = [
        box.ask(f"text-{number}", model.name, prompt=max_context, output=0)
        for number in range(expected + 3)
    ]
    box.settle()

    assert {life.outcome for life in lives} == {"stop"}
    most = max([len(turn.prompts) for turn in box.commands(RunTurn)], default=1)
    assert fit(config, entries, RATE).models[0].requests_at_max_context == most == expected


def test_models_of_different_instances(tmp_path: Path) -> None:
    """A pool has no more models together than may be in it, and that is enough."""
    case = Case(("qwen3-0.6b", "llama-3.2-1b", "gemma-3-1b-it"), "6GiB", 2048)
    config, entries = configured(case, tmp_path)

    def placed(memory: str, *places: tuple[int, ...]) -> Fit:
        sized = msgspec.structs.replace(
            config.devices, instances=2, memory_bytes=Memory.read(memory)
        )
        models = [
            msgspec.structs.replace(model, instances=instances)
            for model, instances in zip(config.models, places, strict=True)
        ]
        return fit(
            msgspec.structs.replace(config, devices=sized, models=tuple(models)), entries, RATE
        )

    everywhere = placed("5GiB", (), (), ())
    apart = placed("5GiB", (0,), (0, 1), (1,))
    alone = placed("5GiB", (0,), (0,), (1,))
    small = placed("3GiB", (0,), (0,), (1,))
    (advised,) = small.remedies
    enough = placed(advised.split('"')[1], (0,), (0,), (1,))

    assert (everywhere.most_at_once, everywhere.fewest_at_once) == (2, 2)
    assert not everywhere.all_at_once
    assert (apart.most_at_once, apart.fewest_at_once, apart.all_at_once) == (2, 2, True)
    assert (alone.most_at_once, alone.fewest_at_once, alone.all_at_once) == (2, 1, True)
    assert (small.most_at_once, small.fewest_at_once, small.all_at_once) == (1, 1, False)
    assert apart.remedies == alone.remedies == enough.remedies == ()


def test_the_host_cache(tmp_path: Path) -> None:
    """Whose weights are in it, what is left to KV, and what it takes to hold all."""
    config, entries = configured(CASES[2], tmp_path)
    small = msgspec.structs.replace(config.devices, host_cache_bytes=Bytes(6 * GIB))
    config = msgspec.structs.replace(config, devices=small)
    found = fit(config, entries, RATE)
    left_out = [one.name for one in found.models if not one.in_host_cache]
    (advised,) = [remedy for remedy in found.remedies if "host_cache" in remedy]
    enough = Bytes.read(advised.split('"')[1])
    larger = msgspec.structs.replace(config.devices, host_cache_bytes=enough)

    assert left_out == uncached(config, entries)
    assert left_out
    assert found.host_weight_bytes + found.host_kv_bytes == 6 * GIB
    assert uncached(msgspec.structs.replace(config, devices=larger), entries) == []


def test_remedies_help(tmp_path: Path) -> None:
    """With the memory that is advised all models are in the pool at once, and two requests run; a
    configuration with room for all has no remedies."""
    config, entries = configured(CASES[5]._replace(memory="16GiB", max_context=8192), tmp_path)
    found = fit(config, entries, RATE)
    sizes = [Memory.read(remedy.split('"')[1]) for remedy in found.remedies]

    def with_memory(size: Memory) -> Fit:
        devices = msgspec.structs.replace(config.devices, memory_bytes=size)
        return fit(msgspec.structs.replace(config, devices=devices), entries, RATE)

    assert (found.fewest_at_once, found.models[0].requests_at_max_context) == (1, 1)
    assert with_memory(sizes[0]).fewest_at_once == 2
    assert with_memory(sizes[1]).models[0].requests_at_max_context == 2
    assert with_memory(max(sizes)).remedies == ()


def test_what_is_printed(
    tmp_path: Path, fake_checkpoint: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table, a line for each thing that is shared; the same as JSON; `config show` in TOML."""
    monkeypatch.setattr(machine_memory, "read_memory", lambda: MachineMemory(24 * GIB, 20 * GIB))
    fake_checkpoint()
    path = tmp_path / "appliance.toml"
    path.write_text(
        '[devices]\nkind = "cpu"\nmemory = "3MiB"\nslab = "64KiB"\nceilings = ""\n'
        '[[model]]\nname = "tiny"\npath = "tiny"\ndtype = "float32"\n',
        encoding="utf-8",
    )
    printed = CliRunner().invoke(cli, ["fit", str(path)]).stdout.splitlines()
    shown = CliRunner().invoke(cli, ["config", "show", str(path)]).stdout
    as_json = json.loads(CliRunner().invoke(cli, ["fit", "--json", str(path)]).stdout)
    path.write_text("[devices]\nmemory = 3\n", encoding="utf-8")
    wrong = CliRunner().invoke(cli, ["fit", str(path)])

    assert [line.split() for line in printed[:2]] == [
        ["NAME", "WEIGHTS", "KV/1K", "CONTEXT", "REQUESTS", "AT", "4K", "SWITCH", "FROM"],
        ["tiny", "1MiB", "512KiB", "2048", "2", "2", "0ms", "host", "cache"],
    ]
    assert printed[2:] == [
        "pool: 3MiB on the CPU: the model at once",
        "host cache: 1GiB: all weights (1MiB), and 1023MiB for the KV cache of requests",
        "auto: devices.host_cache = 1GiB: room for all weights, and the KV cache of 8 requests of "
        "4,096 tokens of each model",
        "auto: model.tiny.max_context = 2048: as long as the model reads",
        "switches: 5.0 GB/s (expected; `appliance doctor --ceilings` measures it)",
    ]
    assert 'memory = "3MiB"\n' in shown
    assert "max_context = 2048 # auto: as long as the model reads\n" in shown
    assert as_json["models"][0]["requests_at_max_context"] == 2
    assert [one["key"] for one in as_json["auto"]] == [
        "devices.host_cache",
        "model.tiny.max_context",
    ]
    assert wrong.exit_code == 2
