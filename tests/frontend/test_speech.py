"""Transcriptions and translations: what arrives at the core is what vLLM makes of the sound, and
what is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import pytest
import pytest_asyncio
from tokenizers import Tokenizer
from vllm.multimodal.audio import split_audio
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.outputs import LogprobsLists

from appliance.engines.vllm.messages import decode_request, encode_output
from appliance.frontend.sound.files import (
    MAX_CHANNELS,
    MAX_CHUNKS,
    MAX_SECONDS,
    BadSound,
    checked_length,
)
from appliance.frontend.sound.forms import MAX_FIELD_BYTES
from appliance.service.front_frames import Leave, Refused, Submit
from appliance.vocabulary import FinishReason, Task
from tests.engine.with_sound import SoundPreparer
from tests.frontend.conftest import model_at
from tests.frontend.served_here import core, http
from tests.frontend.sounds import CONTEXT, RATE, Samples, file_of, make_transcriber, tone
from tests.frontend.stand_in_core import StandInCore, front_end

__all__ = ["core", "http"]

pytestmark = pytest.mark.asyncio(loop_scope="module")

TRANSCRIBE: Final = "/v1/audio/transcriptions"
TRANSLATE: Final = "/v1/audio/translations"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_transcriber(tmp_path_factory.mktemp("hearing") / "whisper")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared(whisper: Path, generator: Path) -> AsyncIterator[StandInCore]:
    models = [
        model_at(whisper, "whisper", Task.TRANSCRIPTION, max_context=CONTEXT),
        model_at(generator, "talker"),
    ]
    async with front_end(models, max_body_bytes=8 << 20) as core:
        yield core


def form(file: bytes, **fields: str) -> dict[str, Any]:
    return {
        "files": {"file": ("said.wav", file)},
        "data": {"model": "whisper", "language": "en", "max_completion_tokens": "3"} | fields,
    }


def request_of(submit: Submit) -> EngineCoreRequest:
    asked: EngineCoreRequest = decode_request(submit.body)
    return asked


def features(submit: Submit) -> tuple[str, int, Any]:
    """What the sound is, its tokens in the encoder's prompt, and what the encoder reads."""
    (feature,) = request_of(submit).mm_features or ()
    assert feature.data is not None
    place = feature.mm_position
    assert place.offset == 0
    return feature.modality, place.length, feature.data["input_features"].data.numpy()


@pytest.fixture(scope="module")
def preparer(whisper: Path) -> SoundPreparer:
    return SoundPreparer(str(whisper))


def prepared(preparer: SoundPreparer, samples: Any) -> Any:
    """What plain vLLM's processor makes of samples."""
    (feature,) = preparer.prepare(Samples(samples))  # type: ignore[arg-type]
    return feature.data["input_features"].data.numpy()


@pytest.fixture(scope="module")
def words(whisper: Path) -> Tokenizer:
    return Tokenizer.from_file(str(whisper / "tokenizer.json"))


def texts(words: Tokenizer, submit: Submit) -> list[str]:
    return [words.id_to_token(token) for token in submit.prompt]


@pytest.mark.parametrize(("path", "task"), [(TRANSCRIBE, "transcribe"), (TRANSLATE, "translate")])
async def test_a_sound(
    core: StandInCore,
    http: httpx.AsyncClient,
    preparer: SoundPreparer,
    words: Tokenizer,
    path: str,
    task: str,
) -> None:
    """Arrives as what vLLM's serving makes of it: tokens that say what is wanted, and the sound."""
    answer = await http.post(path, **form(file_of(tone(2.0), subtype="FLOAT")))
    assert answer.status_code == 200, answer.text
    (submit,) = core.said(Submit)
    start = ("<|startoftranscript|>", "<|en|>", f"<|{task}|>", "<|notimestamps|>")
    assert texts(words, submit)[1:] == list(start)  # behind what the decoder begins with
    assert submit.max_tokens == 3
    modality, tokens, values = features(submit)
    assert (modality, tokens) == ("audio", 1500)
    assert np.array_equal(values, prepared(preparer, tone(2.0)))
    said = words.decode(core.saying(submit))
    assert answer.json()["text"] == said
    if path == TRANSCRIBE:
        assert answer.json()["usage"] == {"type": "duration", "seconds": 2}


async def test_fields(core: StandInCore, http: httpx.AsyncClient, words: Tokenizer) -> None:
    """What may be said besides the sound is obeyed, and what has no effect is named."""
    said = {"prompt": "The Tiber", "temperature": "0.5", "seed": "7", "user": "me"}
    answer = await http.post(TRANSCRIBE, **form(file_of(tone(1.0)), response_format="text", **said))
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/plain")
    assert answer.headers["x-appliance-ignored"] == "user"
    (submit,) = core.said(Submit)
    assert answer.text == words.decode(core.saying(submit))
    sampling = request_of(submit).sampling_params
    assert sampling is not None
    assert (sampling.temperature, sampling.seed) == (0.5, 7)
    prompt = words.decode(list(submit.prompt), skip_special_tokens=False)
    assert prompt.index("The Tiber") < prompt.index("<|startoftranscript|>")


async def test_a_whole_context(core: StandInCore, http: httpx.AsyncClient) -> None:
    """Is what an answer may have, if nothing is said of its length."""
    sent = form(file_of(tone(1.0)))
    del sent["data"]["max_completion_tokens"]
    assert (await http.post(TRANSCRIBE, **sent)).status_code == 200
    (submit,) = core.said(Submit)
    assert submit.max_tokens == CONTEXT - len(submit.prompt)


async def test_the_only_model(core: StandInCore, http: httpx.AsyncClient) -> None:
    """Need not be named."""
    core.change(core.welcome.models[:1])
    try:
        sent = form(file_of(tone(1.0)))
        del sent["data"]["model"]
        answer = await http.post(TRANSCRIBE, **sent)
        assert answer.status_code == 200, answer.text
        assert core.said(Submit)[0].model == "whisper"
    finally:
        core.change(core.welcome.models)


@pytest.mark.parametrize(
    ("kind", "subtype", "rate", "channels"),
    [
        ("WAV", "PCM_16", RATE, 2),
        ("WAV", "PCM_24", 44_100, 1),
        ("WAV", "ULAW", 8_000, 1),
        ("WAVEX", "PCM_16", 48_000, MAX_CHANNELS),
        ("FLAC", "PCM_16", RATE, 1),
        ("FLAC", "PCM_16", 11_025, 2),
        ("OGG", "VORBIS", 44_100, 2),
        ("OGG", "OPUS", 48_000, 1),
        ("MP3", None, RATE, 1),
        ("MP3", None, 44_100, 2),
    ],
)
async def test_formats(
    core: StandInCore,
    http: httpx.AsyncClient,
    preparer: SoundPreparer,
    kind: str,
    subtype: str | None,
    rate: int,
    channels: int,
) -> None:
    """The same sound is much the same in each, whatever its rate and channels."""
    frames = np.repeat(tone(2.0, rate)[:, None], channels, axis=1)
    file = file_of(frames, rate=rate, kind=kind, subtype=subtype)
    answer = await http.post(TRANSCRIBE, **form(file))
    assert answer.status_code == 200, answer.text
    *_, values = features(core.said(Submit)[0])
    loudest, expected = (
        one[:, 10:190].argmax(axis=0) for one in (values, prepared(preparer, tone(2.0)))
    )
    assert np.abs(loudest - expected).max() <= 2
    assert answer.json()["usage"]["seconds"] in (2, 3)


async def test_language(core: StandInCore, http: httpx.AsyncClient, words: Tokenizer) -> None:
    """Is asked for first, as a request of its own, if the client does not say it."""
    german = words.token_to_id("<|de|>")
    core.saying = lambda submit: [german] if submit.max_tokens == 1 else [20, 21, 22]
    sent = form(file_of(tone(1.0)))
    del sent["data"]["language"]
    answer = await http.post(TRANSCRIBE, **sent)
    assert answer.status_code == 200, answer.text
    asked, submit = core.said(Submit)
    assert asked.max_tokens == 1
    sampling = request_of(asked).sampling_params
    assert sampling is not None
    assert german in (sampling.allowed_token_ids or ())
    assert np.array_equal(features(asked)[2], features(submit)[2])
    assert "<|de|>" in texts(words, submit)


LONG: Final = 65.0
"""Seconds: three parts."""


@pytest.mark.parametrize("stream", [False, True])
async def test_a_long_sound(
    core: StandInCore,
    http: httpx.AsyncClient,
    preparer: SoundPreparer,
    words: Tokenizer,
    stream: bool,
) -> None:
    """Is divided as vLLM divides it. The core is asked for one part after another, and the answer
    has the texts in their order."""
    core.hold_at = lambda submit: 1
    live: list[int] = []

    def refusing(_: Submit) -> None:
        live.append(len(core.live))

    core.refusing = refusing
    file = file_of(tone(LONG), subtype="FLOAT")
    sent = form(file, **({"stream": "true"} if stream else {}))
    asking = asyncio.create_task(http.post(TRANSCRIBE, **sent))
    await core.seen(Submit)
    core.go_on()
    answer = await asking
    assert answer.status_code == 200, answer.text
    submits = core.said(Submit)
    assert live == [0, 0, 0]  # no other was computed when one came
    parts = split_audio(
        audio_data=tone(LONG),
        sample_rate=RATE,
        max_clip_duration_s=30.0,
        overlap_duration_s=1.0,
        min_energy_window_size=1600,
    )
    assert len(submits) == len(parts) == 3
    said = [words.decode(core.saying(submit)) for submit in submits]
    for submit, part in zip(submits, parts, strict=True):
        assert np.array_equal(features(submit)[2], prepared(preparer, part))
    if stream:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        assert lines.pop() == "[DONE]"
        text = "".join(json.loads(one)["choices"][0]["delta"]["content"] for one in lines)
    else:
        text = answer.json()["text"]
    assert text == " ".join(said)


async def test_a_part_that_is_refused(core: StandInCore, http: httpx.AsyncClient) -> None:
    """Refuses the whole: no part of the text is the answer."""
    seen: list[Submit] = []

    def refusing(submit: Submit) -> Refused | None:
        seen.append(submit)
        if len(seen) < 2:
            return None
        return Refused(
            call=submit.call,
            request=submit.request,
            status=429,
            code="rate_limited",
            message="too many tokens per minute",
        )

    core.refusing = refusing
    answer = await http.post(TRANSCRIBE, **form(file_of(tone(LONG))))
    assert answer.status_code == 429, answer.text
    assert answer.json()["error"]["code"] == "rate_limited"
    await core.quiet()
    assert len(core.said(Submit)) == 2


async def test_a_client_that_leaves(core: StandInCore, http: httpx.AsyncClient) -> None:
    """Ends what is computed, and nothing more is asked for."""
    core.hold_at = lambda submit: 1
    asking = asyncio.create_task(http.post(TRANSCRIBE, **form(file_of(tone(LONG)))))
    await core.seen(Submit)
    asking.cancel()
    await core.seen(Leave)
    await core.quiet()
    assert not core.live
    assert len(core.said(Submit)) == 1


async def test_segments(core: StandInCore, http: httpx.AsyncClient, words: Tokenizer) -> None:
    """Have times, and the whole text is theirs; silence has none."""
    end, eos = words.token_to_id("<|1.20|>"), words.token_to_id("<|eos|>")
    core.details = with_logprobs
    core.ending = lambda submit: FinishReason.STOP
    for tokens, ends in (([20, 21, end, eos], [1.2]), ([eos], [])):
        core.saying = lambda submit, tokens=tokens: tokens
        sent = form(file_of(tone(2.0)), response_format="verbose_json")
        answer = await http.post(TRANSCRIBE, **sent)
        assert answer.status_code == 200, answer.text
        said = answer.json()["segments"]
        assert [one["end"] for one in said] == pytest.approx(ends)
        assert answer.json()["text"] == " ".join(one["text"] for one in said)
        assert answer.json()["language"] == "en"
        assert "<|0.00|>" in texts(words, core.said(Submit)[-1])


def with_logprobs(submit: Submit, tokens: list[int]) -> list[bytes]:
    """Each token is the likeliest one."""
    return [
        encode_output(
            EngineCoreOutput(
                request_id=submit.request,
                new_token_ids=[token],
                new_logprobs=LogprobsLists(
                    np.array([[token, 5]]), np.array([[-0.5, -1.5]], np.float32), np.array([1])
                ),
            )
        )
        for token in tokens
    ]


# --- what is refused -----------------------------------------------------------------------------


SHORT: Final = file_of(tone(1.0))
SECONDS_TOO_MANY: Final = file_of(
    np.zeros((MAX_SECONDS + 1) * 4_000, np.int16), rate=4_000, kind="FLAC"
)
NOT_NUMBERS: Final = file_of(np.full(100, np.nan, np.float32), subtype="FLOAT")


def with_field(file: bytes, at: int, value: int, size: int) -> bytes:
    """A file with another number in its head."""
    return file[:at] + value.to_bytes(size, "little") + file[at + size :]


def with_empty_chunks(count: int) -> bytes:
    """A whole WAV that has these before all others."""
    return SHORT[:12] + (b"junk" + bytes(4)) * count + SHORT[12:]


async def test_a_wav_may_have_some_chunks_of_others() -> None:
    """As many as are looked through, the head of the sound among them; a million is not looked
    through, as each costs time."""
    found = checked_length(with_empty_chunks(MAX_CHUNKS - 1))

    assert found == checked_length(SHORT)
    with pytest.raises(BadSound, match=r"more than 1000 chunks .*: send it without them"):
        checked_length(with_empty_chunks(1_000_000))


@pytest.mark.parametrize(
    ("file", "said"),
    [
        pytest.param(b"", "empty", id="empty"),
        pytest.param(b"{}", "kind", id="json"),
        pytest.param(b"\x89PNG\r\n\x1a\n" + bytes(64), "kind", id="png"),
        pytest.param(bytes(4) + b"ftypM4A " + bytes(64), "M4A are not read", id="m4a"),
        pytest.param(b"\x1a\x45\xdf\xa3" + bytes(64), "WebM", id="webm"),
        pytest.param(b"FORM" + bytes(4) + b"AIFF" + bytes(64), "kind", id="aiff"),
        pytest.param(SHORT[:30], "damaged", id="half a head"),
        pytest.param(SHORT[:44], "cut off", id="head alone"),
        pytest.param(SHORT[:-100], "cut off", id="cut off"),
        pytest.param(with_empty_chunks(MAX_CHUNKS + 1), "chunks before its sound", id="chunks"),
        pytest.param(b"RIFF" + bytes(4) + b"WAVE" + bytes(3000), "damaged", id="zeros"),
        pytest.param(b"\xff\xfb\x90\x00" + bytes(3000), "damaged", id="no mp3"),
        pytest.param(b"ID3" + bytes(3000), "damaged", id="tag alone"),
        pytest.param(b"OggS" + bytes(3000), "damaged", id="no ogg"),
        pytest.param(file_of(tone(1.0), kind="FLAC")[:3000], "", id="half a flac"),
        pytest.param(file_of(np.zeros(0, np.int16)), "no sound", id="no samples"),
        pytest.param(file_of(np.zeros((10, 1000), np.int16)), "channels", id="1000 channels"),
        pytest.param(with_field(SHORT, 22, 0, 2), "", id="0 channels"),
        pytest.param(with_field(SHORT, 24, 0, 4), "", id="rate of 0"),
        pytest.param(with_field(SHORT, 24, 1, 4), "samples in a second", id="rate of 1"),
        pytest.param(with_field(SHORT, 24, 10**6, 4), "samples in a second", id="large rate"),
        pytest.param(NOT_NUMBERS, "no numbers", id="not numbers"),
        pytest.param(SECONDS_TOO_MANY, "longer than", id="too long"),
    ],
)
async def test_files_that_are_refused(
    core: StandInCore, http: httpx.AsyncClient, file: bytes, said: str
) -> None:
    """Each says why, of the field; nothing is computed."""
    answer = await http.post(TRANSCRIBE, **form(file))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == "file"
    assert error["message"].startswith("file: ")
    assert said in error["message"]
    assert not core.said(Submit)


async def test_more_than_memory(core: StandInCore, http: httpx.AsyncClient) -> None:
    """A small file of a sound that would take more memory than a client has is not decoded."""
    file = file_of(np.zeros(150 * RATE, np.int16), kind="FLAC")
    assert len(file) < 1 << 16
    answer = await http.post(TRANSCRIBE, **form(file))
    assert answer.status_code == 413, answer.text
    assert "shorter sound" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"response_format": "srt"}, "response_format"),
        ({"response_format": "diarized_json"}, "response_format"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities[]"),
        ({"language": "xx"}, "language"),
        ({"temperature": "hot"}, "temperature"),
        ({"use_beam_search": "true"}, "use_beam_search"),
        ({"n": "2"}, "n"),
        ({"hotwords": "Tiber"}, "hotwords"),
        ({"vllm_xargs": "{}"}, "vllm_xargs"),
        ({"include[]": "logprobs"}, "include[]"),
        ({"prompt": "a" * (MAX_FIELD_BYTES + 1)}, "prompt"),
        ({"stream": "true", "response_format": "verbose_json"}, None),
        ({"prompt": "a b c d e f g " * 100}, None),
        ({"model": "talker"}, "model"),
    ],
)
async def test_fields_that_are_refused(
    core: StandInCore, http: httpx.AsyncClient, changes: dict[str, str], param: str | None
) -> None:
    answer = await http.post(TRANSCRIBE, **form(SHORT, **changes))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert param is None or param in (error["param"] or error["message"]), error
    assert not core.said(Submit)


async def test_forms_that_are_refused(core: StandInCore, http: httpx.AsyncClient) -> None:
    for sent, status in (
        ({"json": {"model": "whisper"}}, 400),
        ({"data": {"model": "whisper"}}, 400),
        ({"files": {"model": (None, "whisper"), "file": (None, "no file")}}, 400),
        ({"files": [("file", ("a.wav", SHORT)), ("file", ("b.wav", SHORT))]}, 400),
        ({"files": [("file", ("a.wav", SHORT))], "data": {"model": "unknown"}}, 404),
        ({"content": b"--x", "headers": {"content-type": "multipart/form-data; boundary=x"}}, 400),
        ({"content": b"x", "headers": {"content-type": "multipart/form-data"}}, 400),
    ):
        answer = await http.post(TRANSCRIBE, **sent)
        assert answer.status_code == status, answer.text
        assert answer.json()["error"]["message"]
    assert not core.said(Submit)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/responses", {"input": "hello"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}),
        ("/v1/embeddings", {"input": "hello"}),
        ("/invocations", {"prompt": "hello"}),
    ],
)
async def test_text_for_a_transcriber(
    core: StandInCore, http: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    """Is refused with what it takes instead."""
    answer = await http.post(path, json=body | {"model": "whisper"})
    assert answer.status_code == 400, answer.text
    assert TRANSCRIBE in answer.json()["error"]["message"]
    assert not core.said(Submit)
