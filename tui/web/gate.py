"""Asks the daemon whether it would admit a visitor: only it knows its keys."""

from __future__ import annotations

import asyncio
import re
from enum import Enum
from typing import NamedTuple

import httpx
import msgspec

from tui.connection import ANSWER_SECONDS

ASKED = "/api/status"
"""What an operator may ask."""
AT_ONCE = 4
_KEY = re.compile(r"[!-~]{1,512}")


class KeyVerdict(Enum):
    """What a daemon said to a key, or to none."""

    ADMITTED = "admitted"
    REFUSED = "refused"
    UNKNOWN = "unknown"
    """It said neither, or nothing."""


class GateAnswer(NamedTuple):
    """Why, in words, unless it is admitted."""

    verdict: KeyVerdict
    why: str = ""


class KeyGate:
    """Of the daemon at an HTTP address: its admin socket knows no keys."""

    def __init__(self, url: str, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        timeout = httpx.Timeout(ANSWER_SECONDS, connect=5.0)
        self._client = httpx.AsyncClient(base_url=url, transport=transport, timeout=timeout)
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def ask(self, key: str | None) -> GateAnswer:
        """Whether the daemon takes this key for an operator's; None: whether it asks for none."""
        if key is not None and not _KEY.fullmatch(key):
            return GateAnswer(KeyVerdict.REFUSED, "this is no API key")
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        try:
            async with self._turns:
                response = await self._client.get(ASKED, headers=headers)
        except httpx.TransportError as error:
            return GateAnswer(KeyVerdict.UNKNOWN, f"the daemon cannot be reached: {error}")
        if response.is_success:
            return GateAnswer(KeyVerdict.ADMITTED)
        refused = response.status_code in (401, 403)
        return GateAnswer(KeyVerdict.REFUSED if refused else KeyVerdict.UNKNOWN, _why(response))

    async def close(self) -> None:
        await self._client.aclose()


def _why(response: httpx.Response) -> str:
    try:
        return str(msgspec.json.decode(response.content)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return f"the daemon answered {response.status_code}"
