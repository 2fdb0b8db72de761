"""Chats with sound: what arrives at the core is what vLLM makes of them, and what is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import pytest
import pytest_asyncio
from vllm.v1.engine import EngineCoreRequest

from appliance.engines.vllm.messages import decode_request
from appliance.frontend.sound import chats
from appliance.frontend.sound.chats import ChatSound, look_at
from appliance.http.errors import BadRequest
from appliance.service.front_frames import FetchImage, Submit
from tests.engine.with_sound import ChatPreparer
from tests.frontend.conftest import model_at
from tests.frontend.pictures import encoded, picture, url_of
from tests.frontend.served_here import core, http
from tests.frontend.sounds import RATE, Samples, file_of, make_hearer, tone
from tests.frontend.stand_in_core import StandInCore, front_end

__all__ = ["core", "http"]

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT: Final = "/v1/chat/completions"
TEXT: Final = {"type": "text", "text": "what is said"}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hearer(tmp_path_factory.mktemp("chats") / "hearer")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared(checkpoint: Path) -> AsyncIterator[StandInCore]:
    models = [
        model_at(checkpoint, "hearer", sounds=2),
        model_at(checkpoint, "crowded", sounds=16),
        model_at(checkpoint, "deaf"),
    ]
    async with front_end(models, max_body_bytes=32 << 20) as core:
        yield core


def chat(*parts: dict[str, Any], **changes: Any) -> dict[str, Any]:
    said = [{"role": "user", "content": list(parts)}]
    return {"model": "hearer", "messages": said, "max_tokens": 3} | changes


def sound(file: bytes, name: str = "wav") -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": encoded(file), "format": name}}


def at_url(file: bytes, kind: str = "audio/wav") -> dict[str, Any]:
    url = f"data:{kind};base64,{encoded(file)}"
    return {"type": "audio_url", "audio_url": {"url": url}}


def features(submit: Submit) -> list[tuple[str, str, int, Any]]:
    """Of each sound what it is, what it is known by, its tokens, and what the encoder reads."""
    request: EngineCoreRequest = decode_request(submit.body)
    return [
        (
            feature.modality,
            feature.identifier,
            feature.mm_position.length,
            feature.data["input_features"].data.numpy(),
        )
        for feature in request.mm_features or ()
        if feature.data is not None
    ]


async def test_sounds_are_prepared_as_plain_vllm_prepares_them(
    core: StandInCore, http: httpx.AsyncClient, checkpoint: Path
) -> None:
    samples = tone(2.0)
    file = file_of(samples, subtype="FLOAT")
    for part in (sound(file), at_url(file)):
        answer = await http.post(CHAT, json=chat(part, TEXT))
        assert answer.status_code == 200, answer.text
    first, second = core.said(Submit)
    assert first.prompt == second.prompt
    ((modality, name, length, made),), ((_, other, _, _),) = features(first), features(second)
    assert (modality, length, first.images, name) == ("audio", 50, (50,), other)
    token = max(set(first.prompt), key=first.prompt.count)
    at = first.prompt.index(token)
    short = (*first.prompt[:at], *first.prompt[at + length - 1 :])
    plain = ChatPreparer(str(checkpoint), 1).prepare(short, (Samples(samples),))  # type: ignore[arg-type]
    assert plain.tokens == first.prompt
    assert np.array_equal(plain.features[0].data["input_features"].data.numpy(), made)


@pytest.mark.parametrize(
    ("kind", "rate", "name"),
    [("FLAC", RATE, "flac"), ("OGG", RATE, "ogg"), ("MP3", 44_100, "mp3"), ("WAV", 8_000, "wav")],
)
async def test_kinds_of_files(
    core: StandInCore, http: httpx.AsyncClient, kind: str, rate: int, name: str
) -> None:
    file = file_of(tone(1.5, rate), rate=rate, kind=kind)
    answer = await http.post(CHAT, json=chat(TEXT, sound(file, name)))
    assert answer.status_code == 200, answer.text
    (submit,) = core.said(Submit)
    assert submit.images[0] in range(36, 40)


async def test_several_sounds(core: StandInCore, http: httpx.AsyncClient) -> None:
    """Are known by their content; each choice has them, and `/tokenize` counts them."""
    two = [sound(file_of(tone(seconds))) for seconds in (1.0, 2.0)]
    answer = await http.post(CHAT, json=chat(*two, TEXT, n=2))
    assert answer.status_code == 200, answer.text
    first, second = core.said(Submit)
    assert first.images == second.images == (25, 50)
    assert [one[1] for one in features(first)] == [one[1] for one in features(second)]
    counted = await http.post("/tokenize", json=chat(*two, TEXT))
    assert counted.json()["count"] == len(first.prompt)


GOOD: Final = file_of(tone(1.0))
REFUSED: Final[dict[str, tuple[tuple[dict[str, Any], ...], str, str]]] = {
    "remote": (
        ({"type": "audio_url", "audio_url": {"url": "https://sounds.example.org/a.wav"}},),
        "messages[0].content[0].audio_url",
        "no sound is fetched from URLs",
    ),
    "file": (
        ({"type": "audio_url", "audio_url": {"url": "file:///etc/passwd"}},),
        "messages[0].content[0].audio_url",
        "no sound is fetched from URLs",
    ),
    "no base64": (
        ({"type": "input_audio", "input_audio": {"data": "?", "format": "wav"}},),
        "messages[0].content[0].input_audio.data",
        "no base64",
    ),
    "URL as data": (
        (
            {
                "type": "input_audio",
                "input_audio": {"data": "data:audio/wav;base64,AA==", "format": "wav"},
            },
        ),
        "messages[0].content[0].input_audio.data",
        'send what is behind "base64," alone',
    ),
    "no URL": (
        ({"type": "audio_url", "audio_url": 5},),
        "messages[0].content[0].audio_url",
        "send the sound as a data URL",
    ),
    "no data": (
        ({"type": "input_audio", "input_audio": {"format": "wav"}},),
        "messages[0].content[0].input_audio.data",
        "send the sound in base64",
    ),
    "format": (
        (sound(GOOD, "aiff"),),
        "messages[0].content[0].input_audio.format",
        "use one of wav, mp3, flac, ogg",
    ),
    "kind": (
        (TEXT, sound(file_of(tone(1.0), kind="AIFF"))),
        "messages[0].content[1].input_audio.data",
        "kind that is not read",
    ),
    "text": (
        (sound(b"hello"),),
        "messages[0].content[0].input_audio.data",
        "kind that is not read",
    ),
    "cut off": (
        (sound(GOOD[: len(GOOD) // 2]),),
        "messages[0].content[0].input_audio.data",
        "cut off",
    ),
    "long": (
        (at_url(file_of(tone(30.1))),),
        "messages[0].content[0].audio_url",
        "longer than 30 seconds",
    ),
    "short": (
        (sound(file_of(tone(0.05))),),
        "messages[0].content[0].input_audio.data",
        "shorter than 0.1 seconds",
    ),
    "many": (
        (sound(GOOD),) * 3,
        "messages[0].content[2].input_audio.data",
        "at most 2 sounds",
    ),
    "uuid": (
        (sound(GOOD) | {"uuid": "mine"},),
        "messages[0].content[0].uuid",
        "known by their content",
    ),
    "image": (
        ({"type": "image_url", "image_url": {"url": url_of(picture())}},),
        "messages[0].content[0]",
        "reads no image_url",
    ),
    "film": (
        ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AA=="}},),
        "messages[0].content[0]",
        "reads no video_url",
    ),
    "embeddings": (
        ({"type": "audio_embeds", "audio_embeds": "AA=="},),
        "messages[0].content[0]",
        "reads no audio_embeds",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
async def test_what_is_refused(core: StandInCore, http: httpx.AsyncClient, what: str) -> None:
    """Nothing is submitted or fetched."""
    parts, field, wrong = REFUSED[what]
    answer = await http.post(CHAT, json=chat(*parts))
    error = answer.json()["error"]
    assert answer.status_code == 400, answer.text
    assert error["param"] == field
    assert wrong in error["message"]
    assert not core.said(Submit)
    assert not core.said(FetchImage)


async def test_where_no_sound_is_read(core: StandInCore, http: httpx.AsyncClient) -> None:
    """Of a model for text only, and in other endpoints and dialects."""
    part = sound(GOOD)
    responses = {"model": "hearer", "input": [{"role": "user", "content": [part]}]}
    batch = chat(part) | {"messages": [chat(part)["messages"]]}
    for path, body in (
        (CHAT, chat(part, TEXT, model="deaf")),
        ("/v1/messages", chat(part, TEXT)),
        ("/v1/responses", responses),
        ("/v1/chat/completions/batch", batch),
        ("/v1/chat/completions/render", chat(part)),
    ):
        answer = await http.post(path, json=body)
        assert answer.status_code == 400, (path, answer.text)
        if path in ("/v1/messages", "/v1/responses"):
            assert "].content[0]: sounds are read from /v1/chat/completions alone" in answer.text
    assert not core.said(Submit)


async def test_sounds_count_as_part_of_the_body(core: StandInCore, http: httpx.AsyncClient) -> None:
    """16 short ones are a small body, and are prepared as more than a client may have."""
    answer = await http.post(CHAT, json=chat(*[sound(GOOD)] * 16, model="crowded"))
    assert answer.status_code == 413, answer.text
    assert answer.json()["error"]["code"] == "body_too_large"
    assert not core.said(Submit)


async def test_all_sounds_of_a_request_have_one_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of samples, as each is short enough."""
    two = tuple(ChatSound(f"at {i}", encoded(GOOD), is_url=False) for i in range(2))
    monkeypatch.setattr(chats, "MAX_VALUES", RATE)
    look_at(two[:1])
    with pytest.raises(BadRequest, match=f"at 1: with it the request has more than {RATE} samples"):
        look_at(two)
