"""Plans at boxes that run: models move, and are never without a box that serves them."""

from __future__ import annotations

import asyncio
import json
import shlex
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from appliance.access.auth import Access
from appliance.api.app import create_app
from appliance.cli.main import cli
from appliance.config.loader import load_config
from appliance.daemon.reload import LiveConfig
from appliance.daemon.served_model import ServedModel
from appliance.fleet.observed import DAY_SECONDS, forecast
from appliance.usage.entries import Amounts
from appliance.usage.ledger import Ledger
from appliance.vocabulary import ModelSpec
from tests.patience import PATIENCE_SECONDS
from tests.unit.doubles.daemon import Box, setup_of, small
from tests.unit.doubles.serving import served
from tests.unit.usage.test_books import entry
from tests.unit.usage.test_ledger import opened

CONFIG = """\
[devices]
memory = "8MiB"
slab = "64KiB"
host_cache = "16MiB"

[policy]
use = ["serverlessllm"]

[catalog]
folder = "models"

"""
MODEL = """\
[[model]]
name = "{name}"
path = "../tiny"
max_context = 256

"""


DEMANDS = {"a": 0.5, "b": 0.4, "c": 0.1}
"""Instances that were busy with each model, all of today."""


class KnownBox(Box):
    """Its models have files."""

    path = ""

    def served(self, spec: ModelSpec) -> ServedModel:
        made = super().served(spec)
        return replace(made, worker=replace(made.worker, path=self.path))


@dataclass
class FleetDouble:
    """Two boxes over worker doubles, each with its configuration and ledger, served over HTTP."""

    boxes: dict[str, Box] = field(default_factory=dict)
    resting: set[str] = field(default_factory=set)
    """Boxes whose workers do nothing."""
    configs: dict[str, Path] = field(default_factory=dict)
    urls: dict[str, str] = field(default_factory=dict)
    settings: dict[str, LiveConfig] = field(default_factory=dict)

    def names(self, box: str) -> list[str]:
        """What a restart would serve."""
        return [model.name for model in load_config(self.configs[box]).models]

    def asked(self) -> list[str]:
        return [word for name, url in self.urls.items() for word in ("--box", f"{name}={url}")]

    async def run(self, *arguments: str) -> Result:
        return await asyncio.to_thread(CliRunner().invoke, cli, ["fleet", *map(str, arguments)])

    async def get(self, box: str, path: str) -> bytes:
        async with httpx.AsyncClient() as client:
            return (await client.get(f"{self.urls[box]}{path}")).content


async def working(fleet: FleetDouble) -> None:
    """The workers work while others wait."""
    while True:
        for name, box in fleet.boxes.items():
            if name not in fleet.resting:
                box.settle()
        await asyncio.sleep(0.01)


async def used(ledger: Ledger, model: str, demand: float) -> None:
    """Have it in the ledger that so many instances were busy with the model all day."""
    if demand:
        written = asyncio.Event()
        amounts = Amounts(requests=1, device_microseconds=round(demand * DAY_SECONDS * 1e6))
        ended = time.time()
        ledger.record(entry(model, model=model, ended=ended, amounts=amounts), written.set)
        await asyncio.wait_for(written.wait(), PATIENCE_SECONDS)


@pytest.fixture
async def fleet(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fake_checkpoint: Callable[..., Path]
) -> AsyncIterator[FleetDouble]:
    """The box `one` serves a, b and c, which is asked for most; `two` serves d alone."""
    monkeypatch.setattr(KnownBox, "path", str(fake_checkpoint("tiny")))
    fleet = FleetDouble()
    async with AsyncExitStack() as stack:
        for name, models in (("one", "abc"), ("two", "d")):
            directory = tmp_path / name
            directory.mkdir()
            config = directory / "appliance.toml"
            tables = "".join([MODEL.format(name=model) for model in models])
            config.write_text(CONFIG + tables, encoding="utf-8")
            known = small(models)
            box = KnownBox(monkeypatch, known, setup_of(known, policy="serverlessllm"))
            box.world.models.update(small("abcd"))
            if fleet.boxes:  # workers of both look into the world of the second, too
                box.world.lives = fleet.boxes["one"].world.lives
            box.start()
            ledger = await stack.enter_async_context(opened(directory / "usage", now=time.time))
            for model in models:
                await used(ledger, model, DEMANDS.get(model, 0.0))
            settings = LiveConfig(box.daemon, load_config(config), config)
            access = Access(None, wall_clock=time.time)
            app = create_app(box.daemon, settings=settings, ledger=ledger, access=access)
            port = await stack.enter_async_context(served(app))
            fleet.boxes[name], fleet.configs[name] = box, config
            fleet.settings[name] = settings
            fleet.urls[name] = f"http://127.0.0.1:{port}"
        task = asyncio.create_task(working(fleet))
        yield fleet
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    for box in fleet.boxes.values():
        box.daemon.host.close()
        assert box.take_failures() == []


async def test_a_plan_is_made_applied_and_then_empty(fleet: FleetDouble, tmp_path: Path) -> None:
    """The busy box gives a model away, which the other one serves before."""
    file = tmp_path / "plan.json"
    planned = await fleet.run("plan", str(file), *fleet.asked())
    assert planned.exit_code == 0, planned.output
    assert planned.output.startswith("1. move a one -> two, 3.9KiB to read: one is asked for")

    first = await fleet.run("apply", str(file), "--wait", "10")
    assert first.exit_code == 0, first.output
    assert first.output.splitlines() == [
        "1. a: two serves it; one serves it no more; its files stay",
        "1 of 1 steps changed something",
    ]
    assert (fleet.names("one"), fleet.names("two")) == (["b", "c"], ["d", "a"])
    table = load_config(fleet.configs["two"]).models[-1]
    assert (table.max_context, table.path) == (256, KnownBox.path)

    again = await fleet.run("apply", str(file), "--wait", "10")
    assert "1. a: as planned already\n0 of 1 steps" in again.output
    more = await fleet.run("plan", str(file), *fleet.asked())
    assert more.output == "nothing to do: no step is worth it\n"


async def test_a_box_keeps_a_model_while_its_requests_go_on(
    fleet: FleetDouble, tmp_path: Path
) -> None:
    """The command says so, and goes on when it is called again; nothing is lost."""
    file = tmp_path / "plan.json"
    await fleet.run("plan", str(file), *fleet.asked())
    fleet.resting.add("one")
    stream = fleet.boxes["one"].ask("r", "a", output=5)

    early = await fleet.run("apply", str(file), "--wait", "3")
    assert early.exit_code == 1
    assert "step 1, move of a: requests of a go on on one; apply the plan again" in early.stderr
    assert json.loads(await fleet.get("one", "/api/models/a"))["draining"]
    assert json.loads(await fleet.get("two", "/api/models/a"))["state"] == "cold"

    fleet.resting.clear()
    assert sum([len(batch) async for batch in stream]) == 5
    late = await fleet.run("apply", str(file), "--wait", "10")
    assert "1. a: one serves it no more" in late.output
    assert fleet.names("one") == ["b", "c"]


async def test_the_last_box_with_a_model_keeps_it(fleet: FleetDouble, tmp_path: Path) -> None:
    """Whatever the plan says; the steps behind it are not taken."""
    file = tmp_path / "plan.json"
    steps = [
        {"kind": "drop", "model": model, "source": "one", "reason": "by hand"} for model in "ab"
    ]
    file.write_text(json.dumps({"hold": "catalogue", "urls": fleet.urls, "steps": steps}))

    result = await fleet.run("apply", str(file), "--wait", "10")
    assert result.exit_code == 1
    assert "step 1, drop of a: no other box of the plan is ready to serve a" in result.stderr
    assert fleet.names("one") == ["a", "b", "c"]
    assert not json.loads(await fleet.get("one", "/api/models/a"))["draining"]


async def test_a_refusal_ends_the_command(fleet: FleetDouble, tmp_path: Path) -> None:
    """With the words of the box; the model stays where it is."""
    file = tmp_path / "plan.json"
    await fleet.run("plan", str(file), *fleet.asked())
    plan = json.loads(file.read_text(encoding="utf-8"))
    plan["tables"]["a"]["tool_parser"] = "nothing"
    file.write_text(json.dumps(plan), encoding="utf-8")

    result = await fleet.run("apply", str(file), "--wait", "10")
    assert result.exit_code == 1
    assert "error: step 1, move of a: two refuses: " in result.stderr
    assert "tool_parser" in result.stderr
    assert fleet.names("one") == ["a", "b", "c"]


async def test_files_that_a_box_lacks_come_from_another_one(
    fleet: FleetDouble, tmp_path: Path
) -> None:
    """The command that is said brings them, and the plan goes on with its own terms."""
    file = tmp_path / "plan.json"
    await fleet.run("plan", str(file), *fleet.asked())
    plan = json.loads(file.read_text(encoding="utf-8"))
    plan["tables"]["a"]["path"] = "/only/on/one"
    file.write_text(json.dumps(plan), encoding="utf-8")

    result = await fleet.run("apply", str(file), "--wait", "10")
    assert result.exit_code == 1
    where = fleet.configs["two"].parent / "models" / "a"
    said = f"two has no files of a, neither in /only/on/one nor in {where}: run `"
    assert said in result.stderr
    command = shlex.split(result.stderr.partition("run `")[2].partition("`")[0])
    assert command == ["appliance", "pull", "a", "--from", fleet.urls["one"], "--no-add"]
    assert fleet.names("one") == ["a", "b", "c"]

    words = [*command[1:], "--url", fleet.urls["two"]]
    pulled = await asyncio.to_thread(CliRunner().invoke, cli, words)
    assert pulled.exit_code == 0, pulled.output
    again = await fleet.run("apply", str(file), "--wait", "10")
    assert again.exit_code == 0, again.output
    assert again.output.startswith("1. a: two serves it, from its folder of models; one serves")
    assert (fleet.names("one"), fleet.names("two")) == (["b", "c"], ["d", "a"])
    table = load_config(fleet.configs["two"]).models[-1]
    assert (table.path, table.max_context) == (str(where), 256)


async def test_a_box_that_may_pulls_what_it_lacks(fleet: FleetDouble, tmp_path: Path) -> None:
    """From the box that has it, which gives the model up then."""
    file, checkpoint = tmp_path / "plan.json", tmp_path / "tiny"
    await fleet.run("plan", str(file), *fleet.asked())
    plan = json.loads(file.read_text(encoding="utf-8"))
    plan["tables"]["a"]["path"] = "/only/on/one"
    file.write_text(json.dumps(plan), encoding="utf-8")
    running = fleet.settings["two"]._running
    catalog = replace(running.catalog, peers=(fleet.urls["one"],))
    fleet.settings["two"]._running = replace(running, catalog=catalog)

    (checkpoint / "SHA256SUMS").write_text(f"{'a' * 64}  model.safetensors\n")
    result = await fleet.run("apply", str(file), "--wait", "10")
    assert result.exit_code == 1
    assert "two cannot pull a from " in result.stderr
    assert "came damaged" in result.stderr
    assert fleet.names("one") == ["a", "b", "c"]

    (checkpoint / "SHA256SUMS").unlink()
    result = await fleet.run("apply", str(file), "--wait", "10")
    assert result.exit_code == 0, result.output
    assert result.output.splitlines() == [
        "two pulls a from one",
        "1. a: two pulled its files, and serves it; one serves it no more; its files stay",
        "1 of 1 steps changed something",
    ]
    assert (fleet.names("one"), fleet.names("two")) == (["b", "c"], ["d", "a"])
    table = load_config(fleet.configs["two"]).models[-1]
    assert table.path == str(fleet.configs["two"].parent / "models" / "a")


async def test_a_box_without_a_folder_for_models(fleet: FleetDouble, tmp_path: Path) -> None:
    """Is to get one first."""
    file = tmp_path / "plan.json"
    await fleet.run("plan", str(file), *fleet.asked())
    plan = json.loads(file.read_text(encoding="utf-8"))
    plan["tables"]["a"]["path"] = "/only/on/one"
    file.write_text(json.dumps(plan), encoding="utf-8")
    running = fleet.settings["two"]._running
    fleet.settings["two"]._running = replace(running, catalog=replace(running.catalog, folder=""))

    result = await fleet.run("apply", str(file), "--wait", "10")
    assert result.exit_code == 1
    assert "and no folder for models: set catalog.folder in its configuration" in result.stderr


async def test_pins_are_planned_where_models_are_served(fleet: FleetDouble, tmp_path: Path) -> None:
    """Those that are asked for stay in the host caches of boxes that serve them."""
    file, seen = tmp_path / "plan.json", tmp_path / "seen.json"
    planned = await fleet.run(
        "plan", str(file), *fleet.asked(), "--hold", "pins", "--write-observed", str(seen)
    )
    assert [line.split()[1:5] for line in planned.output.splitlines()] == [
        ["first", model, "->", "one,"] for model in "abc"
    ]
    assert (await fleet.run("apply", str(file), "--wait", "10")).exit_code == 0
    assert json.loads(await fleet.get("one", "/api/models/b"))["terms"]["pinned"]
    assert [model.pin for model in load_config(fleet.configs["one"]).models] == [True] * 3

    again = await fleet.run("plan", str(file), "--observed", str(seen), "--hold", "pins")
    assert again.output == planned.output


async def test_what_is_wrong_with_a_box_is_said(fleet: FleetDouble, tmp_path: Path) -> None:
    """No plan is made without one of the boxes."""
    file = tmp_path / "plan.json"
    gone = await fleet.run("plan", str(file), *fleet.asked(), "--box", "gone=http://127.0.0.1:9")
    assert "error: gone does not answer" in gone.stderr

    none = await fleet.run("plan", str(file))
    assert (none.exit_code, "give --box for each box" in none.stderr) == (2, True)
    assert not file.exists()
    file.write_text('{"steps": 1}', encoding="utf-8")
    assert "error: " in (await fleet.run("apply", str(file), "--wait", "10")).stderr


def test_later_days_count_more() -> None:
    """A model that was used all day today counts more than one that was a week ago; one that was
    used as much each day is expected to be so."""
    half = DAY_SECONDS / 2
    steady = forecast(dict.fromkeys(range(1, 8), 0.3 * DAY_SECONDS) | {0: 0.3 * half}, 7, half)
    assert steady == pytest.approx(0.3)
    new = forecast({0: half}, 7, half)
    assert new > 3 * forecast({7: half}, 7, half)
    assert forecast({0: half}, 0, half) == 1.0
