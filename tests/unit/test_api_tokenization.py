"""Text to tokens and back, as vLLM has it."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from appliance.api.app import create_app
from appliance.tokens import ChatTemplate, Tokenizer
from tests.unit.serving import unserved

from .fake_service import FakeService, byte_level_encoder, small_tokenizer

HELLO = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
async def client(service: FakeService) -> AsyncIterator[httpx.AsyncClient]:
    async with unserved(create_app(service)) as client:
        yield client


async def test_a_prompt(client: httpx.AsyncClient) -> None:
    """Its tokens, how many they are, and how many there may be; in writing if asked for."""
    bare = await client.post("/tokenize", json={"model": "small", "prompt": "hello wörld"})
    body = {"model": "small", "prompt": "hello wörld", "return_token_strs": True}
    written = await client.post("/tokenize", json=body)

    tokens = list(small_tokenizer().encode("hello wörld"))
    expected = {"count": len(tokens), "max_model_len": 200, "tokens": tokens, "token_strs": None}
    assert bare.json() == expected
    assert "".join(written.json()["token_strs"]) == "helloĠwÃ¶rld"


async def test_a_chat(client: httpx.AsyncClient, service: FakeService) -> None:
    """The tokens that a chat of these messages and tools would have."""
    template = "{{ tools|length if tools }}{% for m in messages %}{{ m.content }}{% endfor %}"
    template += "{% if add_generation_prompt %}:{% endif %}"
    service.text = Tokenizer(byte_level_encoder(), ChatTemplate(template, {}))
    body = {"model": "small", "messages": HELLO}
    plain = await client.post("/tokenize", json=body)
    tools = await client.post("/tokenize", json=body | {"tools": TOOLS})
    ended = await client.post("/tokenize", json=body | {"add_generation_prompt": False})

    texts = [service.text.decode(answer.json()["tokens"]) for answer in (plain, tools, ended)]
    assert texts == ["hello:", "1hello:", "hello"]


async def test_there_and_back(client: httpx.AsyncClient) -> None:
    """Special tokens are text here."""
    body = {"model": "small", "prompt": "hello<eos> world"}
    tokens = (await client.post("/tokenize", json=body)).json()["tokens"]
    answer = await client.post("/detokenize", json={"model": "small", "tokens": tokens})

    assert 0 in tokens
    assert answer.json() == {"prompt": "hello<eos> world"}


@pytest.mark.parametrize(
    ("path", "fields", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "tools": TOOLS}, 400, "tools"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, 400, "add_generation_prompt"),
        ("/tokenize", {"messages": HELLO, "add_special_tokens": True}, 400, "add_special_tokens"),
        ("/tokenize", {"messages": [{"role": "tool", "content": ""}]}, 400, None),
        ("/tokenize", {"prompt": "a", "chat_template": "x"}, 400, "chat_template"),
        ("/tokenize", {"prompt": "a", "model": "nobody"}, 404, "model"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [300]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [1], "model": "nobody"}, 404, "model"),
    ],
)
async def test_refusals(
    client: httpx.AsyncClient,
    path: str,
    fields: dict[str, object],
    status: int,
    param: str | None,
) -> None:
    """What cannot be done is refused by name."""
    answer = await client.post(path, json={"model": "small", **fields})

    assert answer.status_code == status
    assert answer.json()["error"]["param"] == (param or "messages[0].tool_call_id")


EXAMPLES = re.findall(
    r"```json\nPOST (\S+)\n(.*?)```",
    Path("docs/openai-endpoints.md").read_text(encoding="utf-8"),
    re.DOTALL,
)


@pytest.mark.parametrize(("path", "example"), EXAMPLES)
async def test_the_documentation_is_true(
    client: httpx.AsyncClient, service: FakeService, path: str, example: str
) -> None:
    """Every example of it is a request that is answered."""
    service.script = lambda generation: generation.say("Tiber")
    answer = await client.post(path, json=json.loads(example) | {"model": "small"})

    assert answer.status_code == 200, answer.text
