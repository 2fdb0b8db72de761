"""Chats with images in all three dialects, of a model that takes turns in one pool with the text of
the same checkpoint: each answer is plain vLLM's. Bad images are refused, and an allowed host's are
fetched."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import httpx

from appliance.config.loader import load_config
from appliance.demo.run import free_port, running_daemon
from tests.engine.with_images import QWEN2_5, make_with_images
from tests.frontend.pictures import encoded, picture, url_of
from tests.patience import PATIENCE_SECONDS

CONTEXT, TOKENS = 512, 12
BLIND: Final = "blind"
FILES: Final = tuple(picture(120, 90, kind, shade) for kind, shade in (("PNG", 3), ("JPEG", 77)))
TEXT: Final = "what is this?"
PLAIN: Final = """
import json, os, sys
from appliance.engines.vllm import prepare_environment
from appliance.engines.vllm.images.libraries import inspect_here, provide_torchvision
prepare_environment("auto")
assert provide_torchvision()
inspect_here()
from vllm import LLM, SamplingParams

task = json.load(sys.stdin)
answer = os.dup(1)
os.dup2(2, 1)
kept, texts = [], []
for path, images, chats in task["models"]:
    kept.append(LLM(path, dtype="float32", max_model_len=task["context"], enforce_eager=True,
                    limit_mm_per_prompt={"image": images, "video": 0}, max_num_seqs=8,
                    enable_prefix_caching=False, kv_cache_memory_bytes=64 << 20))
    greedy = SamplingParams(temperature=0.0, max_tokens=task["tokens"])
    made = kept[-1].chat(chats, greedy, use_tqdm=False)
    texts.append([one.outputs[0].text for one in made])
os.write(answer, json.dumps(texts).encode())
os._exit(0)
"""


class Store(BaseHTTPRequestHandler):
    """Gives the first of the images, whatever is asked for."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(FILES[0])))
        self.end_headers()
        self.wfile.write(FILES[0])


@contextmanager
def store() -> Iterator[str]:
    """A server of images on this machine; its URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Store) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            serving.join()


def test_answers_equal_plain_vllm(tmp_path: Path) -> None:
    with store() as images:
        serve_and_ask(tmp_path, images)


def serve_and_ask(tmp_path: Path, store_url: str) -> None:
    paths = {name: make_with_images(tmp_path, name) for name in (QWEN2_5,)}
    expected = plain(paths)
    file = tmp_path / "appliance.toml"
    models = [(name, path, 2) for name, path in paths.items()] + [(BLIND, paths[QWEN2_5], 0)]
    file.write_text(
        f'[api]\nbind = "127.0.0.1:{free_port()}"\nadmin_socket = ""\nmax_body = "32MiB"\n'
        f'image_hosts = ["{store_url}"]\nimage_networks = ["127.0.0.1/32"]\n'
        '[devices]\nkind = "cpu"\nslab = "256KiB"\nmemory = "24MiB"\nhost_cache = "96MiB"\n'
        + "".join(
            f'[[model]]\nname = "{name}"\npath = "{path}"\ndtype = "float32"\n'
            f"max_context = {CONTEXT}\nimages = {images}\n"
            for name, path, images in models
        )
    )
    with running_daemon(file, load_config(file)) as (url, _):
        answers = asyncio.run(ask_all(url))
        remote = httpx.post(
            f"{url}/v1/chat/completions",
            json={
                "model": QWEN2_5,
                "max_tokens": TOKENS,
                "temperature": 0,
                "messages": [chat_of([f"{store_url}/a.png"])],
            },
            timeout=PATIENCE_SECONDS,
        )
        refused = [
            httpx.post(f"{url}{path}", json=body, timeout=PATIENCE_SECONDS) for path, body in bad()
        ]
        asked = [{"model": name} for name in (QWEN2_5, BLIND)]
        shown = [
            httpx.post(f"{url}/api/show", json=one, timeout=PATIENCE_SECONDS).json()["capabilities"]
            for one in asked
        ]
    assert remote.json()["choices"][0]["message"]["content"] == expected[QWEN2_5, 1]
    assert answers == {key: expected[key[0], key[1]] for key in answers}
    assert len({expected[QWEN2_5, number] for number in range(4)}) == 4, "images make a difference"
    assert [one.status_code for one in refused] == [413, 400, 400, 400]
    assert all(words in one.text for one, words in zip(refused, WORDS, strict=True))
    assert [("vision" in capabilities) for capabilities in shown] == [True, False]


def plain(paths: dict[str, str]) -> dict[tuple[str, int], str]:
    """What unchanged vLLM says, by model and number of the chat; the text alone is the first."""
    chats = [[openai_chat(files)] for files in asked()]
    task = {
        "context": CONTEXT,
        "tokens": TOKENS,
        "models": [[path, 2, chats] for path in paths.values()],
    }
    done = subprocess.run(
        [sys.executable, "-c", PLAIN],
        input=json.dumps(task).encode(),
        stdout=subprocess.PIPE,
        check=True,
        timeout=PATIENCE_SECONDS,
    )
    texts = json.loads(done.stdout)
    found = {
        (name, number): text
        for name, of_model in zip(paths, texts, strict=True)
        for number, text in enumerate(of_model)
    }
    return found | {(BLIND, 0): found[QWEN2_5, 0]}


def asked() -> list[tuple[bytes, ...]]:
    """The images of each chat."""
    return [(), FILES[:1], FILES[1:], FILES]


def openai_chat(files: tuple[bytes, ...]) -> dict[str, Any]:
    return chat_of([url_of(file) for file in files])


def chat_of(urls: list[str]) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"role": "user", "content": [*parts, {"type": "text", "text": TEXT}]}


def anthropic_chat(files: tuple[bytes, ...]) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [
        {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": encoded(file)},
        }
        for file in files
    ]
    return {"role": "user", "content": [*parts, {"type": "text", "text": TEXT}]}


def ollama_chat(files: tuple[bytes, ...]) -> dict[str, Any]:
    return {"role": "user", "content": TEXT, "images": [encoded(file) for file in files]}


async def ask_all(url: str) -> dict[tuple[str, int, str], str]:
    """All chats in all dialects at once."""
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_SECONDS) as client:
        keys = [
            (model, number, dialect)
            for model in (QWEN2_5, BLIND)
            for number in range(1 if model == BLIND else len(asked()))
            for dialect in ("openai", "anthropic", "ollama")
        ]
        answers = await asyncio.gather(*(ask(client, *key) for key in keys))
    return dict(zip(keys, answers, strict=True))


async def ask(client: httpx.AsyncClient, model: str, number: int, dialect: str) -> str:
    files = asked()[number]
    body: dict[str, Any] = {"model": model, "max_tokens": TOKENS, "temperature": 0}
    if dialect == "openai":
        answer = await client.post(
            "/v1/chat/completions", json=body | {"messages": [openai_chat(files)]}
        )
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])
    if dialect == "anthropic":
        answer = await client.post(
            "/v1/messages", json=body | {"messages": [anthropic_chat(files)]}
        )
        assert answer.status_code == 200, answer.text
        return "".join(part["text"] for part in answer.json()["content"])
    options = {"num_predict": TOKENS, "temperature": 0}
    asking = {"model": model, "stream": False, "options": options}
    answer = await client.post("/api/chat", json=asking | {"messages": [ollama_chat(files)]})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["message"]["content"])


WORDS: Final = (
    "larger than",
    "messages[0].content[0].image_url: nothing is fetched from http://127.0.0.1,",
    "messages[0].content[0].source.data: it is no PNG",
    "is served for text only",
)


def bad() -> list[tuple[str, dict[str, Any]]]:
    """Bodies that are refused, with `WORDS`."""
    part: dict[str, Any] = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}
    private = {"model": QWEN2_5, "messages": [{"role": "user", "content": [part]}]}
    large = json.loads(json.dumps(private).replace("http://127.0.0.1/a.png", "A" * 40_000_000))
    wrong = {"model": QWEN2_5, "max_tokens": 3, "messages": [anthropic_chat((b"%PDF-1.7",))]}
    blind = {"model": BLIND, "messages": [openai_chat(FILES)]}
    chats = "/v1/chat/completions"
    return [(chats, large), (chats, private), ("/v1/messages", wrong), (chats, blind)]
