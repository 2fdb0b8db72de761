"""Files as answers: open before their heads are sent, so that one that is deleted comes whole."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import BinaryIO, Final
from urllib.parse import quote

from litestar.response.base import ASGIResponse
from litestar.types import Receive, Scope, Send

from appliance.api.stream import HungUp, unless_hung_up
from appliance.batches.disk import Disk

PIECE_BYTES: Final = 2**20


class Download(ASGIResponse):
    """Sends a file piece by piece, and closes it."""

    _should_set_content_length = False

    def __init__(self, file: BinaryIO, filename: str, media_type: str, disk: Disk) -> None:
        """`filename` is what a client may call it; it is read by `disk`."""
        super().__init__(
            media_type=media_type,
            headers={
                "content-length": str(os.fstat(file.fileno()).st_size),
                "content-disposition": f"attachment; filename*=utf-8''{quote(filename)}",
            },
        )
        self._file = file
        self._disk = disk

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.start_response(send)
            with suppress(HungUp):
                await unless_hung_up(receive, self._send(send))
        finally:
            self._file.close()

    async def _send(self, send: Send) -> None:
        more = True
        while more:
            piece = await self._disk(self._file.read, PIECE_BYTES)
            more = bool(piece)
            await send({"type": "http.response.body", "body": piece, "more_body": more})
