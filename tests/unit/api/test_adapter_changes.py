"""LoRA adapters that come to a model while it serves, and leave it, over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from litestar import Litestar

from appliance.api.app import create_app
from appliance.checkpoints.adapters import ADAPTER_WEIGHTS, AdapterPlace, adapter_version
from appliance.config.admin_file import AdminFile
from appliance.config.layers import ADMIN_FILE, directory
from appliance.config.loader import load_config
from appliance.daemon.adapters import changes
from appliance.daemon.reload import LiveConfig
from appliance.errors import NotSaved
from appliance.journal import Journal, replay
from appliance.service.interface import ModelNotFound, SubmitRequest
from appliance.vocabulary import StoreWeights
from appliance.worker import frames
from tests.patience import PATIENCE_SECONDS
from tests.unit.checkpoints.test_adapters import Q, make_base, pair
from tests.unit.checkpoints.test_adapters import make as make_adapter
from tests.unit.doubles.daemon import Box, Client, setup_of, small
from tests.unit.doubles.instance import Life
from tests.unit.doubles.serving import commanded, unserved

CONFIG = """\
[devices]
memory = "8MiB"
slab = "64KiB"
host_cache = "16MiB"

[catalog]
folder = "models"

[policy]
use = ["serverlessllm"]

[[model]]
name = "a"
path = "base"
max_context = 64

[[model]]
name = "b"
path = "base"
max_context = 64
"""
NEW = {"name": "new", "path": "base", "dtype": "float32", "max_context": 64, "max_loras": 2}
ROOM = {"adapters": [], "max_loras": 2, "max_lora_rank": 4}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    make_base(tmp_path / "base")
    for name in ("legal", "polite", "third"):
        make_adapter(tmp_path, pair(Q), name)
    make_adapter(tmp_path, pair(Q, 8), "large", r=8)
    path = tmp_path / "appliance.toml"
    path.write_text(CONFIG, encoding="utf-8")
    return path


@pytest.fixture
async def box(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[Box]:
    """A box with two workers; what happens is written down, and replays."""
    models = small("ab")
    setup = setup_of(models, instances=2)
    journal = Journal(tmp_path / "journal", setup)
    box = Box(monkeypatch, models, setup, journal=journal)
    box.start()
    box.world.models["new"] = small("n")["n"]
    yield box
    await box.daemon.adapters.stop()
    box.daemon.host.close()
    assert box.take_failures() == []
    journal.close()
    assert replay(tmp_path / "journal")[1] == []


@pytest.fixture
def app(box: Box, path: Path) -> Litestar:
    return create_app(box.daemon, settings=LiveConfig(box.daemon, load_config(path), path))


@pytest.fixture
async def client(box: Box, app: Litestar) -> AsyncIterator[httpx.AsyncClient]:
    async with unserved(app) as client:
        added = await client.post("/api/models", json={**NEW, "max_lora_rank": 4})
        assert added.status_code == 200, added.text
        box.settle()
        yield client


async def load(client: httpx.AsyncClient, name: str, **more: Any) -> httpx.Response:
    body = {"name": name, "path": name, **more}
    return await client.post("/api/models/new/adapters", json=body)


def ask(box: Box, name: str, adapter: str, output: int = 30) -> Client:
    """A request for an adapter of the model."""
    box.world.lives[name] = Life("new", 20, output, output)
    client = box.clients[name] = Client(name)
    client.generation = box.daemon.submit(
        SubmitRequest(
            id=name,
            model="new",
            asked=f"new:{adapter}",
            prompt=tuple(range(20)),
            max_tokens=output,
            body=b"",
        ),
        client,
    )
    return client


def place(folder: Path, name: str, slot: int = 0) -> AdapterPlace:
    """Of the files that are there now."""
    return AdapterPlace(name, str(folder / name), slot, adapter_version(folder / name))


def named(box: Box) -> tuple[str, ...]:
    """What clients may ask for."""
    return box.daemon.front_models()[-1].adapters


def put(box: Box, number: int = 0) -> list[frames.PutAdapters]:
    return box.workers[number].heard(frames.PutAdapters)


async def test_an_adapter_comes_and_goes(
    box: Box, client: httpx.AsyncClient, path: Path, tmp_path: Path
) -> None:
    """Workers that have the weights are told twice at least, and write to the image; requests of
    another adapter go on meanwhile, and a restart finds what there is."""
    assert (await load(client, "legal")).status_code == 200
    running = ask(box, "r1", "legal")
    box.work_until(lambda: box.world.lives["r1"].produced == 3)

    answer = await load(client, "polite")
    asked = ask(box, "r2", "polite")
    box.settle()

    assert answer.status_code == 200, answer.text
    facts = answer.json()["facts"]
    assert (facts["adapters"], facts["max_loras"]) == (["new:legal", "new:polite"], 2)
    assert named(box) == ("new:legal", "new:polite")
    legal, polite = place(tmp_path, "legal"), place(tmp_path, "polite", 1)
    assert [(one.adapters, one.slots) for one in put(box)[-2:]] == [((legal, polite), (1,))] * 2
    assert any(one.image for one in (*put(box)[-2:], *put(box, 1)[-2:]))
    assert box.workers[0].configuration.models[-1].adapters == (legal, polite)
    assert sum([len(batch) async for batch in running]) == 30
    assert sum([len(batch) async for batch in asked]) == 30
    listed = (await client.get("/v1/models")).json()["data"]
    assert [one["id"] for one in listed[-2:]] == ["new:legal", "new:polite"]
    assert [one.name for one in load_config(path).models[-1].adapters] == ["legal", "polite"]
    assert (await client.post("/api/config/check")).json()["changes"] == []

    gone = await client.delete("/api/models/new/adapters/legal")
    await box.daemon.adapters.cleared()

    assert gone.json() == {"model": "new:legal", "live": 0, "files": False}
    assert named(box) == ("new:polite",)
    assert [(one.adapters, one.slots) for one in put(box)[-2:]] == [((polite,), (0,))] * 2
    assert [one.name for one in load_config(path).models[-1].adapters] == ["polite"]
    assert (await client.delete("/api/models/new/adapters/legal")).status_code == 404
    assert (await load(client, "third")).status_code == 200
    assert box.workers[0].configuration.models[-1].adapters[-1].slot == 0


async def test_requests_of_one_that_leaves_go_on(box: Box, client: httpx.AsyncClient) -> None:
    """New ones are refused at once, and its place is free when the last one has ended."""
    await load(client, "legal")
    await load(client, "polite")
    running = ask(box, "r1", "legal")
    box.work_until(lambda: box.world.lives["r1"].produced == 3)

    gone = await client.delete("/api/models/new/adapters/legal")
    with pytest.raises(ModelNotFound):
        ask(box, "r2", "legal")
    again, full = await load(client, "legal"), await load(client, "third")

    assert gone.json()["live"] == 1
    assert again.status_code == 409
    assert full.status_code == 409
    assert "2 of max_loras = 2 are taken" in full.text
    box.settle()
    assert sum([len(batch) async for batch in running]) == 30
    await box.daemon.adapters.cleared()
    assert (await load(client, "third")).status_code == 200
    assert named(box) == ("new:polite", "new:third")


async def test_requests_are_ended_by_force(box: Box, client: httpx.AsyncClient) -> None:
    await load(client, "legal")
    running, other = ask(box, "r1", "legal"), box.ask("r2", "new", output=30)
    box.work_until(lambda: box.world.lives["r1"].produced == 3)
    box.world.lives["r1"].outcome = "cancelled"

    gone = await client.delete("/api/models/new/adapters/legal?force=true")
    box.settle()
    await box.daemon.adapters.cleared()

    assert gone.json()["live"] == 0
    with pytest.raises(Exception, match="new:legal was removed"):
        [batch async for batch in running]
    assert sum([len(batch) async for batch in other]) == 30


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"name": "large", "path": "large"}, 422, "rank 8, more than max_lora_rank (4)"),
        ({"name": "legal", "path": "nowhere"}, 422, "has no adapter_config.json"),
        ({"name": "no name", "path": "legal"}, 422, "name"),
        ({"name": "latest", "path": "legal"}, 422, "Ollama's name"),
        ({"name": "known", "path": "legal"}, 409, "in the catalogue already"),
        ({"name": "legal"}, 400, "path"),
        ({"name": "legal", "path": "legal", "rank": 4}, 400, "rank"),
    ],
)
async def test_what_cannot_come_is_refused(
    box: Box,
    client: httpx.AsyncClient,
    path: Path,
    body: dict[str, Any],
    status: int,
    message: str,
) -> None:
    """Before anything is written."""
    await load(client, "known", path="legal")
    before, heard = load_config(path), len(box.workers[0].sent)

    answer = await client.post("/api/models/new/adapters", json=body)

    assert (answer.status_code, message in answer.text) == (status, True), answer.text
    assert load_config(path) == before
    assert len(box.workers[0].sent) == heard
    assert named(box) == ("new:known",)


async def test_a_model_without_room_has_the_adapters_it_began_with(
    client: httpx.AsyncClient,
) -> None:
    answer = await client.post("/api/models/a/adapters", json={"name": "legal", "path": "legal"})
    missing = await client.post("/api/models/c/adapters", json={"name": "legal", "path": "legal"})

    assert (answer.status_code, missing.status_code) == (409, 404)
    assert "max_loras is 0" in answer.text


async def test_a_worker_that_cannot_read_it_changes_nothing(
    box: Box, client: httpx.AsyncClient, path: Path
) -> None:
    """The place is cleared again, everywhere."""
    box.workers[1].refuses_adapters = "legal/adapter_model.safetensors was replaced"
    answer = await load(client, "legal")
    box.workers[1].refuses_adapters = None

    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "adapter_not_placed")
    assert "was replaced" in answer.text
    assert named(box) == ()
    assert put(box)[-1].adapters == ()
    assert load_config(path).models[-1].adapters == ()
    assert (await load(client, "legal")).status_code == 200


@pytest.fixture
def grouped(path: Path) -> None:
    """Each instance is a group of its own."""
    names = "".join([f'[[devices.group]]\nname = "{name}"\n\n' for name in ("one", "two")])
    path.write_text(CONFIG.replace("[catalog]", f"{names}[catalog]"), encoding="utf-8")


@pytest.mark.usefixtures("grouped")
async def test_only_instances_that_can_have_the_model_are_asked(box: Box, app: Litestar) -> None:
    """Those of its groups: another one need not answer, and may not refuse."""
    box.workers[0].refuses_adapters = "a model that this instance never has"
    async with unserved(app) as client:
        added = await client.post("/api/models", json={**NEW, "groups": ["two"]})
        box.settle()
        answer = await load(client, "legal")

    assert (added.status_code, answer.status_code) == (200, 200), answer.text
    assert put(box, 0) == []
    assert len(put(box, 1)) >= 2


@pytest.fixture
async def stuck(
    box: Box, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> httpx.Response:
    """The answer when no worker carried out an order for an adapter in time, nor the order that
    takes it back. Both have the model's weights, and another adapter. They answer from now on."""
    await load(client, "legal")
    asked = ask(box, "r0", "legal")
    box.settle()
    assert sum([len(batch) async for batch in asked]) == 30
    with monkeypatch.context() as patch:
        patch.setattr(changes, "ANSWER_SECONDS", 0)
        for worker in box.workers.values():
            worker.puts_adapters = False
        answer = await load(client, "polite")
        for worker in box.workers.values():
            worker.puts_adapters = True
    return answer


def answer_late(box: Box, number: int, kept: int = 0) -> None:
    """A worker carries out the orders that it has, but for the last `kept`."""
    late = put(box, number)[-2:]
    for order in late[: len(late) - kept]:
        box.workers[number].deliver(frames.AdaptersPut(number, order.number))


async def test_an_image_is_held_until_late_orders_are_carried_out(
    box: Box, client: httpx.AsyncClient, stuck: httpx.Response
) -> None:
    """A worker writes to its slabs then, long after the client had its answer."""
    images = box.daemon.machine.weight_cache
    assert (stuck.status_code, stuck.json()["error"]["code"]) == (409, "adapter_not_placed")
    assert any(order.image for number in (0, 1) for order in put(box, number)[-2:])

    await client.post("/api/models/new/evict")
    assert (await client.delete("/api/models/new")).status_code == 200
    box.settle()
    assert images.get("new") is not None
    answer_late(box, 0)
    answer_late(box, 1, kept=1)
    box.settle()
    assert images.get("new") is not None

    answer_late(box, 1)
    box.settle()
    assert images.get("new") is None


async def test_a_worker_that_died_writes_no_more(
    box: Box, client: httpx.AsyncClient, stuck: httpx.Response
) -> None:
    images = box.daemon.machine.weight_cache
    await client.delete("/api/models/new")
    for worker in box.workers.values():
        worker.die()
    await asyncio.sleep(0)

    assert stuck.status_code == 409
    assert box.daemon.adapters.held == set()
    box.workers[0].greet()
    box.settle()
    assert images.get("new") is None


async def test_one_that_could_not_be_put_back_is_put_or_removed(
    box: Box, client: httpx.AsyncClient, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing asks for it meanwhile, as what is in its place is undefined."""
    await load(client, "legal")
    box.settle()
    third = {"lora_name": "legal", "lora_path": "third", "load_inplace": True}

    async def fail() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(changes, "ANSWER_SECONDS", 0)
            box.workers[0].puts_adapters = False
            answer = await client.post("/v1/load_lora_adapter", json=third)
            box.workers[0].puts_adapters = True
        assert answer.status_code == 409
        assert named(box) == ()

    await fail()
    again = await client.post("/v1/load_lora_adapter", json=third)
    assert (again.status_code, named(box)) == (200, ("new:legal",)), again.text

    await fail()
    gone = await client.delete("/api/models/new/adapters/legal")
    await box.daemon.adapters.cleared()
    assert gone.status_code == 200, gone.text
    assert load_config(path).models[-1].adapters == ()
    assert (await load(client, "legal")).status_code == 200
    assert named(box) == ("new:legal",)


async def test_an_adapter_is_saved_before_it_is_shown(
    box: Box, client: httpx.AsyncClient, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it cannot be, the answer says that, though a worker fails as it is taken back, too."""

    def write(admin: AdminFile, text: str) -> None:
        assert named(box) == ()
        box.workers[1].refuses_adapters = "the disk is full here, too"
        raise NotSaved("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(AdminFile, "write", write)
        answer = await load(client, "legal")

    assert "the disk is full; nothing was changed" in answer.text
    assert named(box) == ()
    assert load_config(path).models[-1].adapters == ()
    box.workers[1].refuses_adapters = None
    assert (await load(client, "legal")).status_code == 200


async def test_requests_of_one_that_was_removed_are_ended_by_force(
    box: Box, client: httpx.AsyncClient
) -> None:
    await load(client, "legal")
    running = ask(box, "r1", "legal")
    box.work_until(lambda: box.world.lives["r1"].produced == 3)
    box.world.lives["r1"].outcome = "cancelled"

    first = await client.delete("/api/models/new/adapters/legal")
    files = await client.delete("/api/models/new/adapters/legal?force=true&files=true")
    second = await client.delete("/api/models/new/adapters/legal?force=true")
    box.settle()
    await box.daemon.adapters.cleared()

    assert (files.status_code, "files of adapters are not deleted" in files.text) == (400, True)
    assert [answer.json()["live"] for answer in (first, second)] == [1, 0]
    with pytest.raises(Exception, match="new:legal was removed"):
        [batch async for batch in running]
    assert (await client.delete("/api/models/new/adapters/legal")).status_code == 404


async def test_a_model_that_leaves_has_its_name_until_it_is_gone(
    box: Box, client: httpx.AsyncClient
) -> None:
    """Its requests, and those of an adapter of the same full name, could not be told apart."""
    box.world.models["new:legal"] = small("n")["n"]
    await client.post("/api/models", json={**NEW, "name": "new:legal", "max_loras": 0})
    running = box.ask("r1", "new:legal", output=30)
    box.work_until(lambda: box.world.lives["r1"].produced == 3)
    await client.delete("/api/models/new:legal")

    early = await load(client, "legal")
    box.settle()
    assert sum([len(batch) async for batch in running]) == 30

    assert (early.status_code, "new:legal" in early.text) == (409, True)
    assert (await load(client, "legal")).status_code == 200


async def test_workers_are_told_what_the_files_have_to_be(
    box: Box, client: httpx.AsyncClient, tmp_path: Path
) -> None:
    """Of another adapter, what they were when it came."""
    await load(client, "legal")
    known = place(tmp_path, "legal")
    (tmp_path / "legal" / ADAPTER_WEIGHTS).touch()  # another version

    assert (await load(client, "polite")).status_code == 200

    assert put(box)[-1].adapters == (known, place(tmp_path, "polite", 1))


async def test_the_next_worker_begins_with_it(box: Box, client: httpx.AsyncClient) -> None:
    """One that dies after an order to load an adapter is not waited for."""
    box.workers[0].puts_adapters = False
    loading = asyncio.create_task(load(client, "legal"))
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not put(box):  # noqa: ASYNC110
            await asyncio.sleep(0)
    box.workers[0].die()
    box.workers[0].puts_adapters = True
    box.workers[0].greet()
    answer = await loading
    box.settle()

    assert answer.status_code == 200, answer.text
    assert [one.name for one in box.workers[0].configuration.models[-1].adapters] == ["legal"]
    asked = ask(box, "r1", "legal")
    box.settle()
    assert sum([len(batch) async for batch in asked]) == 30


async def test_an_image_that_nothing_loads_from_is_filled_anew(
    box: Box, client: httpx.AsyncClient, tmp_path: Path
) -> None:
    """Nothing could write to it, and the next worker would take it as it is."""
    for worker in box.workers.values():
        worker.die()
    assert box.daemon.machine.weight_cache.get("new") is not None

    assert (await load(client, "legal")).status_code == 200

    assert box.daemon.machine.weight_cache.get("new") is None
    for worker in box.workers.values():
        worker.greet()
    box.settle()
    filled = [c for w in box.workers.values() for c in w.heard(StoreWeights) if c.model == "new"]
    assert [command.fill for command in filled].count(True) == 2


async def test_vllms_endpoints(
    box: Box, client: httpx.AsyncClient, path: Path, tmp_path: Path
) -> None:
    """Statuses and messages are vLLM's, names may be with the base or without."""
    there = str(tmp_path / "legal")

    async def call(verb: str, **body: Any) -> tuple[int, str]:
        answer = await client.post(f"/v1/{verb}_lora_adapter", json=body)
        return answer.status_code, answer.text

    assert await call("load", lora_name="legal", lora_path=there) == (
        200,
        "Success: LoRA adapter 'legal' added successfully.",
    )
    assert await call("load", lora_name="new:polite", lora_path=str(tmp_path / "polite")) == (
        200,
        "Success: LoRA adapter 'new:polite' added successfully.",
    )
    assert named(box) == ("new:legal", "new:polite")
    for body, status, message in (
        ({"lora_name": "legal", "lora_path": there}, 400, "has already been loaded"),
        ({"lora_name": "x"}, 400, "Both 'lora_name' and 'lora_path' must be provided."),
        ({"lora_name": "a", "lora_path": there}, 400, "conflicts with a served base model"),
        ({"lora_name": "x", "lora_path": "/nowhere"}, 404, "No adapter found for /nowhere"),
        ({"lora_name": "x", "lora_path": there, "base_model_name": "c"}, 404, "c"),
        ({"lora_name": "x", "lora_path": there, "base_model_name": "a"}, 409, "max_loras is 0"),
        ({"lora_name": "x", "lora_path": there, "is_3d_lora_weight": True}, 400, "is_3d"),
    ):
        found = await call("load", **body)
        assert (found[0], message in found[1]) == (status, True), found

    third = str(tmp_path / "third")
    running = ask(box, "r1", "legal")
    busy = await call("load", lora_name="legal", lora_path=third, load_inplace=True)
    box.settle()
    assert busy[0] == 409
    assert sum([len(batch) async for batch in running]) == 30
    replaced = await call("load", lora_name="legal", lora_path=third, load_inplace=True)
    assert replaced[0] == 200
    assert put(box)[-1].adapters[-1] == AdapterPlace(
        "legal", third, 0, adapter_version(tmp_path / "third")
    )
    assert {one.name: one.path for one in load_config(path).models[-1].adapters}["legal"] == third

    assert await call("unload", lora_name="legal", lora_int_id=1) == (
        200,
        "Success: LoRA adapter 'legal' removed successfully.",
    )
    assert (await call("unload", lora_name="legal"))[0] == 404
    assert (await call("unload"))[0] == 400
    assert (await call("unload", lora_name="new:polite"))[0] == 200
    await box.daemon.adapters.cleared()
    assert named(box) == ()


async def test_models_with_room_are_told_apart(client: httpx.AsyncClient, tmp_path: Path) -> None:
    await client.post("/api/models", json={**NEW, "name": "more"})
    body = {"lora_name": "legal", "lora_path": str(tmp_path / "legal")}

    unclear = await client.post("/v1/load_lora_adapter", json=body)
    for base in ("new", "more"):
        named = {**body, "base_model_name": base}
        assert (await client.post("/v1/load_lora_adapter", json=named)).status_code == 200
    which = await client.post("/v1/unload_lora_adapter", json={"lora_name": "legal"})

    assert (unclear.status_code, which.status_code) == (400, 400)
    assert "new, more" in unclear.text
    assert "new, more" in which.text


async def test_a_reload_exchanges_them(
    box: Box, client: httpx.AsyncClient, path: Path, tmp_path: Path
) -> None:
    """Without removal of the model: some go, some come, and one has other files."""
    await load(client, "legal")
    await load(client, "polite")
    drop_in = directory(path) / ADMIN_FILE
    text = drop_in.read_text(encoding="utf-8")
    text = text[text.index("[[model]]") :]  # without the line that vouches for it
    changed = text.replace(str(tmp_path / "polite"), str(tmp_path / "third"))
    changed = changed.replace('name = "legal"', 'name = "other"')
    drop_in.write_text(changed, encoding="utf-8")

    reload = (await client.post("/api/config/reload")).json()
    await box.daemon.adapters.cleared()

    assert [(one["key"], one["applies"]) for one in reload["applied"]] == [
        ("model.new.adapter", "reload")
    ]
    assert reload["restart"] == []
    assert set(named(box)) == {"new:other", "new:polite"}
    paths = {one.name: one.path for one in box.workers[0].configuration.models[-1].adapters}
    assert paths == {"other": str(tmp_path / "legal"), "polite": str(tmp_path / "third")}


@pytest.mark.usefixtures("client")
async def test_an_adapter_is_pulled_and_removed(app: Litestar, box: Box, tmp_path: Path) -> None:
    """From where it is to the folder of models, checked, and then to the model."""
    source, models = tmp_path / "legal", tmp_path / "models"
    (source / "optimizer.pt").write_text("")

    async with commanded(app) as call:
        no_model = await call("pull", str(source))
        pulled = await call("pull", str(source), "--adapter-of", "new")
        no_adapter = await call("pull", str(tmp_path / "base"), "--adapter-of", "new")
        too_large = await call("pull", str(tmp_path / "large"), "--adapter-of", "new", "--link")
        no_room = await call("pull", str(source), "--adapter-of", "a")
        shown = await call("show", "new")
        served = named(box)
        gone = await call("rm", "new:legal")

    assert "that is a LoRA adapter; pull it with --adapter-of MODEL" in no_model.stderr
    assert pulled.exit_code == 0, pulled.output
    assert pulled.stdout.endswith(f"new:legal is in {models / 'new:legal'}, and is served\n")
    files = {"adapter_config.json", "adapter_model.safetensors", ".origin"}
    assert {file.name for file in (models / "new:legal").iterdir()} == files
    assert "has no adapter_config.json: that is no LoRA adapter" in no_adapter.stderr
    assert (too_large.exit_code, "rank 8, more than" in too_large.stderr) == (2, True)
    assert "a has no room for another adapter" in no_room.stderr
    assert served == ("new:legal",)
    assert "new:legal (1 of 2 places, for ranks up to 4)" in shown.stdout
    assert gone.stdout == "new:legal takes no new requests; its files stay\n"
    assert named(box) == ()
    assert [one.name for one in models.iterdir() if one.name[0] != "."] == ["new:legal"]
