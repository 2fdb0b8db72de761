"""The connections to one server whose models are passed on.

The address is the operator's, and so is the key: nothing that a client sends changes where a
request goes, and no redirect is followed. No proxy of the environment is used.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final, NamedTuple

import httpcore

from appliance import __version__
from appliance.http.errors import ApiError
from appliance.observability.remote_metrics import RemoteError
from appliance.service.remote_models import RemoteModel

KEPT_OPEN: Final = 16
KEPT_SECONDS: Final = 5.0
MAX_ERROR_BYTES: Final = 64 * 1024
RETRY_SECONDS: Final = 5
_SENDING: Final = "http11.send_request_body.started"
_CHECKED_ELSEWHERE: Final = (401, 403)
"""What a server says of our key, which is not the client's."""

log = logging.getLogger("appliance.gateway")


class Answer(NamedTuple):
    """The head of an answer, and what comes of it."""

    status: int
    headers: dict[str, str]
    response: httpcore.Response

    @property
    def media_type(self) -> str:
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()


class ServerFailed(ApiError):
    """The server of a model gives no answer; `kind` is how it is counted."""

    def __init__(
        self,
        kind: RemoteError,
        status: int,
        message: str,
        *,
        code: str,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, code=code, headers=headers)
        self.kind = kind


class Upstream:
    """Asks the server of one model."""

    def __init__(self, model: RemoteModel) -> None:
        self.model = model
        self._pool: httpcore.AsyncConnectionPool | None = None
        self._opening = asyncio.Lock()
        self._live = 0
        self._retired = False

    @asynccontextmanager
    async def asked(
        self,
        path: str,
        body: bytes,
        headers: tuple[tuple[str, str], ...],
        on_sent: Callable[[], None],
    ) -> AsyncIterator[Answer]:
        """The answer to a request; `on_sent` is called when the server may have read of it. Raises
        `ApiError` if there is none; cancelled, it closes the connection, which the server sees."""
        model = self.model
        pool = await self._open()
        seconds = {
            "connect": model.connect_seconds,
            "read": model.silence_seconds,
            "write": model.silence_seconds,
            "pool": model.silence_seconds,
        }
        url = model.address + path.removeprefix("/v1")
        ours = [
            ("content-type", "application/json"),
            ("accept-encoding", "identity"),  # what is small on the way could be large here
            ("user-agent", f"appliance/{__version__}"),
            *headers,
        ]
        if model.key:
            ours.append(("authorization", f"Bearer {model.key}"))

        async def trace(event: str, info: object) -> None:
            if event == _SENDING:
                on_sent()

        self._live += 1
        try:
            async with pool.stream(
                "POST",
                url,
                headers=ours,
                content=body,
                extensions={"timeout": seconds, "trace": trace},
            ) as response:
                yield Answer(response.status, _read(response), response)
        except (httpcore.ConnectError, httpcore.ConnectTimeout, OSError) as error:
            raise self._failed(RemoteError.UNREACHABLE, "cannot be reached", error, 503) from error
        except httpcore.TimeoutException as error:
            what = f"has sent nothing for {model.silence_seconds:g} s"
            raise self._failed(RemoteError.SILENT, what, error, 503) from error
        except (httpcore.NetworkError, httpcore.ProtocolError) as error:
            what = "broke the connection off"
            raise self._failed(RemoteError.BROKEN, what, error, 502) from error
        finally:
            self._live -= 1
            await self._close_unused()

    async def refusal(self, answer: Answer) -> tuple[ApiError | None, bytes]:
        """What a client is answered for a status that is no success: an error of ours, or what the
        server says of the request."""
        status = answer.status
        if 300 <= status < 400:
            why = "redirects to another address: an operator has to set remote to that one"
            return self._failed(RemoteError.REDIRECT, why, None, 502), b""
        if status in _CHECKED_ELSEWHERE:
            why = "refuses the appliance's key: an operator has to mend remote_key_file"
            return self._failed(RemoteError.KEY, why, None, 502, f"status {status}"), b""
        if status == 404:
            why = f"does not know {self.model.called!r}, or the endpoint: see remote_model"
            return self._failed(RemoteError.MISSING, why, None, 502), b""
        if status == 429 or status >= 500 or status < 200:
            code = 429 if status == 429 else 503 if status == 503 else 502
            why = "has no room now" if status in (429, 503) else f"failed with status {status}"
            kind = RemoteError.STATUS if code == 502 else RemoteError.FULL
            error = self._failed(kind, why, None, code)
            if code != 502 and (after := answer.headers.get("retry-after", "")).isdigit():
                error.headers["Retry-After"] = after[:6]
            return error, b""
        body = bytearray()
        why = f"refuses with status {status}"
        async for piece in answer.response.aiter_stream():
            body += piece
            if len(body) > MAX_ERROR_BYTES:
                return self._failed(RemoteError.REQUEST, why, None, 502), b""
        if answer.media_type != "application/json":
            return self._failed(RemoteError.REQUEST, why, None, 502), b""
        return None, bytes(body)

    def bad(self, why: str, kind: RemoteError = RemoteError.ANSWER) -> ApiError:
        """The error for an answer that is none."""
        return self._failed(kind, f"gave an answer that cannot be used: {why}", None, 502)

    async def retire(self) -> None:
        """Nothing new is asked; connections are closed when what is under way is over."""
        self._retired = True
        await self._close_unused()

    async def _close_unused(self) -> None:
        if self._retired and not self._live and self._pool is not None:
            pool, self._pool = self._pool, None
            await pool.aclose()

    async def _open(self) -> httpcore.AsyncConnectionPool:
        async with self._opening:
            if self._pool is None:
                tls = None
                if self.model.address.startswith("https:"):  # certificates take a while to read
                    tls = await asyncio.to_thread(ssl.create_default_context)
                self._pool = httpcore.AsyncConnectionPool(
                    ssl_context=tls,
                    max_connections=self.model.max_queue,
                    max_keepalive_connections=KEPT_OPEN,
                    keepalive_expiry=KEPT_SECONDS,
                )
            return self._pool

    def _failed(
        self,
        kind: RemoteError,
        what: str,
        error: BaseException | None,
        status: int,
        more: str = "",
    ) -> ServerFailed:
        """The error for a client, without the address, which is in the log."""
        why = more if error is None else str(error) or type(error).__name__
        log.warning(
            "the server of %s (%s) %s%s",
            self.model.name,
            self.model.address,
            what,
            f": {why}" if why else "",
        )
        message = f"the server of {self.model.name} {what}"
        if status not in (429, 503):
            return ServerFailed(kind, 502, message, code="remote_failed")
        message += "; try again later"
        headers = {"Retry-After": str(RETRY_SECONDS)}
        if status == 429:
            return ServerFailed(kind, 429, message, code="remote_full", headers=headers)
        return ServerFailed(kind, 503, message, code="remote_unavailable", headers=headers)


def _read(response: httpcore.Response) -> dict[str, str]:
    """The first of each header, by its name in lower case."""
    headers: dict[str, str] = {}
    for name, value in response.headers:
        headers.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))
    return headers
