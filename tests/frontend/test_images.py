"""Chats with images: the same prompt and the same images in each dialect, and what is refused."""

from __future__ import annotations

import asyncio
import json
import shutil
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import pytest_asyncio
from msgspec import structs
from vllm.v1.engine import EngineCoreRequest

from appliance.engines.vllm.messages import decode_request
from appliance.service.front_frames import FetchedImage, FetchImage, Submit, TookImage
from tests.engine.with_images import (
    GEMMA3,
    GEMMA_TOKENS,
    INTERNVL3,
    LLAMA4,
    LLAVA,
    MISTRAL3,
    QWEN2_5,
    make_with_images,
)
from tests.frontend.conftest import model_at
from tests.frontend.pictures import encoded, picture, url_of
from tests.frontend.stand_in_core import StandInCore, front_end
from tests.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASKED: Final = "what is this"
SIDE: Final = 28
"""Of the square of pixels that a token of Qwen2.5-VL is made of."""
WIDE: Final = 1 << 14
"""Tokens, and as many of an image."""

OTHERS: Final = (
    ("mistral", MISTRAL3),
    ("llava", LLAVA),
    ("internvl", INTERNVL3),
    ("llama", LLAMA4),
)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def core(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Any]:
    folder = tmp_path_factory.mktemp("seeing")
    seer, gemma = (Path(make_with_images(folder, name)) for name in (QWEN2_5, GEMMA3))
    wide = Path(shutil.copytree(seer, folder / "wide"))
    change(wide / "config.json", max_position_embeddings=WIDE)
    size = {"shortest_edge": 1, "longest_edge": WIDE * SIDE**2}
    change(wide / "preprocessor_config.json", size=size)
    models = [
        model_at(seer, "seer", images=3),
        model_at(wide, "wide", images=3, max_context=WIDE),
        model_at(seer, "blind"),
        model_at(gemma, "gemma", images=1),
        *(model_at(Path(make_with_images(folder, path)), name, images=1) for name, path in OTHERS),
    ]
    async with front_end(models, max_body_bytes=32 << 20) as core:
        yield core


@pytest_asyncio.fixture(loop_scope="module")
async def http(core: StandInCore) -> AsyncIterator[httpx.AsyncClient]:
    core.frames.clear()
    core.script()
    async with httpx.AsyncClient(base_url=core.url, timeout=PATIENCE_SECONDS) as client:
        yield client


def change(file: Path, **values: Any) -> None:
    """Set values of a file of JSON."""
    file.write_text(json.dumps(json.loads(file.read_bytes()) | values), encoding="utf-8")


def chat(*parts: dict[str, Any], **changes: Any) -> dict[str, Any]:
    said = [{"role": "user", "content": list(parts)}]
    return {"model": "seer", "messages": said, "max_tokens": 3} | changes


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


TEXT: Final = {"type": "text", "text": ASKED}


def dialects(file: bytes, model: str = "seer") -> list[tuple[str, dict[str, Any]]]:
    """The same question about an image in each of them."""
    source = {"type": "base64", "media_type": "image/png", "data": encoded(file)}
    parts = [
        {"type": "input_image", "image_url": url_of(file), "detail": "auto"},
        {"type": "input_text", "text": ASKED},
    ]
    ollama = {"model": model, "stream": False, "options": {"num_predict": 3}}
    said = {"role": "user", "content": ASKED, "images": [encoded(file)]}
    return [
        ("/v1/chat/completions", chat(image(url_of(file)), TEXT, model=model)),
        ("/v1/messages", chat({"type": "image", "source": source}, TEXT, model=model)),
        (
            "/v1/responses",
            {"model": model, "input": [{"role": "user", "content": parts}], "max_output_tokens": 3},
        ),
        ("/api/chat", ollama | {"messages": [said]}),
        ("/api/generate", ollama | {"prompt": ASKED, "images": [encoded(file)]}),
    ]


def features(submit: Submit) -> list[tuple[str, str, int, bytes]]:
    """Of each image what it is, what it is known by, its tokens, and its pixels."""
    request: EngineCoreRequest = decode_request(submit.body)
    return [
        (
            feature.modality,
            feature.identifier,
            feature.mm_position.length,
            feature.data["pixel_values"].data.numpy().tobytes(),
        )
        for feature in request.mm_features or ()
        if feature.data is not None
    ]


@pytest.mark.parametrize(
    ("model", "tokens", "embeddings"),
    [
        ("seer", 6, 6),
        ("gemma", 8, GEMMA_TOKENS),
        ("mistral", 6, 4),
        ("llava", 16, 16),
        ("internvl", 14, 12),
        ("llama", 17, 12),
    ],
)
async def test_dialects(
    core: StandInCore, http: httpx.AsyncClient, model: str, tokens: int, embeddings: int
) -> None:
    """Make the same prompt and the same pixels of the same question."""
    for path, body in dialects(picture(), model):
        answer = await http.post(path, json=body)
        assert answer.status_code == 200, (path, answer.text)
    chats, messages, responses, *ollama = core.said(Submit)
    asked = [chats, messages, *ollama]
    assert len({submit.prompt for submit in asked}) == 1
    # For this dialect vLLM has the tokenizer add what begins a text, if it adds anything.
    assert responses.prompt[-len(chats.prompt) :] == chats.prompt
    assert all(features(submit) == features(chats) for submit in (*asked, responses))
    ((modality, _, length, pixels),) = features(chats)
    assert modality == "image"
    assert length == tokens
    assert chats.images == (embeddings,)
    assert max(map(chats.prompt.count, chats.prompt)) >= embeddings
    assert len(set(pixels)) > 1


async def test_several_images(core: StandInCore, http: httpx.AsyncClient) -> None:
    """Are known by their content, whatever their type is called; each choice has them."""
    two = [image(url_of(picture(shade=shade))) for shade in (1, 2)]
    answer = await http.post("/v1/chat/completions", json=chat(*two, TEXT, n=2))
    assert answer.status_code == 200, answer.text
    first, second = core.said(Submit)
    assert features(first) == features(second)
    (_, one, *_), (_, other, *_) = features(first)
    assert one != other
    core.frames.clear()
    jpeg = url_of(picture(shade=1)).replace("image/png", "image/jpeg")
    await http.post("/v1/chat/completions", json=chat(image(jpeg), TEXT))
    (submit,) = core.said(Submit)
    assert [name for _, name, *_ in features(submit)] == [one]


async def test_images_named_by_url(core: StandInCore, http: httpx.AsyncClient) -> None:
    """Are those of data URLs once the core has fetched them, each once. It is asked for no more
    than a prompt may have, and for none of what is not named by the web."""
    url = "https://images.example.org/a,b.png"
    core.fetching = lambda asked: FetchedImage(call=asked.call, file=picture())
    asked = dialects(picture())[:3]
    for path, body in asked:
        there = {"type": "url", "url": url}
        said = json.loads(json.dumps(body).replace(url_of(picture()), url))
        if path == "/v1/messages":
            said["messages"][0]["content"][0]["source"] = there
        for one in (body, said):
            answer = await http.post(path, json=one)
            assert answer.status_code == 200, answer.text
        here, fetched = core.said(Submit)[-2:]
        assert features(here) == features(fetched) != []
        assert here.prompt == fetched.prompt
        assert here.images == fetched.images
    assert [frame.url for frame in core.said(FetchImage)] == [url] * len(asked)
    core.frames.clear()
    await http.post("/v1/chat/completions", json=chat(image(url), image(url), TEXT))
    await http.post("/v1/chat/completions", json=chat(*[image(url)] * 4))
    await http.post("/v1/chat/completions", json=chat(image("file:///etc/hostname")))
    assert len(core.said(FetchImage)) == len(core.said(Submit)) == 1


async def test_bad_images_named_by_url(core: StandInCore, http: httpx.AsyncClient) -> None:
    """What is fetched is looked at as what is sent, and counted as a part of the body."""
    url = "http://store:8080/a.png"
    for file, status, reason in (
        (b"<svg/>", 400, "messages[0].content[0].image_url: it is no PNG, JPEG, WebP or GIF"),
        (huge(50_000, 50_000), 400, "messages[0].content[0].image_url: it is more than"),
        (bytes((64 << 20) - 100), 413, "api.max_bodies"),
    ):
        core.fetching = lambda asked, file=file: FetchedImage(  # type: ignore[misc]
            call=asked.call, file=file
        )
        answer = await http.post("/v1/chat/completions", json=chat(image(url)))
        assert answer.status_code == status, answer.text
        assert reason in answer.json()["error"]["message"]
    assert core.said(Submit) == []


async def test_urls_in_lines_of_batches(core: StandInCore) -> None:
    """What is fetched for a line counts as it does for others, and what is too much for now has
    the status of what is tried again."""
    body = chat(image("http://store:8080/a.png"))
    before = len(core.said(TookImage))
    for fetched, status, code in (
        (FetchedImage(call=0, file=bytes((64 << 20) - 100)), 413, "body_too_large"),
        (FetchedImage(call=0, refused="try again later", busy=True), 429, "too_many_fetches"),
    ):
        core.fetching = lambda asked, answer=fetched: structs.replace(  # type: ignore[misc]
            answer, call=asked.call
        )
        ran = await core.run("/v1/chat/completions", body)
        assert ran.status == status, ran.body
        assert json.loads(ran.body)["error"]["code"] == code
    assert len(core.said(TookImage)) == before + 1


async def test_a_client_that_leaves_waits_for_no_url(
    core: StandInCore, http: httpx.AsyncClient
) -> None:
    """The call is over, and with it what the core fetches; others are answered."""
    core.fetching = lambda asked: None
    asked = http.post("/v1/chat/completions", json=chat(image("https://example.org/a.png")))
    leaving = asyncio.create_task(asked)
    await core.seen(FetchImage)
    leaving.cancel()
    await core.quiet()
    answer = await http.post("/v1/chat/completions", json=chat(image(url_of(picture())), TEXT))
    assert answer.status_code == 200


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "GIF"])
async def test_types(core: StandInCore, http: httpx.AsyncClient, kind: str) -> None:
    answer = await http.post("/v1/chat/completions", json=chat(image(url_of(picture(kind=kind)))))
    assert answer.status_code == 200, answer.text


async def test_counts(core: StandInCore, http: httpx.AsyncClient) -> None:
    """An image counts as many tokens as it has in the prompt, also if it is large."""
    file = picture(600, 600) + bytes(1 << 20)
    (_, openai), (_, anthropic), (_, responses), *_ = dialects(file)
    answer = await http.post("/v1/chat/completions", json=openai)
    assert answer.status_code == 200, answer.text
    tokens = answer.json()["usage"]["prompt_tokens"]
    del openai["max_tokens"], responses["max_output_tokens"]
    counted = [
        (await http.post("/tokenize", json=openai)).json()["count"],
        (await http.post("/v1/messages/count_tokens", json=anthropic)).json()["input_tokens"],
        (await http.post("/v1/responses/input_tokens", json=responses)).json()["input_tokens"],
    ]
    assert counted == [tokens, tokens, tokens]


def huge(width: int, height: int) -> bytes:
    """The head of a PNG of so many pixels, of which there are none."""
    chunks = b""
    size = width.to_bytes(4, "big") + height.to_bytes(4, "big") + b"\x08\x02\x00\x00\x00"
    for kind, data in ((b"IHDR", size), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")):
        checked = zlib.crc32(kind + data).to_bytes(4, "big")
        chunks += len(data).to_bytes(4, "big") + kind + data + checked
    return b"\x89PNG\r\n\x1a\n" + chunks


JPEG: Final = picture(400, 400, "JPEG")
BAD: Final = {
    "four of three": ([image(url_of(picture()))] * 4, "content[3].image_url: a prompt of this"),
    "http": ([image("http://169.254.169.254/latest")], "content[0].image_url: nothing is fetched"),
    "file": ([image("file:///etc/hostname")], "content[0].image_url: nothing is fetched"),
    "text": ([TEXT, image(url_of(b"<svg/>"))], "content[1].image_url: it is no PNG, JPEG, WebP"),
    "bmp": ([image(url_of(picture(kind="BMP")))], "content[0].image_url: it is no PNG"),
    "bomb": ([image(url_of(huge(50_000, 50_000)))], "content[0].image_url: it is more than"),
    "large": ([image(url_of(huge(8_000, 5_001)))], "8000 x 5001 is more than 40000000 pixels"),
    "together": ([image(url_of(huge(8_000, 5_000)))] * 3, "content[2].image_url: with it the"),
    "high": ([image(url_of(picture(1, 201)))], "1 x 201: one side is more than 200 times as"),
    "wide": ([TEXT, image(url_of(huge(30_000_000, 1)))], "content[1].image_url: 30000000 x 1: one"),
    "none": ([image(url_of(huge(1, 0)))], "content[0].image_url: "),
    "cut": ([image(url_of(picture(400, 400)[:-900]))], "content[0].image_url: it is damaged"),
    "cut jpeg": ([image(url_of(JPEG[:-900]))], "content[0].image_url: it is damaged"),
    "scans": ([image(url_of(JPEG + b"\xff\xda" * 101))], "JPEG of too many scans"),
    "base64": ([image("data:image/png;base64,%%%%")], "content[0].image_url: no base64"),
    "not base64": ([image("data:image/png,abc")], "content[0].image_url: the data URL has no"),
    "empty": ([image("")], "content[0].image_url: send the image"),
    "heavy": ([image(url_of(bytes((20 << 20) + 1)))], "content[0].image_url: more than 20971520"),
    "uuid": ([image(url_of(picture())) | {"uuid": "x"}], "content[0].uuid: images are known"),
    "no url": ([{"type": "image_url"}], "content[0].image_url: send the image"),
    "embeds": (
        [{"type": "image_embeds", "image_embeds": "AAAA"}],
        "content[0]: this model reads no",
    ),
    "film": ([{"type": "video_url", "video_url": {"url": "x"}}], "reads no video_url"),
    "sound": ([{"type": "input_audio", "input_audio": {"data": "AA"}}], "reads no input_audio"),
    "source": ([{"type": "image", "source": {"type": "file"}}], "content[0].source.type: send"),
}


@pytest.mark.parametrize("name", BAD)
async def test_bad_images(core: StandInCore, http: httpx.AsyncClient, name: str) -> None:
    """Are refused by the name of their part, before anything is computed."""
    parts, said = BAD[name]
    answer = await http.post("/v1/chat/completions", json=chat(*parts))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert said in error["message"]
    assert error["message"].startswith("messages[0].content[")
    assert error["param"] in error["message"]
    assert core.said(Submit) == []


async def test_shapes_that_the_model_does_not_take(
    core: StandInCore, http: httpx.AsyncClient
) -> None:
    """Are refused by the name of their part, and not with what vLLM says of its objects."""
    part = image(url_of(picture(200, 1)))
    answer = await http.post("/v1/chat/completions", json=chat(part, TEXT, model="mistral"))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    name = "messages[0].content[0].image_url"
    assert error["message"].startswith(f"{name}: the model's image processor does not take this")
    assert error["param"] == name
    assert core.said(Submit) == []


async def test_bad_images_in_other_dialects(core: StandInCore, http: httpx.AsyncClient) -> None:
    """Have the words of the dialect, and the names of its fields."""
    remote = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [remote]}
    for part, name in ((remote, "content[0]"), (result, "content[0].content[0]")):
        answer = await http.post("/v1/messages", json=chat(part))
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["message"].startswith(f"messages[0].{name}.source.url: nothing is fetched")
    asked = {"model": "seer", "stream": False}
    said: dict[str, Any] = {"role": "user", "content": "a", "images": ["AAAA"]}
    for path, body, name in (
        ("/api/chat", {"messages": [said]}, "messages[0].images[0]: it is no PNG"),
        ("/api/generate", {"prompt": "a", "images": ["%"]}, "images[0]: no base64"),
        ("/api/generate", {"prompt": "a", "images": [encoded(picture())], "raw": True}, "images: "),
    ):
        answer = await http.post(path, json=asked | body)
        assert answer.status_code == 400
        assert answer.json()["error"].startswith(name), answer.text
    long = said | {"images": [encoded(picture())], "content": "word " * 2000}
    answer = await http.post("/api/chat", json=asked | {"messages": [long]})
    assert answer.status_code == 400, answer.text
    parts = [{"type": "input_image", "image_url": "http://127.0.0.1/a.png"}]
    said = {"role": "user", "content": parts}
    answer = await http.post("/v1/responses", json={"model": "seer", "input": [said]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "input[0].content[0].image_url"
    assert core.said(Submit) == []


async def test_where_no_images_are_read(core: StandInCore, http: httpx.AsyncClient) -> None:
    """Batches of chats, what is only rendered, and a body with options for the images."""
    good = chat(image(url_of(picture())))
    batch = good | {"messages": [good["messages"]]}
    elsewhere = "images are read from the messages of one chat"
    for path, body, said in (
        ("/v1/chat/completions/batch", batch, elsewhere),
        ("/v1/chat/completions/render", good, elsewhere),
        (
            "/v1/chat/completions",
            good | {"mm_processor_kwargs": {"max_pixels": 1 << 30}},
            "mm_processor_kwargs",
        ),
        (
            "/v1/chat/completions",
            good | {"media_io_kwargs": {"image": {"image_mode": "L"}}},
            "media_io_kwargs",
        ),
    ):
        answer = await http.post(path, json=body)
        assert answer.status_code == 400, (path, answer.text)
        assert said in answer.json()["error"]["message"], (path, answer.text)
    assert core.said(Submit) == []


async def test_prepared_images_that_are_too_large(
    core: StandInCore, http: httpx.AsyncClient
) -> None:
    """Each is small enough: it is what a request has of them that is not taken."""
    files = [picture(112 * SIDE, 30 * SIDE, shade=shade) for shade in (1, 2, 3)]
    path, parts = "/v1/chat/completions", [image(url_of(file)) for file in files]
    one = await http.post(path, json=chat(parts[0], model="wide"))
    all_of_them = await http.post(path, json=chat(*parts, model="wide"))
    assert one.status_code == 200, one.text
    assert len(core.said(Submit)) == 1
    assert all_of_them.status_code == 400
    said = all_of_them.json()["error"]["message"]
    assert "bytes when they are prepared" in said
    assert all(name in said for name in ("max_pixels", "size.longest_edge", "max_patches"))
    core.frames.clear()
    many = await http.post(path, json=chat(parts[0], model="wide", n=18))
    assert many.status_code == 400, many.text
    error = many.json()["error"]
    assert error["param"] == "n"
    assert "ask for fewer choices" in error["message"]
    assert core.said(Submit) == []


async def test_body_that_is_too_large(core: StandInCore, http: httpx.AsyncClient) -> None:
    """Is answered, although its client sends on."""
    answer = await http.post("/v1/chat/completions", json=chat(image("x" * 40_000_000)))
    assert answer.status_code == 413
    assert "larger than" in answer.json()["error"]["message"]


async def test_text_alone(core: StandInCore, http: httpx.AsyncClient) -> None:
    """Is the same with and without what reads images, and a model without it refuses them."""
    for model in ("seer", "blind"):
        answer = await http.post("/v1/chat/completions", json=chat(TEXT) | {"model": model})
        assert answer.status_code == 200, answer.text
    one, other = core.said(Submit)
    assert one.prompt == other.prompt
    answer = await http.post(
        "/v1/chat/completions", json=chat(image(url_of(picture()))) | {"model": "blind"}
    )
    assert answer.status_code == 400
