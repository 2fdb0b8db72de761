"""Where models come from: a directory, an archive (tar, tar.gz, zip), or a hub.

A source tells what it has before anything is written, and what of it is wanted: weights as
safetensors, and text (configuration, tokenizer, template). Everything else is left out and listed.
"""

from __future__ import annotations

import contextlib
import hashlib
import lzma
import os
import re
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, Any, Final, NamedTuple, Protocol, cast

from appliance.errors import PullError
from appliance.units import human

CHUNK_BYTES: Final = 16 << 20
MAX_FILES: Final = 10_000
"""In a model; also the most members of an archive, whatever they are."""
MAX_HEADER_BYTES: Final = 16 << 10
"""Of one member of a tar archive, beyond 512; a path has 4096 at most. `tarfile` takes memory with
its square."""
MAX_TEXT_BYTES: Final = 1 << 30

_WEIGHTS: Final = ".safetensors"
_DENSE: Final = re.compile(r"\d+_Dense\w*", re.ASCII)
"""Folders of dense layers that sentence-transformers puts behind the pooling."""
_TEXT: Final = frozenset({".json", ".txt", ".model", ".jinja"})
_TEXT_BELOW: Final = frozenset({".json", ".txt"})
_NAMES: Final = frozenset({"SHA256SUMS", "LICENSE", "NOTICE"})
_PICKLES: Final = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})
_ARCHIVES: Final = (".tar", ".tar.gz", ".tgz", ".zip")
_EXTENDED: Final = frozenset(
    {
        tarfile.GNUTYPE_LONGNAME,
        tarfile.GNUTYPE_LONGLINK,
        tarfile.XHDTYPE,
        tarfile.XGLTYPE,
        tarfile.SOLARIS_XHDTYPE,
    }
)
HUB: Final = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")

More = Callable[[int], None]
"""Hears how many bytes more of a file are there; none while its source lets it wait."""
Write = Callable[[Path, More], None]
"""Writes a file whole to a path, and tells of it."""


class Progress(NamedTuple):
    """How far a pull is. `status` is ``fetching``, ``waiting`` (for the source), ``present`` (from
    an earlier pull), ``left out`` or ``verifying``; of `file` there are `done_bytes` of
    `total_bytes`."""

    status: str
    file: str = ""
    done_bytes: int = 0
    total_bytes: int = 0


Tell = Callable[[Progress], None]


class Wanted(NamedTuple):
    """A file of a source that is to be fetched; `name` is relative. `write` may be called only
    before the next one is asked for."""

    name: str
    nbytes: int
    modified: int | None
    """Unix seconds, if the source tells."""
    write: Write


class Source(Protocol):
    """What one name given to a pull means."""

    @property
    def name(self) -> str:
        """What the model is called unless the operator names it."""

    @property
    def directory(self) -> Path | None:
        """Where its files lie already, if they do."""

    def origin(self) -> dict[str, Any]:
        """Tells this source from any other, and from itself after a change."""

    def listing(self) -> dict[str, int]:
        """All files, with their sizes. Raises `PullError`, `OSError`."""

    def wanted(self, names: Sequence[str]) -> Iterator[Wanted]:
        """Those of its files, each once, in any order. Raises `PullError`, `OSError`."""


def find_source(text: str) -> Source:
    """A directory, an archive, or ``org/model[@revision]`` of a hub, in this order. Raises
    `PullError` for anything else."""
    path = Path(text)
    # Unlike those of Path, these say no to what can be no path.
    if os.path.isdir(text):  # noqa: PTH112
        return DirectorySource(path.absolute())
    if text.endswith(_ARCHIVES) and os.path.isfile(text):  # noqa: PTH113
        kind = ZipSource if text.endswith(".zip") else TarSource
        return kind(path.absolute())
    if HUB.fullmatch(text):
        return hub_source(text)
    raise PullError(
        f"{text} is neither a directory, nor an archive ({', '.join(_ARCHIVES)}) that there is, "
        "nor org/model[@revision] of a hub"
    )


def hub_source(text: str) -> Source:
    """``org/model[@revision]`` of a hub, whatever there is in the working directory. Raises
    `PullError` for anything else."""
    match = HUB.fullmatch(text)
    if match is None:
        raise PullError(f"{text} is not org/model[@revision] of a hub")
    return HubSource(match["name"], match["revision"])


def chosen(source: str, listing: dict[str, int]) -> tuple[list[str], list[str]]:
    """Names of the files that are fetched, and of those that are left out.

    Raises `PullError` if no weights are among the former, or more than a model has of anything.
    """
    if len(listing) > MAX_FILES:
        raise PullError(f"{source} has {len(listing)} files: that is no model")
    taken = [name for name in listing if is_taken(name)]
    known = set(taken)
    left_out = [name for name in listing if name not in known]
    if not any(name.endswith(_WEIGHTS) for name in taken):
        pickles = [name for name in left_out if PurePosixPath(name).suffix in _PICKLES]
        if pickles:
            raise PullError(
                f"{source} has no *.safetensors: {pickles[0]} is a pickle, which may run code when "
                "it is read; convert it to safetensors"
            )
        raise PullError(f"{source} has no *.safetensors file")
    for name in taken:
        if not name.endswith(_WEIGHTS) and listing[name] > MAX_TEXT_BYTES:
            raise PullError(f"{name} of {source} has {listing[name]} bytes: that is no text")
    return taken, left_out


def is_taken(name: str) -> bool:
    """Whether a file of this relative name belongs to a checkpoint as it is served."""
    path = PurePosixPath(name)
    if any(part.startswith((".", "__MACOSX")) for part in path.parts):
        return False
    if len(path.parts) > 1:
        dense = len(path.parts) == 2 and _DENSE.fullmatch(path.parts[0]) is not None
        return path.suffix in _TEXT_BELOW or (dense and path.name == "model.safetensors")
    return path.suffix in _TEXT or path.suffix == _WEIGHTS or path.name in _NAMES


class DirectorySource:
    """A checkpoint on this machine. Links in it are followed: it is the operator's own."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self.directory: Path | None = path
        self._path = path

    def origin(self) -> dict[str, Any]:
        return {"directory": str(self._path)}

    def listing(self) -> dict[str, int]:
        found = {}
        for folder, below, names in os.walk(self._path):
            below[:] = [name for name in below if not name.startswith(".")]
            for name in names:
                file = Path(folder, name)
                if file.is_file():
                    found[file.relative_to(self._path).as_posix()] = file.stat().st_size
            if len(found) > MAX_FILES:
                break
        return found

    def wanted(self, names: Sequence[str]) -> Iterator[Wanted]:
        for name in names:
            file = self._path / name
            status = file.stat()

            def write(path: Path, more: Callable[[int], None], file: Path = file) -> None:
                with file.open("rb") as stream:
                    _copy(stream, path, more)

            yield Wanted(name, status.st_size, int(status.st_mtime), write)


def leads_out(name: str) -> bool:
    """Whether a name that an archive or a hub gives a file could be of one outside of the model's
    folder, or is no name that a person can read."""
    path = PurePosixPath(name)
    parts_out = path.is_absolute() or ".." in path.parts or "\\" in name or not path.parts
    return parts_out or not name.isprintable()


class _Archive:
    """What archives have in common. If all of one lies in one folder, that is the checkpoint."""

    directory: Path | None = None

    def __init__(self, path: Path) -> None:
        self.name = path.name
        for suffix in sorted(_ARCHIVES, key=len, reverse=True):
            self.name = self.name.removesuffix(suffix)
        self._path = path

    def origin(self) -> dict[str, Any]:
        status = self._path.stat()
        return {"archive": str(self._path), "size": status.st_size, "time": status.st_mtime_ns}

    def _inside(self, names: Sequence[str]) -> dict[str, str]:
        """Members by their names as files of the checkpoint. Raises `PullError` for a name that
        leads out of it, or that is there twice."""
        paths = {}
        for name in names:
            if leads_out(name):
                raise PullError(f"{self._path} is refused: its member {name!r} leads out of it")
            paths[name] = PurePosixPath(name)
        tops = {path.parts[0] for path in paths.values()}
        strip = len(tops) == 1 and all(len(path.parts) > 1 for path in paths.values())
        inside: dict[str, str] = {}
        for name, path in paths.items():
            relative = PurePosixPath(*path.parts[1:]) if strip else path
            if str(relative) in inside:
                raise PullError(f"{self._path} is refused: it has {relative} twice")
            inside[str(relative)] = name
        return inside

    def _check_count(self, members: int) -> None:
        if members > MAX_FILES:
            raise PullError(f"{self._path} has more than {MAX_FILES} members: that is no model")

    def _refuse(self, name: str, what: str) -> PullError:
        return PullError(f"{self._path} is refused: its member {name} is {what}, no file")

    @contextlib.contextmanager
    def _damage(self) -> Iterator[None]:
        try:
            yield
        except (
            tarfile.TarError,
            zipfile.BadZipFile,
            zlib.error,
            lzma.LZMAError,
            EOFError,
            ValueError,  # of numbers and texts in headers
        ) as error:
            raise PullError(f"{self._path} is damaged: {error}") from error
        except NotImplementedError as error:
            raise PullError(f"{self._path} cannot be read: {error}") from error


class _Member(tarfile.TarInfo):
    """A member whose headers are bounded, which `tarfile` reads whole into memory before it tells
    of them."""

    def _proc_member(self, archive: Any) -> tarfile.TarInfo:
        if self.size < 0 or self.type == tarfile.GNUTYPE_SPARSE:
            raise PullError(f"{archive.name} is refused: its member {self.name} is no whole file")
        if self.type not in _EXTENDED:
            return cast(tarfile.TarInfo, super()._proc_member(archive))  # type: ignore[misc]
        # It comes before its member, which is read while it is held; a global one stays.
        held = getattr(archive, "held_header_bytes", 0)
        archive.held_header_bytes = held + max(self.size, tarfile.BLOCKSIZE)
        if archive.held_header_bytes > MAX_HEADER_BYTES:
            raise PullError(
                f"{archive.name} is refused: it has headers of more than {human(MAX_HEADER_BYTES)}"
            )
        member = cast(tarfile.TarInfo, super()._proc_member(archive))  # type: ignore[misc]
        if self.type != tarfile.XGLTYPE:
            archive.held_header_bytes = held
        return member

    def _proc_gnusparse_10(self, member: tarfile.TarInfo, pax: object, archive: Any) -> None:
        raise PullError(f"{archive.name} is refused: its member {member.name} is no whole file")


class TarSource(_Archive):
    """A tar archive, compressed or not."""

    def listing(self) -> dict[str, int]:
        with self._damage(), tarfile.open(self._path, tarinfo=_Member) as archive:
            members = self._members(archive)
            return {name: member.size for name, member in members.items()}

    def wanted(self, names: Sequence[str]) -> Iterator[Wanted]:
        with self._damage(), tarfile.open(self._path, tarinfo=_Member) as archive:
            members = self._members(archive)
            # As they come: what is compressed can be read in one direction only.
            for name in sorted(names, key=lambda name: members[name].offset):
                member = members[name]

                def write(
                    path: Path, more: Callable[[int], None], member: tarfile.TarInfo = member
                ) -> None:
                    # Not raised inside of this generator: it is not who writes.
                    with self._damage():
                        stream = archive.extractfile(member)
                        assert stream is not None, "it is a file"
                        _copy(stream, path, more)

                yield Wanted(name, member.size, int(member.mtime), write)

    def _members(self, archive: tarfile.TarFile) -> dict[str, tarfile.TarInfo]:
        files = {}
        for count, member in enumerate(archive, start=1):
            self._check_count(count)
            member.pax_headers = {}  # each has a copy of the global ones
            if member.isdir():
                continue
            if not member.isreg() or member.issparse() or member.size < 0:
                raise self._refuse(member.name, "a link, a device or sparse")
            if member.name in files:
                raise PullError(f"{self._path} is refused: it has {member.name} twice")
            files[member.name] = member
        return {inside: files[name] for inside, name in self._inside(list(files)).items()}


class ZipSource(_Archive):
    """A zip archive."""

    def listing(self) -> dict[str, int]:
        with self._damage(), zipfile.ZipFile(self._path) as archive:
            members = self._members(archive)
            return {name: member.file_size for name, member in members.items()}

    def wanted(self, names: Sequence[str]) -> Iterator[Wanted]:
        with self._damage(), zipfile.ZipFile(self._path) as archive:
            members = self._members(archive)
            for name in names:
                member = members[name]

                def write(
                    path: Path, more: Callable[[int], None], member: zipfile.ZipInfo = member
                ) -> None:
                    with self._damage(), archive.open(member) as stream:
                        _copy(stream, path, more)

                yield Wanted(name, member.file_size, None, write)

    def _members(self, archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
        self._check_count(len(archive.infolist()))
        files = {}
        for member in archive.infolist():
            kind = member.external_attr >> 16 & 0o170000
            if member.is_dir():
                continue
            if kind not in (0, 0o100000):
                raise self._refuse(member.filename, "a link or a device")
            if member.flag_bits & 1:
                raise self._refuse(member.filename, "encrypted")
            if member.filename in files:
                raise PullError(f"{self._path} is refused: it has {member.filename} twice")
            files[member.filename] = member
        return {inside: files[name] for inside, name in self._inside(list(files)).items()}


class HubSource:
    """A model of a hub, by `huggingface_hub`, which knows where that is and who may.

    What it is at the beginning it is to the end: the revision is looked up once.
    """

    directory: Path | None = None

    def __init__(self, name: str, revision: str | None) -> None:
        self.name = name
        self._revision = revision
        self._known: Any = None

    def origin(self) -> dict[str, Any]:
        return {"hub": self.name, "revision": self._info().sha}

    def listing(self) -> dict[str, int]:
        files = {file.rfilename: file.size or 0 for file in self._info().siblings}
        for name in files:
            if leads_out(name):
                raise PullError(f"{self.name} is refused: its file {name!r} leads out of it")
        return files

    def wanted(self, names: Sequence[str]) -> Iterator[Wanted]:
        info = self._info()
        files = {file.rfilename: file for file in info.siblings}
        for name in names:
            file = files[name]
            digest = file.lfs.sha256 if file.lfs else None

            def write(
                path: Path,
                more: Callable[[int], None],
                name: str = name,
                digest: str | None = digest,
                file: Any = file,
            ) -> None:
                counted = _Counter(file.size or 0, more)
                with self._reaching() as hub:
                    loaded = Path(
                        hub.hf_hub_download(
                            self.name,
                            name,
                            revision=info.sha,
                            local_dir=path.parent / ".hub",
                            tqdm_class=counted.bar_class(),
                        )
                    )
                if digest is not None and _sha256(loaded) != digest:
                    loaded.unlink()
                    raise PullError(f"{name} of {self.name} came damaged; pull again")
                counted.end(loaded.stat().st_size)
                loaded.replace(path)

            yield Wanted(name, file.size or 0, None, write)

    def _info(self) -> Any:
        if self._known is None:
            with self._reaching() as hub:
                self._known = hub.HfApi().model_info(
                    self.name, revision=self._revision, files_metadata=True
                )
        return self._known

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[Any]:
        try:
            import huggingface_hub
        except ImportError as error:
            raise PullError(
                f"{self.name} is no directory here, and huggingface_hub, which knows hubs, is not "
                "installed"
            ) from error
        try:
            yield huggingface_hub
        except PullError:
            raise
        except Exception as error:  # whatever its HTTP client raises
            kind, reason = type(error).__name__, str(error).strip().partition("\n")[0]
            raise PullError(
                f"{self.name} is no directory here, and the hub does not give it: {kind}: {reason}"
            ) from error


class _Counter:
    """How much of a file has come from a hub, by the word of `huggingface_hub`: it calls the bar
    that it thinks it shows. A bar may count bytes twice, as when a download is tried again."""

    def __init__(self, nbytes: int, more: Callable[[int], None]) -> None:
        self._most = nbytes
        self._more = more
        self._reported = 0

    def add(self, nbytes: float) -> None:
        """So much came; less than nothing if it has to come again."""
        self.end(min(self._most, max(0, self._reported + int(nbytes))))

    def end(self, nbytes: int) -> None:
        """There are so many bytes in all."""
        if nbytes != self._reported:
            self._more(nbytes - self._reported)
            self._reported = nbytes

    def bar_class(self) -> type:
        """In the place of tqdm's."""
        counter = self

        class Bar(_Bar):
            def __init__(self, *_: object, initial: float = 0, **__: object) -> None:
                counter.add(initial)

            def update(self, nbytes: float | None = 1) -> None:
                counter.add(nbytes or 0)

        return Bar


class _Bar:
    """What `huggingface_hub` calls of a progress bar: none of it is shown."""

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update_transfer(self, nbytes: float) -> None:
        """With this, one bar is enough for a file that comes in parts."""

    def set_postfix_str(self, *_: object, **__: object) -> None: ...

    def set_transfer_postfix_str(self, *_: object, **__: object) -> None: ...

    def refresh(self) -> None: ...

    def close(self) -> None: ...


def _copy(stream: IO[bytes], path: Path, more: Callable[[int], None]) -> None:
    with path.open("wb") as file:
        while chunk := stream.read(CHUNK_BYTES):
            file.write(chunk)
            more(len(chunk))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
