"""A dashboard in a process of its own, at the other end of a page's WebSocket."""

from __future__ import annotations

import asyncio
import shlex
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence

import msgspec
from aiohttp import WSMsgType, web
from textual_serve.app_service import AppService
from textual_serve.download_manager import Download, DownloadManager

from tui.web.child import KEY_VARIABLE

LEAVE_SECONDS = 5.0
"""How long the process may take to end by itself."""
SMALLEST, LARGEST = (20, 5), (400, 150)
"""Columns and lines of a screen."""


class Terminal(AppService):
    """The process, and what goes to it and comes from it: Textual's own protocol for the web."""

    def __init__(
        self, command: Sequence[str], key: str | None, socket: web.WebSocketResponse
    ) -> None:
        self._downloads = DownloadManager()  # what is left in it goes with this page
        super().__init__(
            shlex.join(command),
            write_bytes=socket.send_bytes,
            write_str=socket.send_str,
            close=self.close,
            download_manager=self._downloads,
        )
        self._arguments = command
        self._key = key
        self._socket = socket

    async def hear(self) -> None:
        """Hand on what the page says, until it is gone, or says what no page of ours would."""
        async for message in self._socket:
            if message.type is not WSMsgType.TEXT or not await self._hear(message.data):
                return

    async def stop(self) -> None:
        """End the process: it is asked to, then made to."""
        if (process := self._process) is None or (reading := self._task) is None:
            return  # it never began
        # Not under a timeout: `AppService.run` takes the cancel of it for its own.
        leaving = asyncio.create_task(self._leave(process, reading))
        try:
            await asyncio.wait([leaving], timeout=LEAVE_SECONDS)
        finally:
            if process.returncode is None:
                process.kill()
            reading.cancel()  # it may wait for a page that takes nothing
            await asyncio.wait([leaving])

    async def download(self, name: str) -> Download | None:
        """What the page may fetch by this name, if there is something."""
        try:
            return await self._downloads.get_download_metadata(name)
        except KeyError:
            return None

    def pieces(self, name: str) -> AsyncIterator[bytes]:
        """Of what may be fetched by this name."""
        return self._downloads.download(name)

    async def close(self) -> None:
        """End the page, if it has begun."""
        if self._socket.prepared:
            await self._socket.close()

    async def run(self) -> None:
        """Also where the app ended, or never began, its page gets the reason."""
        try:
            await super().run()
        finally:
            await self.close()

    def _build_environment(self, width: int = 80, height: int = 24) -> dict[str, str]:
        environment = super()._build_environment(width, height)
        environment.pop(KEY_VARIABLE, None)  # that of who serves, not of who looks
        return environment | ({} if self._key is None else {KEY_VARIABLE: self._key})

    async def _open_app_process(self, width: int = 80, height: int = 24) -> Process:
        """Without a shell, and in a session of its own: Ctrl-C is for the server, which ends it."""
        self._process = process = await asyncio.create_subprocess_exec(
            *self._arguments,
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            env=self._build_environment(*_fit(width, height)),
            start_new_session=True,
        )
        self._stdin = process.stdin
        return process

    async def _leave(self, process: Process, reading: asyncio.Task[None]) -> None:
        """Ask it to, and see it off. It may wait for what it has still to say."""
        await self._downloads.cancel_app_downloads(self.app_service_id)
        await self.send_meta({"type": "quit"})
        await asyncio.wait([reading])
        await process.communicate()

    async def _hear(self, text: str) -> bool:
        try:
            said = msgspec.json.decode(text)
        except msgspec.DecodeError:
            return False
        match said:
            case ["stdin", str(typed)]:
                await self.send_bytes(typed.encode(errors="replace"))
            case ["resize", {"width": int(width), "height": int(height)}]:
                await self.set_terminal_size(*_fit(width, height))
            case ["ping", str(sent)]:
                await self._socket.send_json(["pong", sent])
            case ["focus"]:
                await self.focus()
            case ["blur"]:
                await self.blur()
            case _:
                return False
        return True


def _fit(width: int, height: int) -> tuple[int, int]:
    return (
        min(max(width, SMALLEST[0]), LARGEST[0]),
        min(max(height, SMALLEST[1]), LARGEST[1]),
    )
