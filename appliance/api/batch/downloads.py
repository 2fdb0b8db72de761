"""Files as answers: open before their heads are sent, so that one that is deleted comes whole."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import BinaryIO, Final
from urllib.parse import quote

from litestar.types import Receive, Scope, Send

from appliance.batches.disk import Disk
from appliance.http.streaming import Streamed

PIECE_BYTES: Final = 2**20


class Download(Streamed):
    """Sends a file piece by piece, and closes it."""

    def __init__(self, file: BinaryIO, filename: str, media_type: str, disk: Disk) -> None:
        """`filename` is what a client may call it; it is read by `disk`."""
        headers = {
            "content-length": str(os.fstat(file.fileno()).st_size),
            "content-disposition": f"attachment; filename*=utf-8''{quote(filename)}",
        }
        super().__init__(_pieces(file, disk), media_type, headers)
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file:
            await super().__call__(scope, receive, send)


async def _pieces(file: BinaryIO, disk: Disk) -> AsyncIterator[bytes]:
    while piece := await disk(file.read, PIECE_BYTES):
        yield piece
