"""A model of another box, as a source of a pull: its files by HTTP, each checked by its SHA-256.

A file that broke off goes on where it stopped: what came of it is kept in the part, below `.peer`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn
from urllib.parse import quote

import httpx
import msgspec

from appliance.checkpoints.sources import CHUNK_BYTES, MAX_FILES, More, Wanted, leads_out
from appliance.errors import PullError
from appliance.vocabulary import MODEL_NAME

MAX_LIST_BYTES: Final = 16 << 20
CONNECT_SECONDS: Final = 10.0
SILENCE_SECONDS: Final = 120.0
PATIENCE_SECONDS: Final = 300.0
"""How long the other box may send to others, or compute no further digest. Less than `fleet apply`
waits for a box that says nothing."""
POLL_SECONDS: Final = 0.5
TELL_SECONDS: Final = 10.0
"""Between two words of a pull that waits; also the most that it waits before it asks again."""

PARTS: Final = ".peer"
"""The folder of what came of files that are not whole, in the part."""

_PIECE_BYTES: Final = 1 << 20
_MAX_BYTES, _MAX_SECONDS = 1 << 56, 1 << 40
"""Of a file, and of a time of a file: what a file system can have."""
_MAX_PATH_BYTES: Final = 4096
_MAX_SAID: Final = 500
"""Characters of an error of the other box that are repeated."""
_NAME: Final = re.compile(MODEL_NAME)
_SECONDS: Final = re.compile(r"\d{1,4}", re.ASCII)
_BAD_JSON: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_OK, _PARTIAL, _FULL = 200, 206, 503
_REFUSED: Final = frozenset({401, 403})


class _File(msgspec.Struct, frozen=True):
    path: str
    bytes: int
    modified: int
    sha256: str | None


class _Files(msgspec.Struct, frozen=True):
    files: tuple[_File, ...]


class _Answer(NamedTuple):
    """What the other box refuses with; no more of it than can be shown."""

    code: str
    message: str


class PeerSource:
    """A model of the catalogue of another box, which is asked after `__enter__`."""

    directory: Path | None = None

    def __init__(
        self, url: str, model: str, key: str, *, key_from: str, field: str = "--from"
    ) -> None:
        """Errors say where the `key` was, or belongs (`key_from`), and call the address by `field`.
        Raises `PullError` for what is no address of a box, or no name of a model."""
        if not _NAME.fullmatch(model) or {".", ".."} & set(model.split("/")):
            raise PullError(
                f"{model[:200]!r} cannot be the name of a model of another box: give it as "
                "`appliance list` shows it there"
            )
        self.name = model
        self._url = _checked_address(url, field)
        self._key_from = key_from
        self._field = field
        self._path = f"{self._url}/api/models/{quote(model)}/files"
        self._key = key
        self._open: httpx.Client | None = None
        self._known: dict[str, _File] | None = None

    def __enter__(self) -> PeerSource:
        headers = {"Accept-Encoding": "identity"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        timeout = httpx.Timeout(SILENCE_SECONDS, connect=CONNECT_SECONDS)
        # No proxy of the environment gets the key; certificates are those of the environment.
        self._open = httpx.Client(
            headers=headers, timeout=timeout, trust_env=False, verify=httpx.create_ssl_context()
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    @property
    def _client(self) -> httpx.Client:
        """Built late, as reading certificates takes tens of milliseconds."""
        assert self._open is not None, "it was entered"
        return self._open

    @property
    def address(self) -> str:
        """What errors call it."""
        return f"{self.name} of {self._url}"

    def origin(self) -> dict[str, Any]:
        files = sorted((one.path, one.bytes, one.modified) for one in self._files().values())
        state = hashlib.sha256(msgspec.json.encode(files)).hexdigest()
        return {"peer": self._url, "model": self.name, "files": state}

    def listing(self) -> dict[str, int]:
        return {name: file.bytes for name, file in self._files().items()}

    def wanted(self, names: Sequence[str]) -> Iterator[Wanted]:
        for name in names:
            file = self._files()[name]

            def write(path: Path, more: More, file: _File = file) -> None:
                self._fetch(file, path, more)

            yield Wanted(name, file.bytes, file.modified, write)

    def _files(self) -> dict[str, _File]:
        if self._known is None:
            self._known = self._ask()
        return self._known

    def _ask(self) -> dict[str, _File]:
        """The list as it is now; digests may be missing."""
        with self._asking(self._path, {}) as response:
            if response.status_code != _OK:
                self._refuse(response.status_code, self._error(response))
            body = self._body(response)
        try:
            found = msgspec.json.decode(body, type=_Files).files
        except _BAD_JSON as error:
            raise PullError(
                f"{self._url} is no appliance that offers files ({error}): correct "
                f"{self._field}, or update the appliance there"
            ) from error
        for file in found:
            sizes = 0 <= file.bytes < _MAX_BYTES and 0 <= file.modified < _MAX_SECONDS
            if leads_out(file.path) or len(file.path.encode()) > _MAX_PATH_BYTES or not sizes:
                raise PullError(
                    f"{self.address} is refused: its file {file.path[:200]!r} leads out of it, or "
                    "has a name, a size or a time that no file has"
                )
        files = {file.path: file for file in found}
        if len(files) != len(found) or len(found) > MAX_FILES:
            raise PullError(
                f"{self.address} is refused: it lists a file twice, or more than {MAX_FILES}"
            )
        return files

    def _fetch(self, file: _File, path: Path, more: More) -> None:
        """Have a file at `path`, whole and of the digest that the box tells of it."""
        part = path.parent / PARTS / hashlib.sha256(file.path.encode()).hexdigest()
        part.parent.mkdir(exist_ok=True)
        digest = hashlib.sha256()
        with part.open("a+b") as stream:
            if os.fstat(stream.fileno()).st_size > file.bytes:
                stream.truncate(0)
            stream.seek(0)
            while piece := stream.read(CHUNK_BYTES):
                digest.update(piece)
                more(len(piece))
            if stream.tell() < file.bytes:
                self._receive(file, stream, digest, more)
        if digest.hexdigest() != self._digest_of(file, more):
            part.unlink()
            raise PullError(
                f"{file.path} of {self.address} came damaged: its SHA-256 is not the one that the "
                "box tells; pull again, and if that does not help, run `appliance doctor --verify` "
                "there"
            )
        part.replace(path)

    def _receive(self, file: _File, stream: Any, digest: Any, more: More) -> None:
        """What is not there yet, behind what is."""
        begun = stream.tell()
        headers = {"Range": f"bytes={begun}-"} if begun else {}
        with self._in_turn(f"{self._path}/{quote(file.path)}", headers, more) as response:
            if response.status_code != (_PARTIAL if begun else _OK):
                self._refuse(response.status_code, self._error(response))
            where = response.headers.get("content-range", "")
            if begun and not where.startswith(f"bytes {begun}-"):
                raise PullError(f"{self._url} sends another part of {file.path} than was asked for")
            got = counted = 0
            for piece in response.iter_raw():  # as it comes: what came of a file is kept
                if begun + got + len(piece) > file.bytes:
                    raise PullError(f"{file.path} is longer than its {file.bytes} bytes")
                stream.write(piece)
                digest.update(piece)
                got += len(piece)
                if got - counted >= CHUNK_BYTES:
                    more(got - counted)
                    counted = got
            if got > counted:
                more(got - counted)

    def _digest_of(self, file: _File, more: More) -> str:
        """As the box tells it, which may have to read the file before."""
        digest, until = file.sha256, time.monotonic() + PATIENCE_SECONDS
        missing, wait = None, _Wait(more)
        while digest is None:
            files = self._ask()
            now = files.get(file.path)
            if now is None or (now.bytes, now.modified) != (file.bytes, file.modified):
                raise PullError(f"{file.path} of {self.address} has changed; pull again")
            self._known, digest = files, now.sha256
            left = sum(one.sha256 is None for one in files.values())
            if left != missing:
                missing, until = left, time.monotonic() + PATIENCE_SECONDS
            if digest is None:
                if time.monotonic() > until:
                    raise PullError(
                        f"{self._url} tells no SHA-256 of {file.path}; pull again later, to go on"
                    )
                wait(POLL_SECONDS)
        return digest

    @contextlib.contextmanager
    def _in_turn(self, url: str, headers: dict[str, str], more: More) -> Iterator[httpx.Response]:
        """An answer, once the box does not send as many files as it may to others."""
        until, wait = time.monotonic() + PATIENCE_SECONDS, _Wait(more)
        while True:
            with self._asking(url, headers) as response:
                if response.status_code != _FULL:
                    yield response
                    return
                answer = self._error(response)
                if answer.code != "transfers_full" or time.monotonic() > until:
                    self._refuse(_FULL, answer)
                after = response.headers.get("retry-after", "")
            seconds = float(after) if _SECONDS.fullmatch(after) else 0.0
            wait(max(POLL_SECONDS, min(seconds, TELL_SECONDS)))

    @contextlib.contextmanager
    def _asking(self, url: str, headers: dict[str, str]) -> Iterator[httpx.Response]:
        try:
            with self._client.stream("GET", url, headers=headers) as response:
                yield response
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason = str(error)[:_MAX_SAID] or type(error).__name__
            raise PullError(
                f"{self.address} broke off ({reason}); see that the box runs and is reached, then "
                "pull again to go on where it stopped"
            ) from error

    def _refuse(self, status: int, answer: _Answer) -> NoReturn:
        """Say what the box says, and what to do."""
        if status in _REFUSED and not self._key:
            raise PullError(f"{self._url} wants a key ({status}): set {self._key_from}")
        if status in _REFUSED:
            raise PullError(
                f"{self._url} refuses the key ({status}): the one in {self._key_from} has to be "
                "one with the scope admin there"
            )
        message = answer.message or f"correct {self._field}, or update the appliance there"
        raise PullError(f"{self._url} does not give {self.name} ({status}): {message}")

    def _error(self, response: httpx.Response) -> _Answer:
        """What may be anything, and is shown on terminals and written to logs."""
        body = self._body(response)
        try:
            error = msgspec.json.decode(body)["error"]
            return _Answer(_shown(error.get("code")), _shown(error.get("message")))
        except (*_BAD_JSON, KeyError, TypeError, AttributeError):
            return _Answer("", "")

    def _body(self, response: httpx.Response) -> bytes:
        body = b""
        for piece in response.iter_raw(_PIECE_BYTES):
            body += piece
            if len(body) > MAX_LIST_BYTES:
                raise PullError(
                    f"{self._url} answers with more than {MAX_LIST_BYTES} bytes: correct "
                    f"{self._field}"
                )
        return body


def _shown(text: object) -> str:
    fits = isinstance(text, str) and len(text) <= _MAX_SAID and text.isprintable()
    return str(text) if fits else ""


class _Wait:
    """Waits for the other box, of which nothing here tells, and says so now and then."""

    def __init__(self, more: More) -> None:
        self._more = more
        self._told = time.monotonic()

    def __call__(self, seconds: float) -> None:
        time.sleep(seconds)
        if (now := time.monotonic()) - self._told >= TELL_SECONDS:
            self._more(0)
            self._told = now


def _checked_address(url: str, field: str) -> str:
    """Without a slash at its end. Raises `PullError`."""
    try:
        address = httpx.URL(url)
        if (
            address.scheme in ("http", "https")
            and address.host
            and not (address.userinfo or address.query or address.fragment)
        ):
            return url.rstrip("/")
    except httpx.InvalidURL:
        pass
    raise PullError(f"{field}: {url!r} is no address of a box: give http(s)://HOST:PORT")
