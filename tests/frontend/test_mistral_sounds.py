"""Chats with sound whose prompts mistral_common makes (Voxtral): what arrives at the core is what
plain vLLM makes of them, and mistral_common gets no sound."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import pytest
import pytest_asyncio
from mistral_common.exceptions import InvalidRequestException
from mistral_common.protocol.instruct.chunk import AudioChunk, AudioURLChunk
from mistral_common.tokens.tokenizers.audio import Audio
from vllm.tokenizers.mistral import MistralTokenizer
from vllm.v1.engine import EngineCoreRequest

from appliance.engines.vllm.messages import decode_request
from appliance.frontend.serving.mistral_sounds import count_sounds
from appliance.service.front_frames import Submit
from tests.engine.with_sound import ChatPreparer
from tests.engine.with_voxtral import AUDIO, HEARD, TOKENS, make_voxtral
from tests.frontend.conftest import model_at
from tests.frontend.served_here import core, http
from tests.frontend.sounds import RATE, file_of, tone
from tests.frontend.stand_in_core import StandInCore, front_end
from tests.frontend.test_chat_sounds import CHAT, GOOD, TEXT, Samples, at_url, chat, sound

__all__ = ["core", "http"]

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONTEXT: Final = 1024


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(make_voxtral(tmp_path_factory.mktemp("chats")))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared(checkpoint: Path) -> AsyncIterator[StandInCore]:
    models = [
        model_at(checkpoint, "hearer", sounds=2),
        model_at(checkpoint, "crowded", sounds=5),
        model_at(checkpoint, "deaf"),
    ]
    async with front_end(models, max_body_bytes=32 << 20) as core:
        yield core


def features(submit: Submit) -> list[tuple[str, int, Any]]:
    """Of each sound what it is known by, where it is, and what the encoder reads."""
    request: EngineCoreRequest = decode_request(submit.body)
    return [
        (one.identifier, one.mm_position.offset, one.data["audio_arrays"].data.numpy())
        for one in request.mm_features or ()
        if one.data is not None
    ]


async def test_prompts_and_sounds_are_those_of_plain_vllm(
    core: StandInCore, http: httpx.AsyncClient, checkpoint: Path
) -> None:
    """Of a chat with a system's message, an answer, two sounds, and the name of a token."""
    seconds = (2.0, 30.0)
    parts = [sound(file_of(tone(each), subtype="FLOAT")) for each in seconds]
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [TEXT, parts[0]]},
        {"role": "assistant", "content": "a tone"},
        {"role": "user", "content": [parts[1], {"type": "text", "text": "[AUDIO] and this"}]},
    ]
    answer = await http.post(CHAT, json=chat(messages=messages))
    assert answer.status_code == 200, answer.text
    (submit,) = core.said(Submit)
    untouched = MistralTokenizer.from_pretrained(str(checkpoint))
    assert list(submit.prompt) == untouched.apply_chat_template(messages)
    assert submit.images == (TOKENS, TOKENS)
    assert submit.prompt.count(AUDIO) == 2 * TOKENS
    plain = ChatPreparer(str(checkpoint), 2).prepare(
        submit.prompt,
        tuple(Samples(tone(each)) for each in seconds),  # type: ignore[misc]
    )
    assert plain.tokens == submit.prompt
    for (_, offset, made), feature in zip(features(submit), plain.features, strict=True):
        assert offset == feature.mm_position.offset
        assert feature.mm_position.length == TOKENS
        assert np.array_equal(feature.data["audio_arrays"].data.numpy(), made)
    counted = await http.post("/tokenize", json=chat(messages=messages))
    assert counted.json()["tokens"] == list(submit.prompt)


@pytest.mark.parametrize(
    ("kind", "rate", "seconds"),
    [("FLAC", RATE, 0.1), ("OGG", 48_000, 30.0), ("MP3", 44_100, 29.9), ("WAV", 11_025, 30.0)],
)
async def test_each_sound_is_prepared_as_one_of_the_longest(
    core: StandInCore, http: httpx.AsyncClient, kind: str, rate: int, seconds: float
) -> None:
    """Of other rates, too, where a sound of 30 seconds may become a sample longer."""
    file = file_of(tone(seconds, rate), rate=rate, kind=kind)
    answer = await http.post(CHAT, json=chat(at_url(file), TEXT))
    assert answer.status_code == 200, answer.text
    (submit,) = core.said(Submit)
    ((_, _, made),) = features(submit)
    assert (submit.images, made.shape) == ((TOKENS,), (30 * RATE,))


async def test_a_sound_is_decoded_once(
    core: StandInCore, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not by mistral_common, which bounds nothing, reads files and fetches URLs."""

    def decode(*_: Any, **__: Any) -> Any:
        raise AssertionError("mistral_common has a sound")

    for name in ("from_bytes", "from_base64", "from_file", "from_url", "resample"):
        monkeypatch.setattr(Audio, name, decode)
    answer = await http.post(CHAT, json=chat(sound(GOOD), sound(GOOD), TEXT))
    assert answer.status_code == 200, answer.text
    (submit,) = core.said(Submit)
    (first, at, _), (second, then, _) = features(submit)
    assert first == second
    assert then == at + len(HEARD)


REFUSED: Final[dict[str, tuple[tuple[dict[str, Any], ...], str]]] = {
    "text beside it": (
        ({"type": "text", "text": "a"} | {"input_audio": sound(GOOD)["input_audio"]},),
        "messages[0].content[0].input_audio.data: send a sound in a part of its own",
    ),
    "file": (({"type": "audio", "path": "/etc/passwd"}, TEXT), "Unsupported chat content part"),
    "remote": (
        ({"type": "audio", "url": "https://sounds.example.org/a.wav"}, sound(GOOD)),
        "Unsupported chat content part",
    ),
    "URL": (
        ({"type": "audio_url", "audio_url": {"url": "file:///etc/passwd"}},),
        "no sound is fetched from URLs",
    ),
    "number": (
        ({"type": "input_audio", "input_audio": {"data": "4800", "format": "wav"}},),
        "of a kind that is not read",
    ),
    "long": ((sound(file_of(tone(30.1))),), "longer than 30 seconds"),
    "many": ((sound(GOOD),) * 3, "at most 2 sounds"),
}


@pytest.mark.parametrize("what", REFUSED)
async def test_what_is_refused(core: StandInCore, http: httpx.AsyncClient, what: str) -> None:
    parts, wrong = REFUSED[what]
    answer = await http.post(CHAT, json=chat(*parts))
    assert answer.status_code == 400, answer.text
    assert wrong in answer.json()["error"]["message"]
    assert not core.said(Submit)


async def test_where_no_sound_is_read(core: StandInCore, http: httpx.AsyncClient) -> None:
    """Of a model for text only, whose tokenizer is the same, and in other endpoints."""
    part = sound(GOOD)
    batch = chat(part) | {"messages": [chat(part)["messages"]]}
    for path, body in (
        (CHAT, chat(part, TEXT, model="deaf")),
        ("/v1/messages", chat(part, TEXT)),
        ("/v1/responses", {"model": "hearer", "input": [{"role": "user", "content": [part]}]}),
        ("/v1/chat/completions/batch", batch),
        ("/v1/chat/completions/render", chat(part)),
    ):
        answer = await http.post(path, json=body)
        assert answer.status_code == 400, (path, answer.text)
    assert not core.said(Submit)
    answer = await http.post(CHAT, json=chat(TEXT, model="deaf"))
    assert answer.status_code == 200, answer.text


async def test_as_many_as_vllm_takes(core: StandInCore, http: httpx.AsyncClient) -> None:
    """They are more than the model's context here, which says so."""
    answer = await http.post(CHAT, json=chat(*[sound(GOOD)] * 5, model="crowded"))
    assert answer.status_code == 400, answer.text
    assert str(CONTEXT) in answer.json()["error"]["message"]
    assert not core.said(Submit)


async def test_nothing_but_a_length_is_counted(checkpoint: Path) -> None:
    """Wherever mistral_common is given a sound, and however long a text says it is."""

    class Renderer:
        _apply_chat_template_async = None
        tokenizer = MistralTokenizer.from_pretrained(str(checkpoint))

        def get_tokenizer(self) -> MistralTokenizer:
            return self.tokenizer

    renderer: Any = Renderer()
    count_sounds(renderer)
    encode = renderer.tokenizer.instruct.audio_encoder
    assert encode(AudioChunk(input_audio="480000")).tokens == list(HEARD)
    for said in (GOOD, "UklGRg==", "480001", "0", "-1", "9" * 30):
        with pytest.raises(InvalidRequestException):
            encode(AudioChunk(input_audio=said))
    with pytest.raises(InvalidRequestException):
        encode(AudioURLChunk(audio_url="file:///etc/passwd"))
