"""What files of images may be, looked at before they are decoded: what they are is read of their
content, and what decoding and preparing them costs is bounded by their pixels, their shape and the
pieces of their head."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from typing import Final, NamedTuple

import pybase64
from PIL import Image, UnidentifiedImageError

from appliance.frontend.body_values import base64_in

MAX_IMAGE_BYTES: Final = 20 << 20
MAX_PIXELS: Final = 40_000_000
"""Of an image: each takes 3 bytes when it is decoded, and some more on the way."""
MAX_RATIO: Final = 200
"""Of the longer side to the shorter. Qwen's and GLM's image processors take no larger one."""
FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF")
"""As Pillow calls them."""

_CLIP_SIDE: Final = 336
"""Pixels. What prepares images for LLaVA 1.5 scales the shorter side to it before it crops the
other: that makes 22.6 million pixels of 1 x 200, in 3 bytes each."""
_MAX_PIECES: Final = 1 << 14
"""Chunks of a PNG, segments and scans of a JPEG's head, blocks before the first frame of a GIF:
each costs time, however small it is."""
_MAX_SCANS: Final = 100
"""Of a JPEG: each may go through all pixels again. Cameras and tools write 10 of them, and one for
a preview."""
_MAX_EXIF: Final = 100
"""Segments of a JPEG: they are put together one by one."""
_PNG: Final = b"\x89PNG\r\n\x1a\n"
_JPEG: Final = b"\xff\xd8"
_SCAN: Final = b"\xff\xda"
_EXIF: Final = b"\xff\xe1"
_GIFS: Final = (b"GIF87a", b"GIF89a")
_GIF_EXTENSION, _GIF_FRAME = 0x21, 0x2C


class BadImage(ValueError):
    """An image that is not read; the message says why, without what it is called."""


class Size(NamedTuple):
    """In pixels."""

    width: int
    height: int

    @property
    def pixels(self) -> int:
        return self.width * self.height

    @property
    def prepared(self) -> int:
        """Pixels of the image once its shorter side is at least as long as CLIP's."""
        side = min(self)
        return self.pixels * max(side, _CLIP_SIDE) ** 2 // side**2


def decoded_url(url: str) -> bytes:
    """The file in a data URL. Raises `BadImage` for other URLs, and for too many bytes."""
    if url[:5].lower() != "data:":
        raise BadImage("nothing is fetched from URLs: send the image as a data URL with base64")
    data = base64_in(url)
    if data is None:
        raise BadImage('the data URL has no base64: send "data:image/png;base64,..."')
    return decoded_base64(data)


def decoded_base64(data: str) -> bytes:
    """The bytes. Raises `BadImage`, for too many, too."""
    if len(data) // 4 * 3 > MAX_IMAGE_BYTES + 3:
        raise BadImage(f"more than {MAX_IMAGE_BYTES} bytes: send a smaller image")
    try:
        file = pybase64.b64decode(data, validate=True)
    except ValueError as error:
        raise BadImage(f"no base64: {error}") from error
    if len(file) > MAX_IMAGE_BYTES:
        raise BadImage(f"more than {MAX_IMAGE_BYTES} bytes: send a smaller image")
    return file


def checked_size(file: bytes) -> Size:
    """The size that the file says it has. Nothing is decoded. Raises `BadImage`."""
    _check_pieces(file)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(file), formats=FORMATS) as image:
                size = Size(*image.size)
    except Image.DecompressionBombError as error:
        raise BadImage(_too_many_pixels("it")) from error
    except UnidentifiedImageError as error:
        raise BadImage("it is no PNG, JPEG, WebP or GIF, or it is damaged") from error
    except Exception as error:  # of Pillow's readers, which are many
        raise BadImage(f"it is damaged: {error}") from error
    if size.pixels > MAX_PIXELS:
        raise BadImage(_too_many_pixels(f"{size.width} x {size.height}"))
    if not 0 < max(size) <= MAX_RATIO * min(size):
        raise BadImage(
            f"{size.width} x {size.height}: one side is more than {MAX_RATIO} times as long as the "
            "other: send an image of another shape"
        )
    return size


def _too_many_pixels(what: str) -> str:
    return f"{what} is more than {MAX_PIXELS} pixels: send a smaller image"


def _check_pieces(file: bytes) -> None:
    """Raise `BadImage` for a file whose head would take long to read."""
    pieces: Iterator[int] = iter(())
    if file.startswith(_PNG):
        pieces = _chunks(file)
    elif file.startswith(_JPEG):
        # In compressed data no marker follows this byte: what is counted are markers.
        if file.count(_SCAN) > _MAX_SCANS or file.count(_EXIF) > _MAX_EXIF:
            raise BadImage("it is a JPEG of too many scans or segments: save it anew")
        pieces = _segments(file)
    elif file.startswith(_GIFS):
        pieces = _blocks(file)
    if any(number >= _MAX_PIECES for number, _ in enumerate(pieces)):
        raise BadImage("it has too many pieces: save it anew")


def _chunks(file: bytes) -> Iterator[int]:
    """Where the chunks of a PNG begin."""
    at = len(_PNG)
    while at < len(file) and file[at + 4 : at + 8] != b"IEND":
        yield at
        at += 12 + int.from_bytes(file[at : at + 4], "big")


def _segments(file: bytes) -> Iterator[int]:
    """Where the bytes are that a reader of a JPEG's head stops at, up to its first scan."""
    at = len(_JPEG)
    while at < len(file) and file[at : at + 2] != _SCAN:
        yield at
        marker = file[at + 1] if at + 1 < len(file) else 0xFF
        if file[at] != 0xFF or marker in (0x00, 0xFF):
            at += 1  # filled, or not where a marker is expected
        elif 0xD0 <= marker <= 0xD9 or marker == 0x01:
            at += 2  # a marker alone
        else:
            at += 2 + max(int.from_bytes(file[at + 2 : at + 4], "big"), 2)


def _blocks(file: bytes) -> Iterator[int]:
    """Where the blocks of a GIF begin that are before its first frame."""
    flags = file[10] if len(file) > 10 else 0
    at = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    while at < len(file) and file[at] != _GIF_FRAME:
        yield at
        if file[at] != _GIF_EXTENSION:
            at += 1
            continue
        at += 2
        while at < len(file) and file[at]:
            yield at
            at += 1 + file[at]
        at += 1
