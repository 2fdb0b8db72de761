"""The files that clients upload, and those that batches write: on disk, each whole or not there."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import tempfile
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path
from typing import Final

import msgspec

from appliance.platform.database import Database, Delete, Put
from appliance.platform.durable import NEW, make_folder, replace, sync

MESSAGES_INPUT: Final = "message_batch"
MESSAGES_OUTPUT: Final = "message_batch_output"
"""Purposes of the files of Anthropic's batches."""

_UPLOAD: Final = ".upload-"
_CONTENT: Final = ".jsonl"
_EARLIER_ABOUT: Final = ".json"
"""A description of an earlier version, which could not be taken in yet."""
_PAGE_BYTES: Final = 4096
SET_ASIDE: Final = "set-aside"
"""The folder, below that of the files, for what cannot be read. Nothing is deleted there."""

log = logging.getLogger(__name__)


def counted(size_bytes: int) -> int:
    """What a file takes, as far as is counted: a page at least."""
    return max(_PAGE_BYTES, size_bytes)


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a file. Times are Unix seconds; `owner` is the hash of the key that it
    belongs to, "" for a caller that needs none."""

    id: str
    owner: str
    filename: str
    purpose: str
    size_bytes: int
    created_at: float
    expires_at: float

    @property
    def hidden(self) -> bool:
        """Whether clients do not see it as a file: Anthropic's batches have none."""
        return self.purpose in (MESSAGES_INPUT, MESSAGES_OUTPUT)


class StoreFull(Exception):
    """No more may be stored before something is deleted."""

    def __init__(self, bound_bytes: int, *, of_key: bool) -> None:
        whose = "files of this API key" if of_key else "files"
        super().__init__(f"{whose} take all of the {bound_bytes} bytes that they may have together")


class Upload:
    """A file on its way in. It is one once it is `kept`; until then it is not listed."""

    def __init__(self, folder: Path, owner: str) -> None:
        self.owner = owner
        descriptor, name = tempfile.mkstemp(dir=folder, prefix=_UPLOAD)
        self._path = Path(name)
        self._stream = os.fdopen(descriptor, "wb")
        self.size_bytes = 0

    def write(self, data: bytes) -> None:
        self._stream.write(data)
        self.size_bytes += len(data)

    def keep(self, path: Path) -> None:
        """It is the file at `path` from now on, and on the disk."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        self._path.replace(path)

    def drop(self) -> None:
        """Give it up. Without effect once it is kept."""
        with contextlib.suppress(OSError):
            self._stream.close()
        self._path.unlink(missing_ok=True)


class FileStore:
    """The files in a folder. What is said to take time waits for the disk: call it in a thread."""

    def __init__(
        self,
        store: Database,
        folder: Path,
        *,
        max_bytes: int,
        keep_seconds: float,
        max_owner_bytes: int | None = None,
        beside_bytes: Callable[[str | None], int] = lambda _: 0,
    ) -> None:
        """What is known of the files is in `store`, their contents are in `folder`.

        An owner may have `max_owner_bytes` of the `max_bytes`, unless it is a caller without a
        key. `beside_bytes` of an owner, or of all (None), count as well, though they belong to no
        file: asked in any thread."""
        self._store = store
        self._folder = folder
        self._beside_bytes = beside_bytes
        self._counting = threading.Lock()
        self._owners_bytes: Counter[str] = Counter()
        """Of the files of each owner."""
        self._max_bytes = max_bytes
        self._max_owner_bytes = max_owner_bytes
        self._keep_seconds = keep_seconds
        self._files: dict[str, StoredFile] = {}
        self._uploads: set[Upload] = set()

    def open(self) -> None:
        """Find what is there. An upload that never became a file is deleted, and so is what was to
        be deleted when the daemon stopped. A content that no row names is set aside, so that no
        damage deletes what a client has stored. Takes time; raises `OSError`."""
        make_folder(self._folder, 0o700)
        for pattern in (f"{_UPLOAD}*", f"{NEW}*"):
            for path in self._folder.glob(pattern):
                path.unlink()
        for id, about, leaving in self._store.rows("files"):
            file = _decode(about)
            if leaving:
                self._erase(file.id)
            elif self.path(file.id).is_file():
                self._know(file)
            else:
                log.error("%s is ignored, as its content is lost", id)
        for path in sorted(self._folder.glob(f"*{_CONTENT}")):
            known = path.name.removesuffix(_CONTENT) in self._files
            if not known and not path.with_suffix(_EARLIER_ABOUT).exists():
                set_aside(path, "it is no file that is known")

    def stored_bytes(self, owner: str | None = None) -> int:
        """All files of an owner, or of all, also those being uploaded, and what is stored with
        them; whatever is small counts as a page."""
        coming = sum(
            counted(upload.size_bytes)
            for upload in list(self._uploads)
            if owner in (None, upload.owner)
        )
        with self._counting:
            files = self._owners_bytes.total() if owner is None else self._owners_bytes[owner]
        return files + coming + self._beside_bytes(owner)

    def path(self, id: str) -> Path:
        """Where the content of a file is."""
        return self._folder / f"{id}{_CONTENT}"

    def find(self, id: str) -> StoredFile | None:
        return self._files.get(id)

    def all(self) -> list[StoredFile]:
        """All files, the newest first."""
        files = list(self._files.values())  # at once: others change it meanwhile
        return sorted(files, key=lambda file: (file.created_at, file.id), reverse=True)

    def begin(self, owner: str) -> Upload:
        """A file of an owner begins to come in; it is to be `keep`ed or `drop`ped. Takes time;
        raises `StoreFull`, `OSError`."""
        self.check_room(owner)
        upload = Upload(self._folder, owner)
        self._uploads.add(upload)
        return upload

    def extend(self, upload: Upload, data: bytes) -> None:
        """More of it came. Takes time; raises `StoreFull`, `OSError`."""
        upload.write(data)
        self.check_room(upload.owner)

    def keep(self, upload: Upload, filename: str, now: float, purpose: str = "batch") -> StoredFile:
        """The upload as a file. Takes time; raises `OSError`."""
        id = f"file-{uuid.uuid4().hex}"
        try:
            upload.keep(self.path(id))
            file = self._add(id, upload.owner, filename, purpose, upload.size_bytes, now)
        except BaseException:  # no record would name its content
            self.path(id).unlink(missing_ok=True)
            raise
        self._uploads.discard(upload)
        return file

    def drop(self, upload: Upload) -> None:
        """The upload is not wanted, or was kept already. Takes time."""
        self._uploads.discard(upload)
        upload.drop()

    def is_full(self, owner: str | None = None) -> bool:
        """Whether there is more than may be, of all files or of an owner's."""
        if owner is None:
            return self.stored_bytes() > self._max_bytes
        return bool(
            owner
            and self._max_owner_bytes is not None
            and self.stored_bytes(owner) > self._max_owner_bytes
        )

    def check_room(self, owner: str) -> None:
        """Raises `StoreFull` if there is more than may be."""
        if self.is_full():
            raise StoreFull(self._max_bytes, of_key=False)
        if self.is_full(owner):
            assert self._max_owner_bytes is not None
            raise StoreFull(self._max_owner_bytes, of_key=True)

    def write(
        self,
        id: str,
        owner: str,
        filename: str,
        chunks: Iterable[bytes],
        now: float,
        purpose: str = "batch_output",
    ) -> StoredFile:
        """A batch's output as a file; one of this id is replaced. Takes time; raises `OSError`."""
        size = replace(self.path(id), chunks)
        return self._add(id, owner, filename, purpose, size, now)

    def delete(self, id: str) -> None:
        """Takes time; raises `OSError`. Only what a row says is to go is deleted, also after a stop
        in between. On a disk that is full the content goes first: no row could be written."""
        file = self._files.get(id)
        if file is None:
            return
        try:
            self._store.write([row_of(file, leaving=True)])
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        try:
            self._erase(id)
        except OSError:
            if self.path(id).exists():
                with contextlib.suppress(OSError):  # else it is deleted at the next start
                    self._store.write([row_of(file)])
                raise
            log.warning("%s is deleted; its row goes at the next start", id)
        with self._counting:
            if self._files.pop(id, None) is not None:
                self._count(file, -1)

    def _erase(self, id: str) -> None:
        self.path(id).unlink(missing_ok=True)
        sync(self._folder)
        self._store.write([Delete("files", (id,))])

    def _add(
        self, id: str, owner: str, filename: str, purpose: str, size_bytes: int, now: float
    ) -> StoredFile:
        file = StoredFile(
            id=id,
            owner=owner,
            filename=filename,
            purpose=purpose,
            size_bytes=size_bytes,
            created_at=now,
            expires_at=now + self._keep_seconds,
        )
        sync(self._folder)  # its content is there
        self._store.write([row_of(file)])
        self._know(file)
        return file

    def _know(self, file: StoredFile) -> None:
        with self._counting:
            if (before := self._files.get(file.id)) is not None:
                self._count(before, -1)
            self._files[file.id] = file
            self._count(file, 1)

    def _count(self, file: StoredFile, sign: int) -> None:
        self._owners_bytes[file.owner] += sign * counted(file.size_bytes)
        if not self._owners_bytes[file.owner]:
            del self._owners_bytes[file.owner]


def set_aside(path: Path, reason: str) -> None:
    """Move a file to where it is neither served nor deleted, with a line in the log."""
    folder = path.parent / SET_ASIDE
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        number = next(n for n in count() if not _numbered(folder / path.name, n).exists())
        path.rename(_numbered(folder / path.name, number))
    except OSError as error:
        log.error("%s is ignored: %s; it cannot be moved: %s", path, reason, error)
    else:
        log.error("%s is set aside in %s: %s", path, folder, reason)


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}") if number else path


def row_of(file: StoredFile, *, leaving: bool = False) -> Put:
    """What the store has of a file. Its content may be deleted once it is `leaving`."""
    return Put("files", (file.id, msgspec.json.encode(file), int(leaving)))


def _decode(about: object) -> StoredFile:
    assert isinstance(about, bytes)
    return msgspec.json.decode(about, type=StoredFile)
