"""What files of sound may be, looked at before they are decoded, and decoded piece by piece: what
they are is read of their content, and what decoding them costs is bounded."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import soundfile
import soxr

MAX_SECONDS: Final = 3600
"""Of a sound. What it takes in memory may be too much before (`api.max_bodies`)."""
MAX_CHANNELS: Final = 8
MIN_RATE: Final = 4_000
MAX_RATE: Final = 192_000
"""Of samples in a second and channel."""
MAX_VALUES: Final = MAX_SECONDS * 48_000 * 2
"""Samples of all channels: an hour of a CD's kind. Each costs time, however small the file is."""
FORMATS: Final = ("WAV", "WAVEX", "FLAC", "OGG", "MP3")
"""As libsndfile calls them."""
MAX_CHUNKS: Final = 1000
"""Of a WAV before its sound; files of programs have some ten."""
REMEDY: Final = "send a WAV, FLAC, MP3 or Ogg file"

_PIECE: Final = 1 << 18
"""Samples of all channels that are decoded at once."""
_LOUDEST: Final = 1e6
"""Far beyond what any file of numbers has, of which 1 is the loudest that is played."""
_WAV: Final = (b"RIFF", b"WAVE")
_UNKNOWN_BYTES: Final = 0x7FFF0000
"""The size of a WAV that was written to a pipe is said to be this or more."""
_ID3: Final = b"ID3"


class BadSound(ValueError):
    """A sound that is not read; the message says why, without what it is called."""


class Length(NamedTuple):
    """What a file says of itself."""

    frames: int
    rate: int
    channels: int

    @property
    def seconds(self) -> float:
        return self.frames / self.rate


def checked_length(file: bytes) -> Length:
    """The length that the file says it has. Nothing is decoded. Raises `BadSound`."""
    with _opened(file) as (_, length):
        return length


def decoded(file: bytes, rate: int) -> npt.NDArray[np.float32]:
    """The samples, of one channel, so many in a second; 1 is the loudest that is played. Takes a
    while, and no more memory than these. Raises `BadSound`."""
    with _opened(file) as (source, length):
        resample = None
        if length.rate != rate:
            resample = soxr.ResampleStream(length.rate, rate, 1, dtype="float32")
        parts = [
            piece if resample is None else resample.resample_chunk(piece)
            for piece in _pieces(source, length)
        ]
        if resample is not None:
            parts.append(resample.resample_chunk(np.zeros(0, np.float32), last=True))
    samples: npt.NDArray[np.float32] = np.concatenate(parts)
    if not len(samples):
        raise BadSound(f"it has no sound: {REMEDY} that has some")
    return samples


@contextmanager
def _opened(file: bytes) -> Iterator[tuple[Any, Length]]:
    """What reads the file. Raises `BadSound`, also for what is found later."""
    _check_kind(file)
    try:
        with soundfile.SoundFile(io.BytesIO(file)) as source:
            length = Length(source.frames, source.samplerate, source.channels)
            _check(source.format, length)
            yield source, length
    except soundfile.LibsndfileError as error:
        raise BadSound(f"it is damaged, or of a kind that is not read: {REMEDY}") from error


def _check_kind(file: bytes) -> None:
    """Raise `BadSound` for what is no file of these kinds, before a library looks at it."""
    if not file:
        raise BadSound(f"it is empty: {REMEDY}")
    if file[4:8] == b"ftyp":
        raise BadSound(f"MP4 and M4A are not read: convert it, and {REMEDY}")
    if file.startswith(b"\x1a\x45\xdf\xa3"):
        raise BadSound(f"WebM and Matroska are not read: convert it, and {REMEDY}")
    wav = (file[:4], file[8:12]) == _WAV
    mp3 = file.startswith(_ID3) or (file[0] == 0xFF and file[1:2] >= b"\xe0")
    if not (wav or mp3 or file.startswith((b"fLaC", b"OggS"))):
        raise BadSound(f"it is of a kind that is not read: {REMEDY}")
    if wav:
        _check_whole(file)


def _check_whole(file: bytes) -> None:
    """Raise `BadSound` for a WAV that has less sound than it says: libsndfile reads what is there.
    Of chunks before the sound there may be `MAX_CHUNKS`: empty ones take eight bytes each."""
    at = 12
    for _ in range(MAX_CHUNKS + 1):
        if at + 8 > len(file):
            return
        size = int.from_bytes(file[at + 4 : at + 8], "little")
        if file[at : at + 4] == b"data":
            if at + 8 + size > len(file) and size < _UNKNOWN_BYTES:
                raise BadSound("it is cut off: send the whole file")
            return
        at += 8 + size + size % 2
    raise BadSound(
        f"it has more than {MAX_CHUNKS} chunks before its sound: send it without them, as "
        "`ffmpeg -i FILE -map_metadata -1 NEW.wav` writes it"
    )


def _check(kind: str, length: Length) -> None:
    """Raise `BadSound` for a kind that is not read, and for more than is decoded."""
    if kind not in FORMATS:
        raise BadSound(f"it is of a kind that is not read: {REMEDY}")
    if not 1 <= length.channels <= MAX_CHANNELS:
        raise BadSound(f"it has {length.channels} channels: send 1 to {MAX_CHANNELS}")
    if not MIN_RATE <= length.rate <= MAX_RATE:
        raise BadSound(
            f"it has {length.rate} samples in a second: send {MIN_RATE} to {MAX_RATE} of them"
        )
    if length.frames <= 0:
        raise BadSound(f"it has no sound: {REMEDY} that has some")
    if length.seconds > MAX_SECONDS:
        raise BadSound(f"it is longer than {MAX_SECONDS} seconds: send it in several parts")
    if length.frames * length.channels > MAX_VALUES:
        raise BadSound(
            f"all channels together have more than {MAX_VALUES} samples: send fewer channels, "
            "fewer samples in a second, or several parts"
        )


def _pieces(source: Any, length: Length) -> Iterator[npt.NDArray[np.float32]]:
    """The frames that the file says it has, one channel made of all as vLLM makes it. Raises
    `BadSound`."""
    left = length.frames
    while left:
        piece = source.read(min(left, _PIECE // length.channels), dtype="float32", always_2d=True)
        if not len(piece):
            raise BadSound("it is cut off: send the whole file")
        left -= len(piece)
        mono = np.mean(piece, axis=1) if length.channels > 1 else piece[:, 0]
        if not (np.abs(mono) <= _LOUDEST).all():
            raise BadSound("it has samples that are no numbers, or too large")
        yield mono
