"""Attacks that were published against engines and proxies like this one, on a real front end:
docs/security.md has a row for each."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from pydantic import TypeAdapter, ValidationError
from transformers import AutoTokenizer
from vllm.entrypoints.pooling.embed import protocol

from appliance.frontend.counts import MAX_OBJECTS, MAX_TEXTS, MAX_TOOLS
from appliance.frontend.serving.engine_client import MAX_LISTED_TOKENS
from appliance.frontend.serving.quick_union import tell_messages_apart
from appliance.service.front_frames import FrontModel, Submit
from tests.frontend.conftest import like, model_at
from tests.frontend.stand_in_core import StandInCore
from tests.frontend.test_held_text import composed, request
from tests.hostile.published import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    FOREIGN_FIELDS,
    MESSAGES,
    RESPONSES,
    TOKENIZE,
    fetching,
    pickled,
    templates,
)
from tests.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.asyncio(loop_scope="session")

HELLO = [{"role": "user", "content": "hello"}]
PLAIN: dict[str, Any] = {"model": "talker", "messages": HELLO, "max_tokens": 2}
EVIL = "open('{mark}', 'w').close()\nclass Evil: pass\n"
"""A module that leaves a mark when it is imported."""
LISTENING = "0A"


@pytest_asyncio.fixture(loop_scope="session")
async def http(core: StandInCore) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=core.url, timeout=PATIENCE_SECONDS) as client:
        yield client


@asynccontextmanager
async def listening() -> AsyncIterator[tuple[str, list[Any]]]:
    """The URL of a server on this machine, and who connected to it."""
    seen: list[Any] = []

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(writer.get_extra_info("peername"))
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/picture.png", seen


def listeners(pid: int) -> set[str]:
    """The addresses on which a process accepts connections over TCP, as the kernel writes them."""
    own = {str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text("ascii").splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == LISTENING and f"socket:[{inode}]" in own:
                found.add(local)
    return found


# --- what requests would have fetched, read or run -----------------------------------------------


async def test_no_request_has_a_url_fetched(core: StandInCore, http: httpx.AsyncClient) -> None:
    """Nor a file of this machine read: pictures, sound and films are refused unseen."""
    async with listening() as (url, seen):
        bodies = [*fetching(url), *fetching("file:///etc/hostname"), *fetching("data:image/png,x")]
        for path, body in bodies:
            answer = await http.post(path, json=body)
            assert answer.status_code == 400, (path, answer.text)

    assert seen == []
    assert core.said(Submit) == []


async def test_fields_of_proxies_lead_nowhere(http: httpx.AsyncClient) -> None:
    """They are ignored, and named as that; so are servers whose tools a model should use."""
    async with listening() as (url, seen):
        answer = await http.post(CHAT, json=PLAIN | dict.fromkeys(FOREIGN_FIELDS, url))
        tool = {"type": "mcp", "server_label": "x", "server_url": url, "require_approval": "never"}
        asked = {"model": "talker", "input": "hello", "tools": [tool], "max_output_tokens": 16}
        response = await http.post(RESPONSES, json=asked)
        servers = [{"type": "url", "url": url, "name": "x"}]
        message = await http.post(MESSAGES, json=PLAIN | {"mcp_servers": servers})

    assert seen == []
    assert answer.headers["x-appliance-ignored"].split(", ") == list(FOREIGN_FIELDS)
    assert response.headers["x-appliance-ignored"] == "tools.mcp"
    assert message.headers["x-appliance-ignored"] == "mcp_servers"
    assert {one.status_code for one in (answer, response, message)} == {200}


async def test_templates_of_requests_are_refused(
    core: StandInCore, http: httpx.AsyncClient
) -> None:
    """Wherever vLLM has a field for one."""
    for path, body in templates():
        answer = await http.post(path, json=body)
        assert answer.status_code == 400, path
        assert "untrusted chat template" in answer.text, (path, answer.text)

    assert core.said(Submit) == []


async def test_variables_of_templates_are_no_arguments(http: httpx.AsyncClient) -> None:
    """Of what renders and encodes: those names are refused, or mean nothing."""
    for name in ("tokenize", "tokenizer", "conversation", "return_tensors", "max_length"):
        for path in (CHAT, TOKENIZE):
            asked = PLAIN | {"chat_template_kwargs": {name: True}}
            answer = await http.post(path, json=asked)
            assert answer.status_code in (200, 400), (path, name, answer.text)


@pytest.mark.parametrize("prompt", [None, "hello"])
async def test_no_tensor_of_a_request_is_loaded(
    core: StandInCore, http: httpx.AsyncClient, prompt: str | None
) -> None:
    """Prompts are text or tokens."""
    asked = {"model": "talker", "prompt": prompt, "prompt_embeds": pickled(), "max_tokens": 2}

    answer = await http.post(COMPLETIONS, json=asked)

    assert answer.status_code == 400
    assert "prompt_embeds" in answer.text or "prompt embeds" in answer.text
    assert core.said(Submit) == []


async def test_bodies_are_not_unpacked(http: httpx.AsyncClient) -> None:
    """A small one cannot become a large one."""
    packed = gzip.compress(json.dumps(PLAIN).encode())
    headers = {"content-type": "application/json", "content-encoding": "gzip"}

    answer = await http.post(CHAT, content=packed, headers=headers)

    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")


@pytest.mark.parametrize("model", ["../../etc/passwd", "/etc/passwd", "talker/../other", "a\0b"])
async def test_names_of_models_are_no_paths(http: httpx.AsyncClient, model: str) -> None:
    """They are looked up, and that is all."""
    openai = await http.post(CHAT, json=PLAIN | {"model": model})
    ollama = await http.post("/api/chat", json={"model": model, "messages": HELLO})

    assert (openai.status_code, ollama.status_code) == (404, 404)


async def test_an_empty_prompt_ends_nothing(http: httpx.AsyncClient) -> None:
    for prompt in ("", [], [""], [[]], None):
        asked = {"model": "talker", "prompt": prompt, "max_tokens": 2}
        assert (await http.post(COMPLETIONS, json=asked)).status_code in (200, 400), prompt


async def test_a_front_end_listens_on_nothing(core: StandInCore) -> None:
    """Connections come from the core; no other process can say anything to it."""
    assert listeners(core.pid) == set()


# --- what a model would have run or held up, by what it says -------------------------------------


@pytest.fixture(scope="module")
def words(generator: Path) -> Any:
    """A tokenizer with the marks that parsers ask for."""
    tokenizer = AutoTokenizer.from_pretrained(generator)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"], special_tokens=True)
    return tokenizer


@pytest.mark.parametrize("parser", ["qwen3_coder", "qwen3_xml"])
async def test_arguments_of_a_call_are_not_run(parser: str, words: Any, tmp_path: Path) -> None:
    """They are literals or text."""
    mark = tmp_path / "mark"
    properties = {"at": {"type": "object"}}
    tool = {"name": "look", "parameters": {"type": "object", "properties": properties}}
    asked = request(tools=[{"type": "function", "function": tool}], tool_choice="auto")
    said = (
        "<tool_call>\n<function=look>\n<parameter=at>\n"
        f"__import__('pathlib').Path('{mark}').touch()\n"
        "</parameter>\n</function>\n</tool_call>"
    )

    composed(parser)(words, asked.tools).parse(said, asked, enable_auto_tools=True)

    assert not mark.exists()


@pytest.mark.parametrize("parser", ["pythonic", "llama4_pythonic", "olmo3"])
async def test_text_that_is_hard_to_match_is_text(parser: str, words: Any) -> None:
    """It would take a pattern years to see that this is no call."""
    asked = request(tool_choice="auto")
    said = "[A(A=\t)" + "A(A=,\t\t" * 5000

    _, content, calls = composed(parser)(words, asked.tools).parse(
        said, asked, enable_auto_tools=True
    )

    assert (content, calls or []) == (said, [])


# --- what would cost far more than its bytes -----------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/rerank", {"model": "scorer", "query": "a", "documents": ["b"] * 20_000}),
        ("/score", {"model": "scorer", "text_1": "a", "text_2": ["b"] * 20_000}),
        ("/score", {"model": "scorer", "queries": "a", "items": ["b"] * 20_000}),
        ("/classify", {"model": "scorer", "input": ["b"] * 20_000}),
        ("/pooling", {"model": "embedder", "input": ["b"] * 20_000}),
        ("/v2/embed", {"model": "embedder", "texts": ["b"] * 20_000}),
        (EMBEDDINGS, {"model": "embedder", "input": [[5]] * 200_000}),
        ("/api/embed", {"model": "embedder", "input": ["b"] * 20_000}),
    ],
)
async def test_texts_are_counted_before_each_becomes_a_request(
    http: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    """Five megabytes of them would hold a front end up for minutes."""
    content = json.dumps(body, separators=(",", ":")).encode()

    answer = await http.post(path, content=content, headers={"content-type": "application/json"})

    assert answer.status_code == 400
    assert str(MAX_TEXTS) in answer.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/rerank", {"query": "a" * 20_000, "documents": ["b"] * 1000}),
        ("/score", {"text_1": ["a" * 20_000], "text_2": ["b"] * 1000}),
        ("/score", {"queries": "a" * 20_000, "items": ["b"] * 1000}),
        ("/rerank", {"query": "a", "instruction": "a" * 20_000, "documents": ["b"] * 1000}),
    ],
)
async def test_a_query_counts_once_for_each_text(
    http: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    """Each pair is encoded: four megabytes would take minutes."""
    answer = await http.post(path, json={"model": "scorer", "truncate_prompt_tokens": 9} | body)

    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "text_too_long")


async def test_texts_are_not_tried_as_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each item would be compared with all kinds of messages: a million numbers took 30 s."""
    monkeypatch.setattr(protocol, "_is_chat_messages", protocol._is_chat_messages)
    read = TypeAdapter(protocol.EmbeddingRequest).validate_python

    def complaints() -> int:
        with pytest.raises(ValidationError) as caught:
            read({"model": "m", "input": [["a"]] * 500})
        return caught.value.error_count()

    before = complaints()
    tell_messages_apart()

    assert complaints() < before / 6
    messages = [{"role": "user", "content": "a"}]
    for texts, kind in (
        ([5, 6], protocol.EmbeddingCompletionRequest),
        ([[5], [6]], protocol.EmbeddingCompletionRequest),
        ("a", protocol.EmbeddingCompletionRequest),
        (messages, protocol.EmbeddingChatInputRequest),
        ([messages, messages], protocol.EmbeddingBatchChatInputRequest),
    ):
        assert isinstance(read({"model": "m", "input": texts}), kind)


async def test_a_text_of_many_tokens_is_one(http: httpx.AsyncClient) -> None:
    """It is too long for this model, not too many."""
    asked = {"model": "embedder", "input": [5] * (MAX_TEXTS + 1)}

    answer = await http.post(EMBEDDINGS, json=asked)

    assert (answer.status_code, "context length" in answer.text) == (400, True)


TOO_MANY = "too_many_objects"
PARTS = [{"type": "text", "text": "a"}] * 20_000
MANY = [{"role": "user", "content": "a"}] * 20_000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": MANY}),
        (CHAT, {"messages": [{"role": "user", "content": PARTS}]}),
        (CHAT, {"messages": MANY, "truncate_prompt_tokens": -1}),
        (f"{CHAT}/render", {"messages": MANY}),
        (f"{CHAT}/batch", {"messages": [MANY]}),
        (RESPONSES, {"input": MANY}),
        (RESPONSES, {"input": [{"role": "user", "content": PARTS}]}),
        (MESSAGES, {"messages": [{"role": "user", "content": PARTS}], "max_tokens": 2}),
        (TOKENIZE, {"messages": MANY}),
        ("/api/chat", {"messages": MANY}),
    ],
)
async def test_messages_and_their_parts_are_counted_before_they_are_read(
    http: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    """Four megabytes of them would hold a front end up for seconds."""
    answer = await http.post(path, json={"model": "talker"} | body)

    assert answer.status_code == 400
    assert "20000 messages" in answer.text or str(MAX_OBJECTS) in answer.text


CALLED = {"id": "a", "type": "function", "function": {"name": "a", "arguments": "{}"}}
FUNCTION = {"type": "function", "function": {"name": "a"}}


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        (CHAT, {"tools": [FUNCTION] * (MAX_TOOLS + 1)}, "too_many_tools"),
        (CHAT, {f"f{n}": n for n in range(2000)}, "too_many_fields"),
        (CHAT, {"chat_template_kwargs": {"a": [1] * 150_000}}, "too_many_values"),
        (CHAT, {"model": 5, "metadata": [1] * 150_000}, "too_many_values"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [CALLED] * 9000}]}, TOO_MANY),
        (CHAT, {"documents": [{"a": 'b"\\'}] * 20_000}, TOO_MANY),
        (CHAT, {"documents": [1] * 150_000}, "too_many_values"),
        (CHAT, {"messages": [1] * 2000, "truncate_prompt_tokens": None}, "invalid_request"),
        (CHAT, {"messages": [{"role": "user", "content": [1] * 2000}]}, "invalid_request"),
        (f"{CHAT}/batch", {"messages": [[1] * 2000]}, "invalid_request"),
        (CHAT, {"stop": ["ab"] * 129}, "too_many_stops"),
        (f"{RESPONSES}/input_tokens", {"input": [1] * 2000}, "invalid_request"),
        (f"{RESPONSES}/input_tokens", {"input": [{}] * 3000}, "too_many_items"),
        (RESPONSES, {"input": [1] * 2000, "truncation": "disabled"}, "invalid_request"),
        (RESPONSES, {"input": MANY[:1025], "truncation": "disabled"}, "context_length_exceeded"),
        (EMBEDDINGS, {"model": "embedder", "input": [["a"] * 5000]}, "too_many_texts"),
        (EMBEDDINGS, {"model": "embedder", "input": [1.5] * 5000}, "too_many_texts"),
        ("/classify", {"model": "scorer", "input": [1.5] * 5000}, "too_many_texts"),
        ("/rerank", {"model": "scorer", "query": "a", "documents": [1] * 5000}, "too_many_texts"),
        ("/v2/embed", {"model": "embedder", "texts": [1] * 5000}, "too_many_texts"),
        (CHAT, {"n": "64", "stop_token_ids": [5] * 5000}, "invalid_request"),
        (RESPONSES, {"input": "a", "tools": [FUNCTION] * (MAX_TOOLS + 1)}, "too_many_tools"),
        (TOKENIZE, {"messages": HELLO, "tools": [FUNCTION] * (MAX_TOOLS + 1)}, "too_many_tools"),
    ],
)
async def test_values_are_counted_before_they_are_read(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], code: str
) -> None:
    """Some megabytes of them would hold a front end up for seconds."""
    answer = await http.post(path, json={"model": "talker", "messages": HELLO} | body)

    assert answer.status_code == 400
    assert len(answer.content) < 500
    assert answer.json()["error"]["code"] == code


@pytest.mark.parametrize("arguments", ["[" * 100_000, '{"a": ' + "[1," * 50_000])
async def test_arguments_that_are_nested_too_deeply(
    http: httpx.AsyncClient, arguments: str
) -> None:
    """They are the client's fault."""
    call = {"id": "a", "type": "function", "function": {"name": "a", "arguments": arguments}}
    messages = [*HELLO, {"role": "assistant", "tool_calls": [call]}]

    answer = await http.post(CHAT, json={"model": "talker", "messages": messages})

    assert answer.status_code == 400
    assert "nested too deeply" in answer.json()["error"]["message"]


async def test_items_are_read_until_the_first_that_is_wrong(http: httpx.AsyncClient) -> None:
    """Each wrong one takes milliseconds, and is described by two hundred faults."""
    items = [{"type": "nothing"}] * 1000

    answer = await http.post(RESPONSES, json={"model": "talker", "input": items})

    assert answer.status_code == 400
    assert "input.1" not in answer.text.replace("'", "").replace(", ", ".")


@pytest.mark.parametrize("path", ["/api/generate", "/api/chat"])
async def test_stops_are_counted_in_ollamas_dialect(http: httpx.AsyncClient, path: str) -> None:
    asked = {"model": "talker", "prompt": "a", "messages": HELLO, "options": {"stop": ["ab"] * 129}}

    answer = await http.post(path, json=asked)

    assert (answer.status_code, "stop" in answer.json()["error"]) == (400, True)


@pytest.mark.parametrize("path", [MESSAGES, "/api/chat"])
async def test_values_are_counted_in_every_dialect(http: httpx.AsyncClient, path: str) -> None:
    nested = [{"type": "tool_result", "content": PARTS}]
    messages = [{"role": "user", "content": nested, "images": [{}] * 20_000}]
    asked = {"model": "talker", "messages": messages, "max_tokens": 2}

    answer = await http.post(path, json=asked)

    assert answer.status_code == 400
    assert str(MAX_OBJECTS) in answer.text


async def test_a_large_schema_is_no_conversation(http: httpx.AsyncClient) -> None:
    """Two hundred tools with fifty properties each are not too many objects."""
    properties = {f"p{n}": {"type": "string"} for n in range(50)}
    schema = {"type": "object", "properties": properties}
    tool = {"type": "function", "function": {"name": "a", "parameters": schema}}
    asked = {"model": "talker", "messages": HELLO, "max_tokens": 2, "tools": [tool] * 200}

    answer = await http.post(TOKENIZE, json=asked)

    assert answer.status_code == 200, answer.text


async def test_marks_in_texts_do_not_count(http: httpx.AsyncClient) -> None:
    """A text of braces and commas is one value; what is asked fits into the context."""
    text = '{,\\"' * 100_000
    asked = {"model": "talker", "messages": HELLO, "max_tokens": 2, "metadata": {"code": text}}

    answer = await http.post(CHAT, json=asked)

    assert answer.status_code == 200


@pytest.mark.parametrize("field", [{"prompt": "a " * 200_000}, {"prompt": "\\u" * 200_000}, {
    "messages": [{"role": "user", "content": "a " * 200_000}]}])  # fmt: skip
async def test_a_text_that_is_only_made_tokens_is_bounded(
    http: httpx.AsyncClient, field: dict[str, Any]
) -> None:
    answer = await http.post(TOKENIZE, json={"model": "talker"} | field)

    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "text_too_long")


async def test_an_escaped_character_counts_once(http: httpx.AsyncClient) -> None:
    text = "\u00e9\n" * 90_000
    body = json.dumps({"model": "talker", "prompt": text}).encode()
    assert body.count(b"\\u00e9\\n") == 90_000

    answer = await http.post(TOKENIZE, content=body, headers={"content-type": "application/json"})

    assert answer.status_code == 200, answer.text


async def test_tokens_are_counted_before_they_become_text(http: httpx.AsyncClient) -> None:
    asked = {"model": "talker", "tokens": [5] * (MAX_LISTED_TOKENS + 2)}

    answer = await http.post("/detokenize", json=asked)

    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "too_many_tokens")


@pytest.mark.parametrize("kind", ["chat", "generate"])
async def test_a_duration_of_many_digits(http: httpx.AsyncClient, kind: str) -> None:
    """It is read once, and not repeated."""
    asked = {"model": "talker", "prompt": "a", "messages": HELLO, "keep_alive": "1" * 500_000}

    answer = await http.post(f"/api/{kind}", json=asked)

    assert answer.status_code == 400
    assert len(answer.text) < 200


@pytest.mark.parametrize("choices", [10**9, 2**63 - 1])
async def test_choices_are_bounded(http: httpx.AsyncClient, choices: int) -> None:
    for path, asked in ((CHAT, PLAIN), (COMPLETIONS, {"model": "talker", "prompt": "a"})):
        answer = await http.post(path, json=asked | {"n": choices})
        assert answer.status_code == 400, path
        assert "n must be at most" in answer.text


# --- what a checkpoint would have run ------------------------------------------------------------


@pytest_asyncio.fixture(loop_scope="session")
async def served(
    core: StandInCore, http: httpx.AsyncClient, models: tuple[FrontModel, ...]
) -> AsyncIterator[Callable[[Path, str], Awaitable[httpx.Response]]]:
    """Has a front end serve a checkpoint, and asks a path of it."""

    async def ask(checkpoint: Path, path: str) -> httpx.Response:
        core.change([*models, model_at(checkpoint, checkpoint.name)])
        return await http.post(path, json=PLAIN | {"model": checkpoint.name})

    yield ask
    core.change(models)


@pytest.mark.parametrize("model_type", ["llama", "evil"])
async def test_code_of_a_checkpoint_is_not_run(
    served: Callable[[Path, str], Awaitable[httpx.Response]],
    generator: Path,
    tmp_path: Path,
    model_type: str,
) -> None:
    """Neither where its classes are known, nor where only its own code would know them."""
    mark = tmp_path / "mark"
    code = {
        "AutoConfig": "configuration_evil.Evil",
        "AutoModelForCausalLM": "modeling_evil.Evil",
        "AutoTokenizer": ["tokenization_evil.Evil", "tokenization_evil.Evil"],
        "AutoProcessor": "processing_evil.Evil",
    }
    path = like(generator, tmp_path / f"evil-{model_type}", model_type=model_type, auto_map=code)
    described = json.loads((path / "tokenizer_config.json").read_bytes())
    described |= {"auto_map": {"AutoTokenizer": code["AutoTokenizer"]}}
    (path / "tokenizer_config.json").write_text(json.dumps(described), encoding="utf-8")
    for module in ("configuration", "modeling", "tokenization", "processing"):
        (path / f"{module}_evil.py").write_text(EVIL.format(mark=mark), encoding="utf-8")

    answer = await served(path, CHAT)

    assert answer.status_code == (200 if model_type == "llama" else 500)
    assert not mark.exists()


@pytest.mark.parametrize(
    "template",
    [
        "{{ cycler.__init__.__globals__.os.system('touch MARK') }}",
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{% include '/etc/hostname' %}",
    ],
)
async def test_a_template_of_a_checkpoint_is_confined(
    served: Callable[[Path, str], Awaitable[httpx.Response]],
    generator: Path,
    tmp_path: Path,
    template: str,
) -> None:
    """It reaches nothing but what it is given; what it fails is no answer."""
    mark = tmp_path / "mark"
    path = like(generator, tmp_path / f"evil-{hashlib.sha256(template.encode()).hexdigest()[:8]}")
    described = json.loads((path / "tokenizer_config.json").read_bytes())
    described["chat_template"] = template.replace("MARK", str(mark))
    (path / "tokenizer_config.json").write_text(json.dumps(described), encoding="utf-8")

    answer = await served(path, f"{CHAT}/render")

    assert answer.status_code >= 400, answer.text
    assert not mark.exists()
