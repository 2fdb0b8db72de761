"""Ollama's official client and the core: what it is told of models, and what becomes of a pull."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import httpx
import ollama
import pytest
from litestar import Litestar

from appliance.api.ollama.catalog import ollama_catalogue_routes
from appliance.http.error_formats import EXCEPTION_HANDLERS
from appliance.service.interface import (
    Activity,
    ModelActivity,
    ModelCard,
    ModelFacts,
    ModelNotFound,
    Service,
)
from appliance.vocabulary import Task
from tests.unit.doubles.serving import served

PARAMETERS = 7_615_616_512
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


class Models:
    """Three models: one that does everything and is loaded, one for vectors, one for scores."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cards = [
            card("org/small", tool_parser="hermes", reasoning_parser="qwen3"),
            card("vectors:v2", architecture="BertModel", task=Task.EMBED),
            card("scores", task=Task.SCORE),
        ]

    def models(self) -> list[ModelCard]:
        return self.cards

    def model(self, name: str) -> ModelCard:
        for known in self.cards:
            if known.id == name:
                return known
        raise ModelNotFound(name)

    def model_activity(self, name: str) -> ModelActivity:
        residency = {"0": "loaded", "1": "cold"} if name == "org/small" else {}
        facts = ModelFacts(
            architecture="Qwen2ForCausalLM",
            dtype="bfloat16",
            parameters=PARAMETERS,
            weight_bytes=300,
            kv_bytes_per_token=1,
            max_context_tokens=200,
            max_batch=8,
            path=str(self.folder),
        )
        return ModelActivity(model=name, state="cold", residency=residency, facts=facts)

    def activity(self) -> Activity:
        models = tuple(self.model_activity(known.id) for known in self.cards)
        return Activity(version="1", uptime_seconds=0.0, instances=(), models=models)


def card(name: str, **changes: Any) -> ModelCard:
    told: dict[str, Any] = {"architecture": "Qwen2ForCausalLM", "dtype": "bfloat16"}
    told["weight_bytes"] = 300
    return ModelCard(
        id=name,
        created=1_700_000_000,
        max_context_tokens=200,
        **(told | changes),
    )


@pytest.fixture
def models(tmp_path: Path) -> Models:
    return Models(tmp_path)


@pytest.fixture
async def url(models: Models) -> AsyncIterator[str]:
    app = Litestar(
        ollama_catalogue_routes(cast(Service, models), None), exception_handlers=EXCEPTION_HANDLERS
    )
    async with served(app) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
async def client(url: str) -> AsyncIterator[ollama.AsyncClient]:
    async with ollama.AsyncClient(url) as client:
        yield client


async def test_models_are_listed(client: ollama.AsyncClient) -> None:
    """Names have the tag that Ollama's have; what a model is, is told in Ollama's fields."""
    first, second, third = (await client.list()).models

    assert [first.model, second.model, third.model] == [
        "org/small:latest",
        "vectors:v2",
        "scores:latest",
    ]
    assert first.size == 300
    assert first.modified_at is not None
    assert first.modified_at.timestamp() == 1_700_000_000
    assert first.digest is not None
    assert len(first.digest) == 64
    assert first.digest != second.digest
    assert first.details is not None
    assert (first.details.format, first.details.family) == ("safetensors", "qwen2")
    assert (first.details.parameter_size, first.details.quantization_level) == ("7.6B", "BF16")


async def test_a_digest_changes_with_the_files(client: ollama.AsyncClient, models: Models) -> None:
    """And only with them."""
    before = (await client.list()).models[0].digest
    again = (await client.list()).models[0].digest
    models.cards[0] = card("org/small", weight_bytes=301)
    after = (await client.list()).models[0].digest

    assert before == again
    assert after != before


async def test_a_model_is_shown(client: ollama.AsyncClient, tmp_path: Path) -> None:
    """What the checkpoint's files say, without the place where they lie."""
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    sampling = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(sampling))
    config = {"hidden_size": 64, "num_hidden_layers": 2, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shown = await client.show("org/small:latest")

    assert shown.template == TEMPLATE
    assert [line.split() for line in (shown.parameters or "").splitlines()] == [
        ["temperature", "0.6"],
        ["top_k", "20"],
        ["repeat_penalty", "1.05"],
    ]
    assert shown.modelfile is not None
    assert shown.modelfile.startswith("FROM org/small\n")
    assert str(tmp_path) not in shown.model_dump_json()
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert shown.modelinfo == {
        "general.architecture": "qwen2",
        "general.basename": "small",
        "general.parameter_count": PARAMETERS,
        "qwen2.context_length": 200,
        "qwen2.embedding_length": 64,
        "qwen2.block_count": 2,
        "qwen2.attention.head_count_kv": 2,
    }


async def test_the_shape_is_that_of_the_language_model(
    client: ollama.AsyncClient, tmp_path: Path
) -> None:
    """Its configuration lies within that of the whole, and leaves out what transformers knows."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34}
    config = {"model_type": "gemma3", "hidden_size": 1, "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shown = (await client.show("org/small")).modelinfo or {}

    assert shown["qwen2.embedding_length"] == 2560
    assert shown["qwen2.block_count"] == 34
    assert shown["qwen2.attention.head_count"] == 8


@pytest.mark.parametrize(
    ("file", "content", "template"),
    [
        ("tokenizer_config.json", {"chat_template": TEMPLATE}, TEMPLATE),
        ("chat_template.json", {"chat_template": TEMPLATE}, TEMPLATE),
        (
            "tokenizer_config.json",
            {
                "chat_template": [
                    {"name": "tool_use", "template": "x"},
                    {"name": "default", "template": TEMPLATE},
                ]
            },
            TEMPLATE,
        ),
        ("tokenizer_config.json", {}, ""),
        ("tokenizer_config.json", ["no object"], ""),
    ],
)
async def test_templates_lie_in_several_files(
    client: ollama.AsyncClient, tmp_path: Path, file: str, content: Any, template: str
) -> None:
    """A file that is missing or damaged tells nothing."""
    (tmp_path / file).write_text(json.dumps(content))
    shown = await client.show("org/small")

    assert (shown.template or "") == template


async def test_what_models_are_for(client: ollama.AsyncClient) -> None:
    """Ollama has no word for scores."""
    vectors, scores = await client.show("vectors:v2"), await client.show("scores")

    assert (vectors.capabilities, scores.capabilities) == (["embedding"], [])


async def test_running_models(client: ollama.AsyncClient) -> None:
    """Those whose weights are on a device, with their size; none has to leave by a time."""
    (running,) = (await client.ps()).models

    assert (running.model, running.size, running.size_vram) == ("org/small:latest", 300, 300)
    assert running.context_length == 200
    assert running.expires_at is not None
    assert running.expires_at.year > 2200


async def test_clients_find_a_server(url: str) -> None:
    """What they look for before they ask anything; the version is one that they accept."""
    async with httpx.AsyncClient(base_url=url) as http:
        heartbeat, head = await http.get("/"), await http.head("/")
        version = (await http.get("/api/version")).json()["version"]

    assert heartbeat.text == "Ollama is running"
    assert head.status_code == 200
    assert tuple(map(int, version.split("."))) >= (0, 14)


async def test_a_served_model_is_pulled(client: ollama.AsyncClient) -> None:
    """It is there: clients that pull before they ask go on."""
    whole = await client.pull("org/small")
    lines = [line.status async for line in await client.pull("org/small:latest", stream=True)]

    assert whole.status == "success"
    assert lines[-1] == "success"


async def test_errors_are_ollamas(client: ollama.AsyncClient) -> None:
    """A sentence under its status; what Ollama has and the appliance has not is named."""
    with pytest.raises(ollama.ResponseError) as unlisted:
        await client.show("none")
    with pytest.raises(ollama.ResponseError) as pulling:
        await client.pull("none")
    with pytest.raises(ollama.ResponseError) as deleting:
        await client.delete("org/small")
    with pytest.raises(ollama.ResponseError) as copying:
        await client.copy("org/small", "other")

    assert (unlisted.value.status_code, unlisted.value.error) == (404, "model 'none' not found")
    assert pulling.value.error.startswith("/api/pull is not supported: none is not served")
    assert deleting.value.error.startswith("/api/delete is not supported: ")
    assert copying.value.error.startswith("/api/copy is not supported: ")
    assert {error.value.status_code for error in (pulling, deleting, copying)} == {404}


@pytest.mark.parametrize("path", ["/api/push", "/api/create", "/api/copy", "/api/show"])
async def test_no_answer_tells_which_files_there_are(url: str, tmp_path: Path, path: str) -> None:
    """What names a file in place of a model gets the same answer, whether or not it exists."""
    there = tmp_path / "there"
    there.write_text("secret")
    async with httpx.AsyncClient(base_url=url) as client:
        said = set()
        for file in (str(there), f"{tmp_path}/gone", "../../../etc/passwd", "/dev/random"):
            asked = {"model": file, "name": file, "path": file, "source": file, "from": file}
            answer = await client.post(path, json=asked)
            said.add((answer.status_code, answer.text.replace(file, "FILE")))

    ((status, text),) = said
    assert status == 404
    assert "secret" not in text
