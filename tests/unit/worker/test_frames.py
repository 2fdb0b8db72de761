"""Frames between the daemon and a worker, cut at any byte."""

from __future__ import annotations

import typing

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance import framing
from appliance.vocabulary import (
    EvictModel,
    LoadModel,
    PrefillDone,
    Release,
    RequestCancelled,
)
from appliance.worker import frames


def in_64_bits(message: typing.Any) -> bool:
    """Whether every number of the message has a form in msgpack."""
    try:
        framing.encode(message)
    except OverflowError:
        return False
    return True


def messages_of(direction: object) -> st.SearchStrategy[list[typing.Any]]:
    """Any messages of any kind of one direction."""
    kinds = [st.from_type(kind) for kind in typing.get_args(direction)]
    return st.lists(st.one_of(kinds).filter(in_64_bits), max_size=5)


def through(
    decoder: framing.Decoder[typing.Any], sent: list[typing.Any], cuts: list[int]
) -> list[typing.Any]:
    """What comes out when the frames arrive in pieces of these sizes."""
    data = b"".join(framing.encode(message) for message in sent)
    received = []
    for size in cuts:
        received += decoder.feed(data[:size])
        data = data[size:]
    return received + decoder.feed(data)


def exact(messages: list[typing.Any]) -> list[str]:
    """Messages as text, where not-a-number equals itself."""
    return [repr(message) for message in messages]


CUTS = st.lists(st.integers(0, 40), max_size=40)


@settings(max_examples=60, deadline=None)
@given(sent=messages_of(frames.Down), cuts=CUTS)
def test_commands_arrive_as_they_were_sent(sent: list[frames.Down], cuts: list[int]) -> None:
    """Every message downwards arrives once, in order and equal, however the stream is cut."""
    assert exact(through(frames.decoder_of_commands(), sent, cuts)) == exact(sent)


@settings(max_examples=60, deadline=None)
@given(sent=messages_of(frames.Up), cuts=CUTS)
def test_reports_arrive_as_they_were_sent(sent: list[frames.Up], cuts: list[int]) -> None:
    """Every message upwards arrives once, in order and equal, however the stream is cut."""
    assert exact(through(frames.decoder_of_reports(), sent, cuts)) == exact(sent)


def test_a_partial_frame_waits() -> None:
    """All bytes but the last of a frame give nothing; the last gives the message."""
    message = LoadModel(instance=0, model="a")
    frame = framing.encode(message)
    decoder = frames.decoder_of_commands()

    assert decoder.feed(frame[:-1]) == []
    assert decoder.feed(frame[-1:]) == [message]


def test_a_frame_too_long_is_refused() -> None:
    """A length beyond the limit is an error before anything of the frame is stored."""
    decoder = frames.decoder_of_commands()
    assert decoder.feed(framing.HEADER.pack(framing.MAX_FRAME_BYTES)) == []

    with pytest.raises(ValueError, match="exceeds"):
        frames.decoder_of_commands().feed(framing.HEADER.pack(framing.MAX_FRAME_BYTES + 1))


@pytest.mark.parametrize(
    "message",
    [
        PrefillDone(instance=0, model="a", request="r", kv_slabs=1, seconds=0.1),
        frames.Hello(0, 1, 2),
        RequestCancelled(request="r"),
    ],
)
def test_a_worker_takes_commands_only(message: typing.Any) -> None:
    """A report, or an event that no worker has business with, is no frame downwards."""
    with pytest.raises(msgspec.DecodeError):
        frames.decoder_of_commands().feed(framing.encode(message))


@pytest.mark.parametrize(
    "message",
    [
        EvictModel(instance=0, model="a"),
        Release(instance=0, model="a", request="r"),
        frames.Shutdown(),
    ],
)
def test_the_daemon_takes_reports_only(message: typing.Any) -> None:
    """A command is no frame upwards."""
    with pytest.raises(msgspec.DecodeError):
        frames.decoder_of_reports().feed(framing.encode(message))


def test_garbage_is_refused() -> None:
    """Bytes that are no msgpack object are an error, not a message."""
    with pytest.raises(msgspec.DecodeError):
        frames.decoder_of_reports().feed(framing.HEADER.pack(3) + b"\xc1\xc1\xc1")
