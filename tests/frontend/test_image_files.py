"""Files of images are looked at in little time, whatever they are, and clients take turns."""

from __future__ import annotations

import asyncio
import io
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import pytest
from litestar import Litestar
from PIL import Image as Pillow

from appliance.frontend import images
from appliance.frontend.app import FrontEnd
from appliance.frontend.calls import Call, current
from appliance.frontend.core import Core
from appliance.frontend.image_files import BadImage, checked_size
from appliance.frontend.images import (
    AT_ONCE,
    MAX_ALL_PIXELS,
    NO_IMAGES,
    Image,
    Images,
    ImageTurns,
    key_of_url,
    look_at,
)
from appliance.frontend.serving import media
from appliance.frontend.serving.model_fronts import ModelFronts
from appliance.http.errors import BadRequest
from appliance.service.front_frames import Welcome
from tests.frontend.conftest import model_at
from tests.frontend.pictures import encoded, picture
from tests.patience import PATIENCE_SECONDS

MIB: Final = 1 << 20
LONG_HEADS: Final = {
    "jpeg of filling": b"\xff\xd8" + b"\xff" * 20 * MIB,
    "jpeg of empty segments": b"\xff\xd8" + b"\xff\xe0\0\x02" * 5 * MIB,
    "jpeg of descriptions": b"\xff\xd8" + b"\xff\xe1\0\x0aExif\0\0ab" * MIB,
    "jpeg of zeros": b"\xff\xd8" + bytes(20 * MIB),
    "jpeg of marks": b"\xff\xd8" + b"\xff\xd0" * 10 * MIB,
    "gif of comments": b"GIF89a" + bytes(7) + b"!\xfe" + b"\x01a" * 10 * MIB,
    "gif of empty comments": b"GIF89a" + bytes(7) + b"!\xfe\0" * 5 * MIB,
    "gif of zeros": b"GIF89a" + bytes(20 * MIB),
    "png of empty chunks": b"\x89PNG\r\n\x1a\n" + b"\0\0\0\0abcdABCD" * MIB,
    "webp of zeros": b"RIFF\xff\xff\xff\0WEBP" + bytes(20 * MIB),
    "zeros": bytes(20 * MIB),
}


@pytest.mark.parametrize("name", LONG_HEADS)
def test_long_heads_are_refused(name: str) -> None:
    """Without reading them to their end: that may take minutes."""
    begun = time.process_time()
    with pytest.raises(BadImage):
        checked_size(LONG_HEADS[name])
    assert time.process_time() - begun < 10


@pytest.mark.parametrize(
    "file", [b"", b"\xff\xd8", b"\xff\xd8\xff", b"GIF89a", b"\x89PNG\r\n\x1a\n"]
)
def test_short_files_are_refused(file: bytes) -> None:
    with pytest.raises(BadImage):
        checked_size(file)


@pytest.mark.parametrize(
    ("size", "pixels"),
    [
        ((1, 200), 200 * 336**2),
        ((200, 1), 200 * 336**2),
        ((400, 336), 400 * 336),
        ((900, 500), 450000),
    ],
)
def test_narrow_images_count_as_what_they_become(size: tuple[int, int], pixels: int) -> None:
    """LLaVA's image processor scales the shorter side to 336 pixels before it crops."""
    file = picture(*size)
    assert checked_size(file).prepared == pixels
    image = Image("images[0]", encoded(file), is_url=False)
    most = MAX_ALL_PIXELS // pixels
    look_at(Images((image,) * most, most))
    with pytest.raises(BadRequest, match="with it the request has more than 80000000 pixels"):
        look_at(Images((image,) * (most + 1), most + 1))


def test_what_tools_write_is_read() -> None:
    """Progressive JPEGs with descriptions and colours, GIFs of several pictures with a comment."""
    image = Pillow.open(io.BytesIO(picture(300, 200)))
    exif = Pillow.Exif()
    exif[0x010E] = "a" * 1000
    jpeg, gif = io.BytesIO(), io.BytesIO()
    image.save(jpeg, "JPEG", progressive=True, exif=exif, icc_profile=bytes(100_000), comment="a")
    image.save(gif, "GIF", save_all=True, append_images=[image.rotate(90)], comment="a" * 1000)
    for file in (jpeg, gif):
        assert checked_size(file.getvalue()) == (300, 200)


async def test_a_client_has_one_turn() -> None:
    """Others have the rest; a turn is over when the first request is submitted."""
    turns = ImageTurns()
    sent = Images((Image("images[0]", encoded(picture()), is_url=False),), 1)
    calls = {name: [Call(number) for number in range(3)] for name in ("one", "other", "third")}
    held: list[Call] = []
    news = asyncio.Condition()
    go_on = asyncio.Event()

    async def work(name: str, call: Call) -> None:
        async with turns.turn(call, (name, None), sent):
            async with news:
                held.append(call)
                news.notify_all()
            await go_on.wait()

    tasks = [asyncio.create_task(work("one", call)) for call in calls["one"]]
    tasks += [asyncio.create_task(work(name, calls[name][0])) for name in ("other", "third")]
    async with asyncio.timeout(PATIENCE_SECONDS), news:
        await news.wait_for(lambda: len(held) == AT_ONCE)
        assert held == [calls["one"][0], calls["other"][0]]
        held[0].submit("a")
        await news.wait_for(lambda: len(held) == 3)
        assert held[2] is calls["third"][0]
        held[1].submit("b")
        await news.wait_for(lambda: len(held) == 4)
        assert held[3] is calls["one"][1]
    go_on.set()
    await asyncio.gather(*tasks)
    assert len(held) == 5
    assert list(calls["one"][0].images.values()) == ["images[0]"]


async def test_an_answer_that_is_not_read() -> None:
    """Keeps no turn from others of its client: the turn is over when the answer is sent."""
    model = model_at(Path(), "seer", images=1)
    welcome = Welcome(
        keep_alive_seconds=5,
        max_body_bytes=MIB,
        max_bodies_bytes=MIB,
        strict=False,
        origins=(),
        models=(model,),
    )
    core = cast(Core, None)  # is not asked by what stands in for Ollama's dialect
    sending, read = list[int](), asyncio.Event()
    news = asyncio.Condition()

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"counted"})

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            async with news:
                sending.append(1)
                news.notify_all()
            await read.wait()

    front = FrontEnd(core, welcome, ModelFronts(core, [model]), cast(Litestar, answer))
    said = {"role": "user", "content": "a", "images": [encoded(picture())]}
    body = json.dumps({"model": "seer", "messages": [said]}).encode()
    scope = {"path": "/api/chat", "client": ("127.0.0.1", 1)}
    tasks = [
        asyncio.create_task(front.run(Call(i), scope, send, body, asyncio.Event()))
        for i in range(AT_ONCE + 1)
    ]
    async with asyncio.timeout(PATIENCE_SECONDS), news:
        await news.wait_for(lambda: len(sending) == len(tasks))
    read.set()
    await asyncio.gather(*tasks)


@pytest.mark.parametrize("leaves", [True, False])
@pytest.mark.parametrize("place", ["looked at", "decoded", "prepared"])
async def test_a_turn_lasts_as_long_as_its_thread(
    monkeypatch: pytest.MonkeyPatch, place: str, leaves: bool
) -> None:
    """Clients that hang up while a thread works on their images leave no turn to others
    meanwhile."""
    begun, go_on = threading.Semaphore(0), threading.Event()
    at_work = list[object]()

    def work(*asked: object) -> dict[int, str]:
        at_work.append(asked)
        begun.release()
        assert go_on.wait(PATIENCE_SECONDS)
        return {}

    # More threads than what is begun too early needs.
    with ThreadPoolExecutor(8) as threads, ExitStack() as at_end:
        at_end.callback(go_on.set)
        for module in (images, media):
            monkeypatch.setattr(module, "threads", threads)
        if place == "looked at":
            monkeypatch.setattr(images, "look_at", work)
        monkeypatch.setattr(media, "_decoded", work)
        renderer = SimpleNamespace(_process_multimodal=work, _mm_executor=threads)
        media.prepare_in_turns(renderer)
        turns = ImageTurns()

        async def ask(number: int) -> None:
            call = Call(number)
            current.set(call)
            async with turns.turn(call, (f"client {number % AT_ONCE}", None), NO_IMAGES):
                call.images = {key_of_url("data:image/png;base64,a"): "images[0]"}
                if place == "decoded":
                    await media.RefusingConnector().fetch_image_async("data:image/png;base64,a")
                elif place == "prepared":
                    await renderer._process_multimodal_async([1], {"image": []})

        first = [asyncio.create_task(ask(number)) for number in range(AT_ONCE)]
        for _ in first:
            assert await asyncio.to_thread(begun.acquire, timeout=PATIENCE_SECONDS)
        if leaves:
            for task in first:
                task.cancel()
            await asyncio.wait(first)
        second = [asyncio.create_task(ask(number)) for number in range(AT_ONCE, 3 * AT_ONCE)]
        for _ in range(100):  # what can begin begins
            await asyncio.sleep(0)
            await asyncio.wrap_future(threads.submit(int))
        assert len(at_work) == AT_ONCE
        go_on.set()
        await asyncio.wait_for(asyncio.gather(*second), PATIENCE_SECONDS)
        await asyncio.gather(*first, return_exceptions=True)
    assert len(at_work) == 3 * AT_ONCE
