"""Models that come and go with the files: what a reload adds and takes away, and what waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import msgspec

from appliance.config.layers import directory
from tests.unit.api.test_catalog_changes import (
    CONFIG,
    box,
    call,
    checkpoint,
    client,
    path,
    served_names,
    settings,
)
from tests.unit.doubles.daemon import Box, small
from tests.unit.doubles.serving import Call

__all__ = ["box", "call", "checkpoint", "client", "path", "settings"]

TABLE_A, TABLE_B = (
    f'[[model]]\nname = "{name}"\npath = "tiny"\nmax_context = 256\n' for name in "ab"
)
NEW = """
[[model]]
name = "new"
path = "new"
max_context = 512
pin = true
max_queue = 7
slo = { ttft = "3s" }
"""


def rewrite(path: Path, *replaced: tuple[str, str], more: str = "") -> None:
    """What the file says from now on: `CONFIG`, with something else in place of some of it."""
    text = CONFIG
    for old, new in replaced:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text + more, encoding="utf-8")


async def needs(client: httpx.AsyncClient) -> dict[str, str]:
    """What `appliance config diff` shows: what each change needs."""
    changes = (await client.post("/api/config/check")).json()["changes"]
    return {row["key"]: row["applies"] for row in changes}


async def reload(client: httpx.AsyncClient) -> tuple[list[str], list[str]]:
    """Keys that a reload applied, and keys that wait."""
    answer = await client.post("/api/config/reload")
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return [row["key"] for row in told["applied"]], [row["key"] for row in told["restart"]]


async def test_a_table_that_was_added(box: Box, client: httpx.AsyncClient, path: Path) -> None:
    """It is built and served on its terms while another one runs; nothing differs then."""
    running = box.ask("r1", "a", output=30)
    box.work_until(lambda: box.world.lives["r1"].produced == 3)
    rewrite(path, more=NEW)
    before = await needs(client)

    told = await reload(client)
    added = box.ask("r2", "new")
    box.settle()

    assert before == {"model.new": "reload"}
    assert told == (["model.new"], [])
    shown = (await client.get("/api/models/new")).json()
    assert shown["terms"]["slo"]["ttft_seconds"] == 3
    assert (shown["terms"]["max_queue"], shown["terms"]["pinned"]) == (7, True)
    assert sum([len(batch) async for batch in running]) == 30
    assert sum([len(batch) async for batch in added]) == 5
    assert await needs(client) == {}
    assert not (directory(path) / "50-admin.toml").exists()


async def test_a_table_that_was_taken_out(box: Box, client: httpx.AsyncClient, path: Path) -> None:
    """The model takes no new requests, and goes when the last one has ended."""
    running = box.ask("r1", "a", output=30)
    box.work_until(lambda: box.world.lives["r1"].produced == 3)
    rewrite(path, (TABLE_A, ""))
    before = await needs(client)

    told = await reload(client)
    leaving = (await client.get("/api/models/a")).json()["state"]
    refused = await client.post("/v1/completions", json={"model": "a", "prompt": "x"})
    box.settle()

    assert before == {"model.a": "reload"}
    assert told == (["model.a"], [])
    assert (leaving, refused.status_code) == ("removing", 404)
    assert sum([len(batch) async for batch in running]) == 30
    assert (await client.get("/api/models/a")).status_code == 404
    assert (path.parent / "tiny").is_dir()
    assert await needs(client) == {}


async def test_all_models_are_others(box: Box, client: httpx.AsyncClient, path: Path) -> None:
    """What comes is there before what goes."""
    rewrite(path, (f"{TABLE_A}\n{TABLE_B}", ""), more=NEW)

    applied, waiting = await reload(client)
    box.settle()

    assert (sorted(applied), waiting) == (["model.a", "model.b", "model.new"], [])
    assert [card.id for card in box.daemon.models()] == ["new"]


async def test_a_model_that_was_switched_off_and_on(
    box: Box, client: httpx.AsyncClient, path: Path
) -> None:
    """By a drop-in, and by taking it away again; also what operators wrote is undone so."""
    mine = directory(path) / "60-mine.toml"
    mine.parent.mkdir()
    mine.write_text('[[model]]\nname = "a"\nenabled = false\n')
    await reload(client)
    box.settle()
    gone = [card.id for card in box.daemon.models()]
    mine.unlink()
    box.world.models["a"] = small("a")["a"]
    await reload(client)
    box.settle()
    back = [card.id for card in box.daemon.models()]
    await client.post("/api/models", json={"name": "new", "path": "new"})
    box.settle()
    (directory(path) / "50-admin.toml").unlink()
    await reload(client)
    box.settle()

    assert (gone, back) == (["b"], ["b", "a"])
    assert [card.id for card in box.daemon.models()] == ["b", "a"]


async def test_a_name_that_is_still_leaving_comes_later(
    box: Box, client: httpx.AsyncClient, path: Path
) -> None:
    """The next reload adds it, when nothing is left of the one that had it."""
    running = box.ask("r1", "a", output=30)
    box.work_until(lambda: box.world.lives["r1"].produced == 3)
    rewrite(path, (TABLE_A, ""))
    await reload(client)
    rewrite(path)

    early = await reload(client)
    waits = await needs(client)
    box.settle()
    box.world.models["a"] = small("a")["a"]
    late = await reload(client)

    assert (early, waits) == (([], ["model.a"]), {"model.a": "reload"})
    assert sum([len(batch) async for batch in running]) == 30
    assert late == (["model.a"], [])
    assert box.daemon.model("a").id == "a"


async def test_a_model_waits_with_the_devices_that_it_needs(
    box: Box, client: httpx.AsyncClient, path: Path
) -> None:
    """Whether it fits was read off those of the files. Nobody else can add one meanwhile, and the
    last model that is served does not go before it."""
    larger = ('memory = "8MiB"', 'memory = "16MiB"')
    rewrite(path, larger, more=NEW)
    told = await reload(client)
    refused = await client.post("/api/models", json={"name": "more", "path": "new"})
    rewrite(path, larger, (f"{TABLE_A}\n{TABLE_B}", ""), more=NEW)
    replaced = await needs(client)
    applied, _ = await reload(client)

    assert told == ([], ["devices.memory", "model.new"])
    assert (refused.status_code, "waits for a restart" in refused.text) == (409, True)
    assert replaced == dict.fromkeys(
        ["devices.memory", *map("model.{}".format, ["a", "b", "new"])], "restart"
    )
    assert applied == []
    assert [card.id for card in box.daemon.models()] == ["a", "b"]
    assert served_names(path) == ["new"]


async def test_a_model_that_cannot_be_served_changes_nothing(
    box: Box, client: httpx.AsyncClient, path: Path
) -> None:
    """Nothing else of the files is applied then."""
    table = '[[model]]\nname = "bad"\npath = "new"\nmax_context = 4096\n'
    rewrite(path, (TABLE_A, ""), more=f"{NEW}{table}")

    answer = await client.post("/api/config/reload")

    assert (answer.status_code, "more than the model's" in answer.text) == (422, True), answer.text
    assert [card.id for card in box.daemon.models()] == ["a", "b"]


async def test_on_the_command_line(call: Call, box: Box, path: Path) -> None:
    """What comes and what goes, with its path."""
    rewrite(path, (TABLE_A, ""), more=NEW)

    differs = await call("config", "diff")
    applied = await call("reload")
    box.settle()

    rows = [line.split() for line in differs.stdout.splitlines()]
    assert rows[1:] == [
        ["model.a", str(path.parent / "tiny"), "-", "reload"],
        ["model.new", "-", str(path.parent / "new"), "reload"],
    ]
    assert applied.stdout.startswith("2 applied, 0 wait for a restart\n")
    assert [card.id for card in box.daemon.models()] == ["b", "new"]


async def test_aliases_come_and_go(box: Box, client: httpx.AsyncClient, path: Path) -> None:
    """Front ends are told, and lists have them with what they stand for."""
    rewrite(path, (TABLE_A, f'{TABLE_A}aliases = ["gpt-4o"]\n'))
    before = await needs(client)
    told = await reload(client)
    listed = {row["id"]: row["root"] for row in (await client.get("/v1/models")).json()["data"]}
    one = (await client.get("/v1/models/gpt-4o:latest")).json()
    tags = [row["name"] for row in (await client.get("/api/tags")).json()["models"]]
    shown = await client.post("/api/show", json={"model": "gpt-4o"})
    terms = (await client.get("/api/models/a")).json()["terms"]
    taken = await client.post("/api/models", json={"name": "gpt-4o", "path": "new"})

    assert before == {"model.a.aliases": "reload"}
    assert told == (["model.a.aliases"], [])
    assert listed == {"a": "a", "gpt-4o": "a", "b": "b"}
    assert (one["id"], one["root"]) == ("gpt-4o", "a")
    assert tags == ["a:latest", "gpt-4o:latest", "b:latest"]
    assert shown.json()["details"]["parent_model"] == "a"
    assert terms["aliases"] == ["gpt-4o"]
    assert taken.status_code in (409, 422)
    assert [front.aliases for front in box.daemon.front_models()] == [("gpt-4o",), ()]

    rewrite(path)
    await reload(client)
    assert (await client.get("/v1/models/gpt-4o")).status_code == 404
    assert [front.aliases for front in box.daemon.front_models()] == [(), ()]


async def test_a_model_that_is_to_be_loaded_is_loaded(
    box: Box, client: httpx.AsyncClient, path: Path
) -> None:
    """Without a request: one that is served already, and one that is added."""
    box.settle()
    rewrite(path, (TABLE_B, f"{TABLE_B}load = true\n"), more=f"{NEW}load = true\n")
    told = await reload(client)
    box.settle()

    where = {row.model: row.residency.get("0") for row in box.daemon.activity().models}
    assert told == (["model.b.load", "model.new"], [])
    assert (where["b"], where["new"]) == ("loaded", "loaded")
    assert where["a"] != "loaded"
    assert await needs(client) == {}


async def test_what_is_to_be_loaded_at_the_start_is(box: Box) -> None:
    """Before the first request."""
    served = box.daemon.catalogue.served
    served["b"] = msgspec.structs.replace(served["b"], load=True)
    box.daemon.catalogue.load_wanted()
    box.settle()

    where = {row.model: row.residency.get("0") for row in box.daemon.activity().models}
    assert where["b"] == "loaded"
    assert where["a"] != "loaded"


async def test_other_instances_wait_for_a_restart(client: httpx.AsyncClient, path: Path) -> None:
    """Engines are where the daemon built them at its start."""
    rewrite(path, (TABLE_A, f"{TABLE_A}instances = [0]\n"))

    assert await needs(client) == {"model.a.instances": "restart"}
    assert await reload(client) == ([], ["model.a.instances"])
