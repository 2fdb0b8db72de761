"""Chats with sound whose prompts mistral_common makes (Voxtral): what arrives at the core is what
plain vLLM makes of them, and mistral_common gets no sound."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import pytest
import pytest_asyncio
from mistral_common.exceptions import InvalidRequestException
from mistral_common.protocol.instruct.chunk import AudioChunk, AudioURLChunk
from mistral_common.tokens.tokenizers import image
from mistral_common.tokens.tokenizers.audio import Audio
from transformers import tokenization_mistral_common
from vllm.exceptions import VLLMValidationError
from vllm.tokenizers.mistral import MistralTokenizer
from vllm.v1.engine import EngineCoreRequest

from appliance.engines.vllm.messages import decode_request
from appliance.frontend.serving.mistral_chats import guard_chats
from appliance.service.front_frames import Submit
from tests.configs import CONFIGS
from tests.engine.shrunken import make_shrunken
from tests.engine.with_sound import ChatPreparer
from tests.engine.with_voxtral import AUDIO, HEARD, TOKENS, make_voxtral, write_tekken
from tests.frontend.conftest import model_at
from tests.frontend.pictures import encoded
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
        model_at(make_writer(checkpoint.with_name("writer")), "writer"),
    ]
    async with front_end(models, max_body_bytes=32 << 20) as core:
        yield core


def make_writer(folder: Path) -> Path:
    """A model for text whose tokenizer, Mistral's own, would read sounds and images."""
    made = Path(make_shrunken(folder, "mistral-7b-v0.3", CONFIGS["mistral-7b-v0.3"]))
    for file in made.glob("tokenizer*"):
        file.unlink()
    write_tekken(made)
    tekken = json.loads((made / "tekken.json").read_text())
    tekken["image"] = {"image_patch_size": 14, "max_image_size": 1540, "spatial_merge_size": 2}
    (made / "tekken.json").write_text(json.dumps(tekken))
    # vLLM takes Mistral's tokenizer if there are Mistral's weights.
    shutil.copy(made / "model.safetensors", made / "consolidated.safetensors")
    return made


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


REFERENCE: Final = {"uuid": "u", "tool_reference": "t", "name": "n"}
"""With these vLLM takes any part for a reference to a tool, whatever its type is."""
READ: Final = (
    {"type": "audio", "base64": "/etc/hostname"},
    {"type": "audio", "base64": "file:///etc/hostname"},
    {"type": "audio", "base64": encoded(GOOD)},
    {"type": "audio", "path": "/etc/hostname"},
    {"type": "audio", "url": "http://127.0.0.1:9/a.wav"},
    {"type": "audio_url", "audio_url": {"url": "file:///etc/hostname"}},
    {"type": "input_audio", "input_audio": {"data": encoded(GOOD), "format": "wav"}},
    {"type": "image", "path": "/etc/hostname"},
    {"type": "image", "url": "http://127.0.0.1:9/a.png"},
    {"type": "image_url", "image_url": {"url": "file:///etc/hostname"}},
)


@pytest.mark.parametrize("model", ["hearer", "deaf", "writer"])
@pytest.mark.parametrize("role", ["user", "system", "assistant", "tool"])
async def test_mistral_common_opens_and_fetches_nothing(
    core: StandInCore,
    http: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    role: str,
) -> None:
    read: list[str] = []

    def reads(name: str) -> Any:
        def read_it(*_: Any, **__: Any) -> Any:
            read.append(name)
            raise ValueError(name)

        return read_it

    for name in ("from_bytes", "from_base64", "from_file", "from_url", "resample"):
        monkeypatch.setattr(Audio, name, reads(name))
    for module, name in (
        (tokenization_mistral_common, "load_audio_as"),
        (image, "download_image"),
        (image, "image_from_chunk"),
    ):
        monkeypatch.setattr(module, name, reads(name))
    for part in READ:
        for parts in ([part, TEXT], [part | REFERENCE, TEXT], [TEXT | REFERENCE, part | REFERENCE]):
            said = {"role": role, "content": parts, "tool_call_id": "abcdefghi"}
            messages = [{"role": "user", "content": "hello"}, said]
            body = {"model": model, "messages": messages if role != "system" else messages[::-1]}
            for path, more in ((CHAT, {"max_tokens": 3}), ("/tokenize", {})):
                answer = await http.post(path, json=body | more)
                if part["type"] == "input_audio" and answer.status_code == 200:
                    assert (model, parts[0]) == ("hearer", part)
                    continue
                assert answer.status_code == 400, (path, parts, answer.text)
                assert "pydantic" not in answer.text
    assert read == []
    if model != "hearer":
        assert not core.said(Submit)


async def test_the_tokenizer_itself_takes_no_other_parts(checkpoint: Path) -> None:
    """However vLLM comes to it: pooling models make prompts without the renderer's thread."""

    class Renderer:
        _apply_chat_template_async = None
        tokenizer = MistralTokenizer.from_pretrained(str(checkpoint))

    renderer: Any = Renderer()
    guard_chats(renderer, sounds=False)
    for part in READ:
        for one in (part, part | REFERENCE):
            with pytest.raises(VLLMValidationError, match="send text"):
                renderer.tokenizer.apply_chat_template([{"role": "user", "content": [one]}])
    said = [{"role": "user", "content": [TEXT]}]
    plain = renderer.tokenizer.apply_chat_template(said)
    long = {"padding": "max_length", "max_length": 100_000, "tokenize": False}
    assert renderer.tokenizer.apply_chat_template(said, **long) == plain


async def test_no_prompt_is_padded(core: StandInCore, http: httpx.AsyncClient) -> None:
    long = {"chat_template_kwargs": {"padding": "max_length", "max_length": 1_000_000}}
    for path in ("/tokenize", CHAT):
        answer = await http.post(path, json=chat(TEXT, model="writer") | long)
        if answer.status_code == 200:
            assert len(answer.text) < 10_000
    assert all(len(submit.prompt) < 100 for submit in core.said(Submit))


async def test_what_mistral_common_gets_of_text(core: StandInCore, http: httpx.AsyncClient) -> None:
    """The same prompt as of plain strings, whatever else clients write into parts."""
    plain = [{"role": "user", "content": "what is said"}]
    for parts in ([TEXT], [TEXT | REFERENCE], [TEXT | {"cache_control": {}}]):
        said = [{"role": "user", "content": parts}]
        for messages in (plain, said):
            answer = await http.post(CHAT, json=chat(model="writer", messages=messages))
            assert answer.status_code == 200, answer.text
    prompts = {submit.prompt for submit in core.said(Submit)}
    assert len(prompts) == 1


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
    guard_chats(renderer, sounds=True)
    encode = renderer.tokenizer.instruct.audio_encoder
    assert encode(AudioChunk(input_audio="480000")).tokens == list(HEARD)
    for said in (GOOD, "UklGRg==", "480001", "0", "-1", "9" * 30):
        with pytest.raises(InvalidRequestException):
            encode(AudioChunk(input_audio=said))
    with pytest.raises(InvalidRequestException):
        encode(AudioURLChunk(audio_url="file:///etc/passwd"))
