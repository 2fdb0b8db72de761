"""Models added to a running daemon and removed, over HTTP and on the command line."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import ollama
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

from appliance.access.auth import Access, scope_of
from appliance.access.keys import Key, KeyFile, KeyRing, Scope, digest
from appliance.api.admin.catalog import NewModel
from appliance.api.app import create_app
from appliance.checkpoints import delete
from appliance.checkpoints.pull import pull
from appliance.cli.main import cli
from appliance.config.layers import ADMIN_FILE, directory
from appliance.config.loader import load_config
from appliance.config.schema import Adapter, Model, fields
from appliance.daemon.reload import LiveConfig
from appliance.journal import Journal, replay
from appliance.service.interface import GenerationFailed, ModelActivity, ModelExists
from appliance.vocabulary import BuildModel, DropModel, ModelFailed
from appliance.worker import frames
from tests.patience import PATIENCE_SECONDS
from tests.unit.checkpoints.test_adapters import Q, make_base, pair
from tests.unit.checkpoints.test_adapters import make as make_adapter
from tests.unit.doubles.daemon import Box, setup_of, small
from tests.unit.doubles.instance import ModelDouble
from tests.unit.doubles.serving import Call, commanded, served, unserved

Make = Callable[..., Path]

CONFIG = """\
[devices]
memory = "8MiB"
slab = "64KiB"
host_cache = "16MiB"

[policy]
use = ["serverlessllm"]

[catalog]
folder = "models"

[[model]]
name = "a"
path = "tiny"
max_context = 256

[[model]]
name = "b"
path = "tiny"
max_context = 256
"""


@pytest.fixture
def checkpoint(fake_checkpoint: Make) -> Make:
    """Makes checkpoints."""
    return fake_checkpoint


@pytest.fixture
def path(tmp_path: Path, checkpoint: Make) -> Path:
    checkpoint("tiny")
    checkpoint("new")
    path = tmp_path / "appliance.toml"
    path.write_text(CONFIG, encoding="utf-8")
    return path


@pytest.fixture
async def box(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[Box]:
    """A box whose worker is up; what happens is written down, and replays."""
    models = small("ab")
    setup = setup_of(models, policy="serverlessllm")
    journal = Journal(tmp_path / "journal", setup)
    box = Box(monkeypatch, models, setup, journal=journal)
    box.start()
    box.world.models["new"] = small("n")["n"]
    yield box
    box.daemon.host.close()
    assert box.take_failures() == []
    journal.close()
    assert replay(tmp_path / "journal")[1] == []


@pytest.fixture
def settings(box: Box, path: Path) -> LiveConfig:
    return LiveConfig(box.daemon, load_config(path), path)


@pytest.fixture
async def client(box: Box, settings: LiveConfig) -> AsyncIterator[httpx.AsyncClient]:
    async with unserved(create_app(box.daemon, settings=settings)) as client:
        yield client


@pytest.fixture
async def call(box: Box, settings: LiveConfig) -> AsyncIterator[Call]:
    async with commanded(create_app(box.daemon, settings=settings)) as call:
        yield call


def served_names(path: Path) -> list[str]:
    """What a restart would serve."""
    return [model.name for model in load_config(path).models]


async def working(box: Box) -> None:
    """The workers work while others wait."""
    while True:
        box.settle()
        await asyncio.sleep(0.01)


@pytest.fixture
async def at_work(box: Box) -> AsyncIterator[None]:
    task = asyncio.create_task(working(box))
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


# --- adding --------------------------------------------------------------------------------------


async def test_a_model_is_added(box: Box, client: httpx.AsyncClient, path: Path) -> None:
    """It is built and served while another one runs, and a restart finds it."""
    running = box.ask("r1", "a", output=30)
    box.work_until(lambda: box.world.lives["r1"].produced == 3)
    body = {"name": "new", "path": "new", "max_context": 512, "slo": {"ttft": "3s"}}

    answer = await client.post("/api/models", json=body)
    added = box.ask("r2", "new")
    box.settle()

    assert answer.status_code == 200, answer.text
    assert answer.json()["terms"]["slo"] == {
        "ttft_seconds": 3.0,
        "tbt_seconds": 0.1,
        "gap_seconds": 0.0,
    }
    assert answer.json()["facts"]["max_context_tokens"] == 512
    assert box.workers[0].heard(frames.AddModel)[0].model.path == str(path.parent / "new")
    assert sum([len(batch) async for batch in running]) == 30
    assert sum([len(batch) async for batch in added]) == 5
    assert [card.id for card in box.daemon.models()] == ["a", "b", "new"]
    assert served_names(path) == ["a", "b", "new"]
    assert (await client.post("/api/config/check")).json()["changes"] == []
    assert 'model="new"' in (await client.get("/metrics")).text


async def test_a_worker_that_starts_later_knows_it(box: Box, client: httpx.AsyncClient) -> None:
    """Also if it is started anew."""
    await client.post("/api/models", json={"name": "new", "path": "new", "max_context": 64})
    box.settle()

    box.workers[0].die()
    box.workers[0].greet()
    box.settle()

    assert [model.name for model in box.workers[0].configuration.models] == ["a", "b", "new"]
    assert [c.model for c in box.workers[0].heard(BuildModel)][3:] == ["a", "b", "new"]


async def test_a_pooler_is_passed_to_workers_and_front_ends(
    box: Box, client: httpx.AsyncClient, path: Path
) -> None:
    """With the task that the model has, and other keys that change what both compute."""
    body = {"name": "new", "path": "new", "task": "embed", "max_logprobs": 3}
    asked = {"pooling_type": "MEAN", "enable_chunked_processing": True}
    refused = await client.post("/api/models", json=body | {"pooler_config": {"task": "classify"}})
    answer = await client.post("/api/models", json=body | {"pooler_config": asked})
    box.settle()

    assert (refused.status_code, answer.status_code) == (422, 200)
    assert "does not classify; use embed or token_embed" in refused.text
    worker = box.workers[0].heard(frames.AddModel)[0].model
    front = box.daemon.front_models()[-1]
    assert worker.pooler_config == front.pooler_config == asked | {"task": "embed"}
    assert (worker.max_logprobs, front.max_logprobs) == (3, 3)
    assert load_config(path).models[-1].pooler_config.chosen == asked


async def test_adapters_are_models_of_their_own(
    box: Box, client: httpx.AsyncClient, path: Path, tmp_path: Path
) -> None:
    """Listed behind their base and passed to workers and front ends; what an operator does with a
    model is done with the base."""
    make_base(tmp_path / "base")
    place = make_adapter(tmp_path, pair(Q), "legal")
    body = {"name": "new", "path": "base", "dtype": "float32", "max_context": 64}
    refused = await client.post(
        "/api/models", json=body | {"adapter": [{"name": "legal", "path": "base"}]}
    )
    answer = await client.post(
        "/api/models", json=body | {"adapter": [{"name": "legal", "path": "legal"}]}
    )
    box.settle()

    assert (refused.status_code, answer.status_code) == (422, 200), answer.text
    assert "has no adapter_config.json" in refused.text
    assert box.workers[0].heard(frames.AddModel)[0].model.adapters == (place,)
    assert box.daemon.front_models()[-1].adapters == ("new:legal",)
    assert load_config(path).models[-1].adapters == (Adapter(name="legal", path=place.path),)
    listed = (await client.get("/v1/models")).json()["data"]
    assert [(one["id"], one["parent"]) for one in listed[-2:]] == [
        ("new", None),
        ("new:legal", "new"),
    ]
    one = await client.get("/v1/models/new:legal")
    shown = await client.post("/api/show", json={"model": "new:legal"})
    assert (one.status_code, one.json()["max_model_len"]) == (200, 64)
    assert (shown.status_code, shown.json()["details"]["parent_model"]) == (200, "new")
    for verb in ("pin", "drain", "load"):
        answer = await client.post(f"/api/models/new:legal/{verb}")
        assert answer.status_code == 404, verb
    for name in ("new:other", "new:legal:latest", "new:legal:latest:latest"):
        assert (await client.get(f"/v1/models/{name}")).status_code == 404
        assert (await client.post("/api/show", json={"model": name})).status_code == 404
    with pytest.raises(ModelExists):
        box.daemon.catalogue.check_free("new:legal")
    answer = await client.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": "/x"})
    assert answer.status_code == 400
    assert "max_loras" in answer.text


async def test_a_context_need_not_be_given(
    client: httpx.AsyncClient, path: Path, fake_checkpoint: Make
) -> None:
    """It is then, or where it is `auto`, what the checkpoint reads, or what has room, as with a
    configured model: also by a pull, and after a restart."""
    answer = await client.post("/api/models", json={"name": "new", "path": "new"})

    assert answer.json()["facts"]["max_context_tokens"] == 2048
    assert load_config(path).models[-1].max_context == 2048
    fake_checkpoint("long", max_position_embeddings=1 << 17, num_hidden_layers=8)
    told = {"name": "long", "path": "long", "max_context": "auto", "max_batch": "auto"}
    answer = await client.post("/api/models", json=told)
    facts = answer.json()["facts"]
    assert (facts["max_context_tokens"], facts["max_batch"]) == (7680, 8)
    other = fake_checkpoint("other", max_position_embeddings=1 << 17, num_hidden_layers=8)
    pulled = await client.post("/api/pull", json={"model": str(other), "stream": False})
    assert pulled.status_code == 200, pulled.text
    await client.post("/api/config/reload")
    rows = [row for row in load_config(path).models if row.name in ("long", "other")]
    assert [row.max_context for row in rows] == [7680, 7680]
    assert "7680" not in (directory(path) / ADMIN_FILE).read_text()


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"name": "a", "path": "new"}, 409, "in the catalogue already"),
        ({"name": "no name", "path": "new"}, 422, "name"),
        ({"name": "c", "path": "new", "dtype": "int8"}, 400, "dtype"),
        ({"name": "c", "path": "new", "enabled": False}, 400, "enabled"),
        ({"name": "c", "path": "nowhere"}, 422, "is not a directory"),
        ({"name": "c", "path": "new", "tool_parser": "hermez"}, 422, "did you mean hermes?"),
        ({"name": "c", "path": "new", "max_context": 4096}, 422, "more than the model's 2048"),
        ({"name": "c", "path": "new", "max_batch": 0}, 400, "max_batch"),
        ({"name": "c", "path": "new", "size": 1}, 400, "size"),
        ({"name": "c"}, 400, "path"),
        ({"name": "c", "path": 'x"\n[api]\nbind="0.0.0.0:1'}, 422, "is not a directory"),
    ],
)
async def test_what_cannot_be_served_is_refused(
    box: Box, client: httpx.AsyncClient, path: Path, body: dict[str, Any], status: int, message: str
) -> None:
    """By name; nothing is changed, nor written."""
    answer = await client.post("/api/models", json=body)

    assert (answer.status_code, message in answer.text) == (status, True), answer.text
    assert len(box.daemon.models()) == 2
    assert not (directory(path) / ADMIN_FILE).exists()


async def test_what_can_never_fit_is_refused(
    box: Box, client: httpx.AsyncClient, call: Call, path: Path, fake_checkpoint: Make
) -> None:
    """In the words of `appliance config check`, whichever way it comes, with what would fit."""
    long = fake_checkpoint("long", max_position_embeddings=1 << 17, num_hidden_layers=8)
    body = {"name": "long", "path": "long", "max_context": 8000}

    wide = fake_checkpoint("wide")
    save_file({"weight": np.zeros((2048, 4096), np.float32)}, wide / "model.safetensors")

    added = await client.post("/api/models", json=body)
    unsaid = await client.post("/api/models", json={"name": "wide", "path": "wide"})
    linked = await call("pull", str(long), "--link", "--max-context", "8000")
    pulled = await client.post("/api/pull", json={"model": str(wide), "stream": False})
    drop_in = directory(path) / ADMIN_FILE
    written = drop_in.exists()
    table = f'[[model]]\nname = "long"\npath = "{long}"\nmax_context = 8000\n'
    drop_in.parent.mkdir(exist_ok=True)
    (drop_in.parent / "60-mine.toml").write_text(table, encoding="utf-8")
    reloaded = await client.post("/api/config/reload")
    checked = await asyncio.to_thread(CliRunner().invoke, cli, ["config", "check", str(path)])

    words = (
        "long needs 512KiB for its weights and 8MiB for the KV cache of one request, in slabs of "
        "64KiB: more than devices.memory (8MiB) has; set devices.memory to 8.5MiB or more, a "
        "smaller devices.slab, or max_context to 7680 or less"
    )
    for answer in (added, reloaded):
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, "config")
        assert answer.json()["error"]["message"].endswith(words)
    largest = "wide needs 16MiB for its weights"
    assert (unsaid.status_code, largest in unsaid.json()["error"]["message"]) == (422, True)
    assert (pulled.status_code, largest in pulled.json()["error"]) == (422, True)
    for command in (linked, checked):
        assert (command.exit_code, words in command.stderr) == (2, True), command.output
    assert not written
    assert [card.id for card in box.daemon.models()] == ["a", "b"]
    (drop_in.parent / "60-mine.toml").unlink()
    fits = await client.post("/api/models", json=body | {"max_context": 7680})
    assert fits.status_code == 200, fits.text


async def test_what_only_its_engine_knows_not_to_fit_fails_by_name(
    box: Box, client: httpx.AsyncClient, call: Call
) -> None:
    """Requests hear why, and so does everybody who looks."""
    box.world.models["new"] = ModelDouble(5, small("n")["n"].kv)
    body = {"name": "new", "path": "new", "max_context": 512}
    assert (await client.post("/api/models", json=body)).json()["failure"] is None

    box.settle()
    model = (await client.get("/api/models/new")).json()
    with pytest.raises(GenerationFailed) as refused:
        box.ask("r", "new")
    shown = await call("show", "new")
    page = await call("top", "--once")

    why = "its weights and the KV of one request at max_context need 21 slabs, the pool has 20"
    told = f"{why}: raise devices.memory or lower max_context"
    assert (model["state"], model["failure"]) == ("failed", told)
    assert (refused.value.status, refused.value.code) == (500, "model_failed")
    assert refused.value.message == told
    assert f"state         failed: {told}\n" in shown.stdout
    assert f"new failed: {told}\n" in page.stdout
    await client.delete("/api/models/new")
    box.settle()
    assert (await client.get("/api/models/new")).status_code == 404


def test_every_key_can_be_given() -> None:
    """That a model has in the configuration; only there it is switched off."""
    keys = {field.encode_name for field in msgspec.structs.fields(NewModel)}

    assert fields(Model).keys() - keys == {"enabled"}


@pytest.fixture
def grouped(path: Path) -> Path:
    """The configuration with a pair of ranks beside a single one; its models are the pair's."""
    text = CONFIG.replace('path = "tiny"', 'path = "tiny"\ngroups = ["pair"]')
    groups = '[[devices.group]]\nname = "pair"\ntensor_parallel = 2\n\n'
    groups += '[[devices.group]]\nname = "single"\n\n'
    text = text.replace("[devices]", '[devices]\nkind = "cpu"')
    path.write_text(text.replace("[policy]", f"{groups}[policy]"), encoding="utf-8")
    return path


async def test_a_model_is_added_to_groups(grouped: Path, client: httpx.AsyncClient) -> None:
    """Those that it names; without any it is refused where their ranks differ in number."""
    keys = {"name": "new", "path": "new", "max_context": 256}

    refused = await client.post("/api/models", json=keys)
    added = await client.post("/api/models", json={**keys, "groups": ["pair"]})

    assert (refused.status_code, "1 and 2 ranks" in refused.text) == (422, True), refused.text
    assert added.status_code == 200, added.text
    (new,) = [model for model in load_config(grouped).models if model.name == "new"]
    assert new.groups == ("pair",)


@pytest.mark.usefixtures("grouped")
async def test_a_pull_without_groups_fetches_nothing(client: httpx.AsyncClient, path: Path) -> None:
    """If groups differ in ranks: it would be refused once all of it was there, as what is added
    is, with the same status and code."""
    source = str(path.parent / "new")

    refused = await client.post("/api/pull", json={"model": source, "stream": False})
    added = await client.post("/api/models", json={"name": "new", "path": "new"})

    assert refused.status_code == added.status_code == 422, refused.text
    assert added.json()["error"]["code"] == "config"
    assert "model.groups: groups of 1 and 2 ranks" in refused.json()["error"]
    assert not (path.parent / "models").exists()


@pytest.mark.usefixtures("grouped", "at_work")
async def test_groups_on_the_command_line(call: Call, path: Path) -> None:
    """What the daemon would refuse is not fetched."""
    source = str(path.parent / "new")

    without = await call("pull", source)
    unknown = await call("pull", source, "--group", "piar")
    assert not (path.parent / "models").exists()
    pulled = await call("pull", source, "--group", "pair")

    assert (without.exit_code, "1 and 2 ranks" in without.stderr) == (1, True), without.output
    assert (unknown.exit_code, "no group 'piar'" in unknown.stderr) == (1, True), unknown.output
    assert pulled.exit_code == 0, pulled.output
    (new,) = [model for model in load_config(path).models if model.name == "new"]
    assert new.groups == ("pair",)


# --- removing ------------------------------------------------------------------------------------


async def test_a_model_is_removed(box: Box, client: httpx.AsyncClient, path: Path) -> None:
    """Its requests end before; nobody sees it meanwhile; then nothing is left of it."""
    running = box.ask("r1", "a", output=30)
    box.work_until(lambda: box.world.lives["r1"].produced == 3)

    answer = await client.delete("/api/models/a")
    leaving = (await client.get("/api/models/a")).json()
    refused = await client.post("/v1/completions", json={"model": "a", "prompt": "x"})
    again = await client.post("/api/models", json={"name": "a", "path": "new"})
    box.settle()

    assert answer.json() == {"model": "a", "live": 1, "files": False}
    assert (leaving["state"], leaving["running"]) == ("removing", 1)
    assert (refused.status_code, again.status_code) == (404, 409)
    assert "still being removed" in again.text
    assert [one["id"] for one in (await client.get("/v1/models")).json()["data"]] == ["b"]
    assert sum([len(batch) async for batch in running]) == 30
    assert (await client.get("/api/models/a")).status_code == 404
    assert [command.model for command in box.workers[0].heard(DropModel)] == ["a"]
    assert [model.name for model in box.workers[0].configuration.models] == ["b"]
    assert served_names(path) == ["b"]
    assert (await client.post("/api/config/check")).json()["changes"] == []


async def test_requests_are_ended_by_force(box: Box, client: httpx.AsyncClient) -> None:
    """Those that wait, too; they hear why. Whoever asked without force may think again."""
    running = box.ask("r1", "a", output=100)
    box.work_until(lambda: box.world.lives["r1"].produced == 3)
    assert (await client.delete("/api/models/a")).json()["live"] == 1
    box.world.lives["r1"].outcome = "model_removed"

    answer = await client.delete("/api/models/a?force=true")
    box.settle()

    assert answer.json()["live"] == 0
    with pytest.raises(GenerationFailed, match="a was removed"):
        [batch async for batch in running]
    assert (await client.delete("/api/models/a")).status_code == 404


async def test_a_model_is_gone_at_once_without_workers(box: Box, client: httpx.AsyncClient) -> None:
    """Nobody has to forget it."""
    box.workers[0].die()

    await client.delete("/api/models/a")

    assert (await client.get("/api/models/a")).status_code == 404
    box.workers[0].greet()


async def test_a_model_that_fails_while_it_leaves_is_gone(
    box: Box, client: httpx.AsyncClient
) -> None:
    """Its requests hear of the failure; then it goes."""
    running = box.ask("r1", "a", output=100)
    box.work_until(lambda: box.world.lives["r1"].produced == 3)
    await client.delete("/api/models/a")
    box.world.lives["r1"].outcome = "model_failed"

    box.workers[0].deliver(ModelFailed(instance=0, model="a", reason="its files are gone"))
    box.settle()

    with pytest.raises(GenerationFailed, match="its files are gone"):
        [batch async for batch in running]
    assert (await client.get("/api/models/a")).status_code == 404


async def test_the_last_model_stays(client: httpx.AsyncClient, box: Box) -> None:
    """An appliance without any would not start again."""
    await client.delete("/api/models/a")
    box.settle()

    answer = await client.delete("/api/models/b")

    assert (answer.status_code, "the last model" in answer.text) == (422, True)


async def test_a_model_comes_and_goes(box: Box, client: httpx.AsyncClient, path: Path) -> None:
    """What the drop-in says adds up, whichever file a model is from."""
    admin_file = directory(path) / ADMIN_FILE
    for _ in range(2):
        assert (await client.delete("/api/models/a")).status_code == 200
        box.settle()
        assert served_names(path) == ["b"]
        box.world.models["a"] = small("a")["a"]
        added = await client.post("/api/models", json={"name": "a", "path": "new"})
        assert added.status_code == 200, added.text
        box.settle()
        assert served_names(path) == ["a", "b"]
    await client.post("/api/models", json={"name": "new", "path": "new"})
    await client.post("/api/models/new/pin")
    box.settle()
    assert [model.pin for model in load_config(path).models] == [False, False, True]
    await client.delete("/api/models/new")
    box.settle()

    assert "new" not in [row.get("name") for row in _rows(admin_file)]
    assert served_names(path) == ["a", "b"]


async def test_nothing_of_an_old_table_is_left(
    box: Box, client: httpx.AsyncClient, path: Path
) -> None:
    """A model that is added again is as it is said now, in a file that says otherwise, too."""
    old = (
        'tool_parser = "hermes"\ndtype = "float32"\npin = true\nslo = { ttft = "9s", tbt = "9s" }\n'
    )
    await asyncio.to_thread(path.write_text, f"{CONFIG}{old}", encoding="utf-8")
    await client.delete("/api/models/b")
    box.settle()
    box.world.models["b"] = small("b")["b"]
    body = {"name": "b", "path": "new", "slo": {"ttft": "3s"}}

    added = await client.post("/api/models", json=body)

    assert added.status_code == 200, added.text
    (model,) = (model for model in load_config(path).models if model.name == "b")
    new = Model(name="b", path=str(path.parent / "new"), max_context=2048)
    assert model.slo.ttft_seconds == 3
    assert msgspec.structs.replace(model, slo=new.slo) == new
    assert model.slo.tbt_seconds == new.slo.tbt_seconds
    assert added.json()["terms"]["pinned"] is False


def _rows(file: Path) -> list[dict[str, Any]]:
    import tomllib

    rows: list[dict[str, Any]] = tomllib.loads(file.read_text())["model"]
    return rows


async def test_what_cannot_be_written_is_not_removed(
    client: httpx.AsyncClient, path: Path, box: Box
) -> None:
    """A restart would bring it back."""
    directory(path).write_text("in the way")

    answer = await client.delete("/api/models/a")

    assert (answer.status_code, len(box.daemon.models())) == (409, 2)


# --- pulling -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("at_work")
async def test_pull_and_rm_on_the_command_line(call: Call, path: Path, box: Box) -> None:
    """A pulled model is served; a removed one is gone, and its files, if they were pulled."""
    source = path.parent / "new"
    line = ["--max-context", "128", "--dtype", "float32", "--tool-parser", "hermes"]
    pulled = await call("pull", str(source), *line)
    shown = await call("show", "new", "--json")
    files = path.parent / "models" / "new"
    assert files.is_dir()
    box.world.models["other"] = small("o")["o"]
    again = await call("pull", str(source), "--name", "other", "--link")
    gone, whole = await call("rm", "new", "--yes"), await call("rm", "other", "--json")
    missing = await call("rm", "new")
    await _until(lambda: not files.exists())

    assert pulled.exit_code == 0, pulled.output
    assert box.workers[0].heard(frames.AddModel)[0].model.dtype == "float32"
    assert pulled.stdout.endswith(f"new is in {files}, and is served\n")
    assert json.loads(shown.stdout)["facts"]["max_context_tokens"] == 128
    assert again.exit_code == 0, again.output
    assert gone.stdout == "new is gone; its files are deleted\n"
    assert json.loads(whole.stdout) == {"model": "other", "live": 0, "files": False}
    assert (missing.exit_code, missing.stderr) == (1, "error: model 'new' does not exist\n")
    assert source.is_dir()
    assert served_names(path) == ["a", "b"]


@pytest.mark.usefixtures("at_work")
async def test_without_a_terminal_files_go_only_if_that_was_said(call: Call, path: Path) -> None:
    """A script that forgets `--yes` loses nothing; it is told where the files are."""
    source = path.parent / "new"
    await call("pull", str(source), "--max-context", "128", "--dtype", "float32")
    files = path.parent / "models" / "new"

    gone = await call("rm", "new")

    assert gone.stdout == (
        f"new is gone; its files stay in {files} (without a terminal, files are deleted only with "
        "--yes)\n"
    )
    assert files.is_dir()


async def _until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not done():  # noqa: ASYNC110 - of files there is no event
            await asyncio.sleep(0.01)


async def test_files_that_another_model_has_stay(
    client: httpx.AsyncClient, path: Path, box: Box
) -> None:
    """They are its as well."""
    shared = path.parent / "models" / "shared"
    shared.parent.mkdir()
    (path.parent / "new").rename(shared)
    for name in ("one", "two"):
        box.world.models[name] = small(name[0])[name[0]]
        await client.post("/api/models", json={"name": name, "path": str(shared)})

    kept = await client.delete("/api/models/one?files=true")
    deleted = await client.delete("/api/models/two?files=true")
    box.settle()
    await _until(lambda: not shared.exists())

    assert (kept.json()["files"], deleted.json()["files"]) == (False, True)


def with_further(folder: Path, base: Path, kind: str) -> dict[str, object]:
    """The keys of a model, in `base`, of which an adapter or a head lies in the folder `legal` of
    another one's."""
    make_base(base)
    own = {"path": "base", "dtype": "float32", "max_context": 64}
    path = str(folder / "legal")
    if kind == "adapter":
        make_adapter(folder, pair(Q), "legal")
        return own | {"adapter": [{"name": "legal", "path": path}]}
    head = make_base(folder / "legal")
    save_file({"fc.weight": np.zeros((8, 16), np.float32)}, head / "model.safetensors")
    return own | {"speculate": {"method": "eagle", "path": path}}


@pytest.mark.parametrize("kind", ["adapter", "head"])
async def test_files_of_another_models_adapter_or_head_stay(
    client: httpx.AsyncClient, path: Path, box: Box, kind: str
) -> None:
    """They may lie within a model's own."""
    folder = await shared(client, path, box)
    body = with_further(folder, path.parent / "base", kind)
    box.world.models["three"] = small("h")["h"]

    added = await client.post("/api/models", json=body | {"name": "three"})
    box.settle()
    kept = await client.delete("/api/models/one?files=true")
    box.settle()

    assert added.status_code == 200, added.text
    assert (kept.json()["files"], (folder / "legal").exists()) == (False, True)


@pytest.mark.parametrize("kind", ["adapter", "head"])
async def test_no_adapter_or_head_is_added_whose_files_go(
    client: httpx.AsyncClient, path: Path, box: Box, kind: str
) -> None:
    folder = await shared(client, path, box)
    body = with_further(folder, path.parent / "base", kind) | {"name": "two"}
    running = box.ask("r1", "one", output=30)
    box.work_until(lambda: box.world.lives["r1"].produced == 3)

    await client.delete("/api/models/one?files=true")
    refused = await client.post("/api/models", json=body)
    box.settle()
    await _until(lambda: not folder.exists())

    assert (refused.status_code, "is being deleted with one" in refused.text) == (409, True)
    assert sum([len(batch) async for batch in running]) == 30


async def shared(client: httpx.AsyncClient, path: Path, box: Box) -> Path:
    """The folder of a model `one` that lies in the folder of models."""
    folder = path.parent / "models" / "shared"
    folder.parent.mkdir()
    (path.parent / "new").rename(folder)
    box.world.models |= {"one": small("o")["o"], "two": small("t")["t"]}
    body = {"name": "one", "path": str(folder), "max_context": 64}
    added = await client.post("/api/models", json=body)
    assert added.status_code == 200, added.text
    box.settle()
    return folder


async def test_files_that_go_cannot_be_added(
    client: httpx.AsyncClient, path: Path, box: Box
) -> None:
    """Nor can their model's name, until both are gone; then nothing is left."""
    folder = await shared(client, path, box)
    running = box.ask("r1", "one", output=30)
    box.work_until(lambda: box.world.lives["r1"].produced == 3)

    removed = await client.delete("/api/models/one?files=true")
    refused = await client.post("/api/models", json={"name": "two", "path": str(folder)})
    box.settle()
    leaving = await client.get("/api/models/one")
    named = await client.post("/api/models", json={"name": "one", "path": "tiny"})
    await _until(lambda: not list(folder.parent.iterdir()))

    assert removed.json() == {"model": "one", "live": 1, "files": True}
    assert (refused.status_code, "is being deleted with one" in refused.text) == (409, True)
    assert (leaving.status_code, leaving.json()["state"]) == (200, "removing")
    assert (named.status_code, "still being removed" in named.text) == (409, True)
    assert sum([len(batch) async for batch in running]) == 30
    assert await _over(client, "one") == "model_not_found"
    assert served_names(path) == ["a", "b"]


async def _over(client: httpx.AsyncClient, name: str) -> str:
    """What a model's absence is called when its removal is over."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (answer := await client.get(f"/api/models/{name}")).is_success:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert answer.status_code == 404
    return str(answer.json()["error"]["code"])


@pytest.mark.parametrize("again", [False, True])
async def test_files_that_a_daemon_did_not_come_to_delete(
    client: httpx.AsyncClient, settings: LiveConfig, path: Path, box: Box, again: bool
) -> None:
    """Are deleted by the next one, unless a model has them again."""
    folder = await shared(client, path, box)
    box.ask("r1", "one", output=30)
    box.work_until(lambda: box.world.lives["r1"].produced == 3)
    await client.delete("/api/models/one?files=true")
    (folder.parent / ".half.gone").mkdir()  # what was begun
    (folder.parent / ".never.delete").touch()  # what somebody else did
    if again:
        table = f'[[model]]\nname = "two"\npath = "{folder}"\nmax_context = 64\n'
        (directory(path) / "60-later.toml").write_text(table)

    await LiveConfig(box.daemon, load_config(path), path).finish_deletions()

    left = [folder] if again else []
    assert list(folder.parent.iterdir()) == left
    box.world.lives["r1"].outcome = "cancelled"
    await settings.remove_model("one", force=True, files=False)
    box.settle()
    assert await _over(client, "one") == ("files_left" if again else "model_not_found")


async def test_files_that_an_earlier_daemon_cannot_delete(
    settings: LiveConfig,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Stay, and so does the mark: the next one tries again."""
    folder = path.parent / "models" / "old"
    folder.mkdir(parents=True)
    mark = folder.with_name(".old.delete")
    delete.intend(folder)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refuse)
        await settings.finish_deletions()
    assert "old cannot be deleted" in caplog.text
    assert mark.exists()
    await settings.finish_deletions()

    assert list(folder.parent.iterdir()) == []


async def test_a_fresh_model_in_the_place_of_one_that_is_to_go(
    settings: LiveConfig, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stays, though what was set aside of the old one could not be deleted at first."""
    folder = path.parent / "models" / "old"
    folder.mkdir(parents=True)
    delete.intend(folder)

    def fail(*_: object) -> None:
        raise OSError("the disk is on fire")

    with monkeypatch.context() as patch:
        patch.setattr("appliance.checkpoints.delete.shutil.rmtree", fail)
        await settings.finish_deletions()
    assert [left.name for left in folder.parent.iterdir()] == [".old.gone"]
    folder.mkdir()
    await settings.finish_deletions()

    assert list(folder.parent.iterdir()) == [folder]


@pytest.mark.parametrize("how", ["replaced", "changed"])
async def test_a_folder_that_is_not_as_it_was_when_it_was_to_go(
    settings: LiveConfig, path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """Stays: somebody has put it there, or put something there, while no daemon ran."""
    folder = path.parent / "models" / "old"
    folder.mkdir(parents=True)
    delete.intend(folder)
    if how == "replaced":
        (path.parent / "new").rename(folder.with_name("newer"))
        folder.rmdir()
        folder.with_name("newer").rename(folder)
    else:
        before = folder.stat().st_ctime_ns
        while folder.stat().st_ctime_ns == before:  # file systems have coarse clocks
            (folder / "config.json").unlink(missing_ok=True)
            (folder / "config.json").touch()

    await settings.finish_deletions()

    assert list(folder.parent.iterdir()) == [folder]
    assert "old stays" in caplog.text


async def test_a_model_that_is_pulled_while_its_files_are_to_go(
    client: httpx.AsyncClient, path: Path, box: Box
) -> None:
    """Has them again: they stay, and the removal says so."""
    source = path.parent / "source"
    shutil.copytree(path.parent / "new", source)
    folder = path.parent / "models"
    pulled = pull(str(source), folder, "one", tell=lambda _: None)
    box.world.models["one"] = small("o")["o"]
    body = {"name": "one", "path": str(pulled.path), "max_context": 64}
    assert (await client.post("/api/models", json=body)).status_code == 200
    box.settle()
    box.ask("r1", "one", output=30)
    box.work_until(lambda: box.world.lives["r1"].produced == 3)

    await client.delete("/api/models/one?files=true")
    again = await asyncio.to_thread(pull, str(source), folder, "one", tell=lambda _: None)
    box.settle()

    assert await _over(client, "one") == "files_left"
    assert list(folder.iterdir()) == [again.path]


@pytest.mark.parametrize("when", ["before", "meanwhile"])
async def test_files_of_a_model_that_waits_for_a_restart_stay(
    client: httpx.AsyncClient, path: Path, box: Box, when: str
) -> None:
    """Whether it was written down before the removal or after."""
    folder = await shared(client, path, box)
    table = f'[[model]]\nname = "two"\npath = "{folder}"\nmax_context = 64\n'
    later = directory(path) / "60-later.toml"
    if when == "before":
        later.write_text(table)
    else:
        box.ask("r1", "one", output=30)
        box.work_until(lambda: box.world.lives["r1"].produced == 3)

    removed = await client.delete("/api/models/one?files=true")
    later.write_text(table)
    box.settle()
    over = await _over(client, "one")

    assert removed.json()["files"] is (when == "meanwhile")
    assert over == ("model_not_found" if when == "before" else "files_left")
    assert folder.is_dir()
    assert served_names(path) == ["a", "b", "two"]


@pytest.mark.usefixtures("at_work")
async def test_files_that_cannot_be_deleted_are_reported(
    client: httpx.AsyncClient, call: Call, path: Path, box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command fails; what can be told before is, and nothing is changed then."""
    folder = await shared(client, path, box)
    with monkeypatch.context() as patch:
        patch.setattr(
            "appliance.checkpoints.delete.os.access", lambda path, mode: path != folder.parent
        )
        refused = await call("rm", "one", "--yes")
    assert (refused.exit_code, "cannot be written" in refused.stderr) == (1, True), refused.output
    assert "one" in served_names(path)

    def fail(path: Path) -> None:
        raise OSError("the disk is on fire")

    monkeypatch.setattr("appliance.checkpoints.delete.shutil.rmtree", fail)
    failed = await call("rm", "one", "--yes")

    assert (failed.exit_code, "the disk is on fire" in failed.stderr) == (1, True), failed.output
    assert served_names(path) == ["a", "b"]


async def test_a_pull_that_goes_wrong_is_reported(client: httpx.AsyncClient, path: Path) -> None:
    """By name: a source that is none, a folder that cannot be made, or none at all."""
    nowhere = await client.post("/api/pull", json={"model": "nowhere", "stream": False})
    unnamed = await client.post("/api/pull", json={"stream": False})
    (path.parent / "models").write_text("in the way")
    source = str(path.parent / "new")
    refused = await client.post("/api/pull", json={"model": source, "stream": False})
    streamed = await client.post("/api/pull", json={"model": source})

    assert (nowhere.status_code, "neither a directory" in nowhere.json()["error"]) == (422, True)
    assert (unnamed.status_code, unnamed.json()["error"]) == (400, "model: a value is required")
    assert (refused.status_code, "cannot be pulled" in refused.json()["error"]) == (422, True)
    assert streamed.status_code == 200
    last = json.loads(streamed.text.splitlines()[-1])
    assert last == refused.json()


@pytest.mark.usefixtures("at_work")
async def test_a_name_that_is_taken_is_not_pulled(call: Call, path: Path) -> None:
    """The daemon is asked before anything is fetched."""
    refused = await call("pull", str(path.parent / "new"), "--name", "a")

    assert (refused.exit_code, "in the catalogue already" in refused.stderr) == (1, True)
    assert not (path.parent / "models").exists()


@pytest.mark.usefixtures("at_work")
async def test_ollama_s_delete_says_nothing(client: httpx.AsyncClient) -> None:
    """And does not call that JSON."""
    answer = await client.request("DELETE", "/api/delete", json={"model": "a"})

    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-type"].startswith("text/plain")


@pytest.mark.usefixtures("at_work")
async def test_ollama_s_client_pulls_and_deletes(
    box: Box, settings: LiveConfig, path: Path
) -> None:
    """In a stream or not; what goes wrong is told in both."""
    source = str(path.parent / "new")
    async with served(create_app(box.daemon, settings=settings)) as port:
        client = ollama.AsyncClient(f"http://127.0.0.1:{port}")
        steps = [step async for step in await client.pull(source, stream=True)]
        with pytest.raises(ollama.ResponseError, match="in the catalogue already"):
            await client.pull(source)
        with pytest.raises(ollama.ResponseError, match="in the catalogue already"):
            [step async for step in await client.pull(source, stream=True)]
        listed = await client.list()
        await client.delete("new:latest")
        await _until(lambda: "new" not in box.daemon.machine.models)
        with pytest.raises(ollama.ResponseError, match="does not exist"):
            await client.delete("new")
        await _until(lambda: settings.removal("new") is None)
        assert not (path.parent / "models" / "new").exists()
        whole = await client.pull(source)

    assert steps[0].status == "pulling manifest"
    assert {"verifying sha256 digest", "success"} <= {step.status for step in steps}
    weights = [step for step in steps if step.status == "pulling model.safetensors"]
    size = len(await asyncio.to_thread(Path(source, "model.safetensors").read_bytes))
    assert (weights[-1].completed, weights[-1].total) == (size, size)
    assert "new:latest" in [model.model for model in listed.models]
    assert whole.status == "success"


def test_only_operators_may() -> None:
    """A key for inference is not enough."""
    paths = ["/api/pull", "/api/delete", "/api/models", "/api/models/{name:path}"]

    assert {scope_of(path) for path in paths} == {Scope.ADMIN}


async def test_a_key_of_one_model_changes_no_others(
    box: Box,
    settings: LiveConfig,
    path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor adds any that it would not know: it is refused before anything is done."""
    file = KeyFile(tmp_path / "keys.json")
    sha256 = digest("sk-of-b")
    scopes = (Scope.ADMIN,)
    file.add(Key(name="of-b", sha256=sha256, created_seconds=0.0, scopes=scopes, models=("b",)))
    access = Access(KeyRing(file.path), wall_clock=time.time)
    headers = {"x-api-key": "sk-of-b"}
    leaving = lambda name: ModelActivity(model=name, state="removing")  # noqa: E731
    monkeypatch.setattr(settings, "removal", leaving)
    app, before = create_app(box.daemon, settings=settings, access=access), load_config(path)
    async with unserved(app) as client:
        for method, target, body in (
            ("POST", "", {"name": "new", "path": "new"}),
            ("DELETE", "/a", None),
            ("DELETE", "/a/adapters/x", None),
            ("POST", "/a/adapters", {"name": "x", "path": "new"}),
            ("POST", "/a/pin", None),
            ("PUT", "/a/limits", {"max_queue": 3}),
            ("GET", "/gone", None),
        ):
            answer = await client.request(
                method, f"/api/models{target}", json=body, headers=headers
            )
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert load_config(path) == before
        limited = await client.put("/api/models/b/limits", json={"max_queue": 3}, headers=headers)
    assert limited.status_code == 200, limited.text
