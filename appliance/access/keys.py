"""API keys: what each allows, kept as hashes in a file that is read again when it changes. The
file has the organizations that keys belong to as well.

A key is 256 random bits, shown once. The file holds its SHA-256: no attacker finds a preimage of
that by trying, so a slow password hash would protect nothing and cost every request time.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import logging
import os
import re
import secrets
import stat
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Final, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from appliance.access.organizations import (
    NAME_RULE,
    Limit,
    Limits,
    Name,
    Organization,
    unknown_organization,
)
from appliance.errors import (
    KeyExists,
    KeyFieldError,
    KeyNotFound,
    KeysError,
    KeysReadOnly,
    OrganizationInUse,
    OrganizationNotFound,
)
from appliance.platform.checked_file import Damaged, read_checked, read_whole, write_checked
from appliance.vocabulary import ModelName, RequestClass

PREFIX: Final = "sk-"
MAX_KEYS: Final = 10_000
MAX_FILE_BYTES: Final = 16 << 20
LOCK_TRIES: Final = 100
"""How often a writer tries to lock the file: for five seconds in all."""

WHOLE_LIMITS: Final = Fraction(1)
LIMIT_NAMES: Final = tuple(Limits.__struct_fields__)

_LOCK_PAUSE_SECONDS: Final = 0.05
_SECRET_BYTES: Final = 32
_MAX_SECRET_CHARACTERS: Final = 256
"""What is longer is no key of ours; it is not even hashed."""
_MODE: Final = 0o600
_VERSION: Final = 1
_ROOT: Final = 0

log = logging.getLogger(__name__)

_LIFETIME: Final = re.compile(r"([0-9]{1,6})([mhd])")
_LIFETIME_SECONDS: Final = {"m": 60, "h": 3600, "d": 86_400}


class Scope(StrEnum):
    """What a key opens: generating and listing models; reading load and metrics; or everything that
    an operator asks, which includes these."""

    INFER = "infer"
    OBSERVE = "observe"
    ADMIN = "admin"


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A key and what it allows. Times are Unix seconds; a limit that is None does not bind."""

    name: Name
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    """Of the secret, in hexadecimal digits."""
    created_seconds: float
    expires_seconds: float | None = None
    scopes: Annotated[tuple[Scope, ...], Meta(min_length=1)] = (Scope.INFER,)
    models: tuple[ModelName, ...] = ()
    """Empty: every model."""
    classes: Annotated[tuple[RequestClass, ...], Meta(min_length=1)] = tuple(RequestClass)
    slo: bool = False
    """Whether a request may name a service level of its own."""
    guides: bool = True
    """Whether a request may have a guide, such as a JSON schema that its answer follows."""
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    tokens_per_month: Limit | None = None
    concurrency: Limit | None = None
    organization: Name | None = None
    """Whose limits hold for it as well; None: it belongs to none."""

    def expired(self, now: float) -> bool:
        """Whether it is over at the Unix time `now`."""
        return self.expires_seconds is not None and now >= self.expires_seconds

    def allows(self, model: ModelName) -> bool:
        return not self.models or model in self.models


class NewKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A key as it is wanted; what is left out is as `Key` has it."""

    name: Annotated[str, Meta(extra_json_schema={"pattern": "^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$"})]
    scopes: Annotated[tuple[Scope, ...], Meta(min_length=1)] = (Scope.INFER,)
    models: tuple[ModelName, ...] = ()
    """Empty: every model."""
    classes: Annotated[tuple[RequestClass, ...], Meta(min_length=1)] = tuple(RequestClass)
    slo: bool = False
    guides: bool = True
    expires: Annotated[str, Meta(extra_json_schema={"pattern": "^[0-9]{1,6}[mhd]$"})] | None = None
    """After so long: ``30d``, ``12h``, ``90m``; never if it is left out."""
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    tokens_per_month: Limit | None = None
    concurrency: Limit | None = None
    organization: str | None = None
    """The name of one that there is."""


def lifetime_seconds(text: str) -> float:
    """Seconds of ``30d``, ``12h`` or ``90m``. Raises `ValueError` with what is expected."""
    match = _LIFETIME.fullmatch(text)
    if match is None or not int(match[1]):
        raise ValueError(f"{text[:40]!r} is not a duration, such as 30d, 12h or 90m")
    return float(int(match[1]) * _LIFETIME_SECONDS[match[2]])


def make_key(wanted: NewKey, now: float) -> tuple[Key, str]:
    """A key made at the Unix time `now`, which is in no file yet, and its secret, which will be in
    none. Raises `KeyFieldError`."""
    secret = new_secret()
    try:
        expires = None if wanted.expires is None else now + lifetime_seconds(wanted.expires)
    except ValueError as error:
        raise KeyFieldError("expires", str(error)) from error
    fields = {
        **{name: getattr(wanted, name) for name in wanted.__struct_fields__ if name != "expires"},
        "scopes": tuple(dict.fromkeys(wanted.scopes)),
        "models": tuple(dict.fromkeys(wanted.models)),
        "classes": tuple(dict.fromkeys(wanted.classes)),
        "sha256": digest(secret),
        "created_seconds": now,
        "expires_seconds": expires,
    }
    try:
        return msgspec.convert(fields, Key), secret
    except msgspec.ValidationError as error:
        field = "organization" if "$.organization" in str(error) else "name"
        raise KeyFieldError(field, NAME_RULE) from error


class _File(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    version: int = _VERSION
    checksum: str | None = None
    """Of `keys`, and of `organizations` if there are some, as they are written, without white
    space; None in a file that was written by hand, or by an earlier version."""
    keys: msgspec.Raw = msgspec.Raw(b"[]")
    organizations: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET

    def sum(self) -> str:
        parts = [self.keys]
        if self.organizations is not msgspec.UNSET:
            parts.append(self.organizations)
        plain = b" ".join(msgspec.json.format(bytes(part), indent=-1) for part in parts)
        return f"{zlib.crc32(b'%d %b' % (self.version, plain)):08x}"


class Contents(NamedTuple):
    """What a file of keys has, in the order in which it was added."""

    keys: tuple[Key, ...] = ()
    organizations: tuple[Organization, ...] = ()


def new_secret() -> str:
    """What a client is to present: 256 random bits."""
    return PREFIX + secrets.token_urlsafe(_SECRET_BYTES)


def digest(secret: str) -> str:
    """The hash of a secret as the file has it."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


class KeyFile:
    """The keys of an appliance on disk: mode 0600, replaced whole, changed by one at a time."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        """One that is `read_only` is never written, nor is anything next to it."""
        self.path = path
        self.read_only = read_only

    @property
    def shared(self) -> bool:
        """Whether users other than its owner have access to it."""
        try:
            return bool(self.path.stat().st_mode & 0o077)
        except OSError:
            return False

    def read(self) -> tuple[Key, ...]:
        """All keys, also expired ones; none if there is no file. Raises `KeysError`."""
        return self.contents().keys

    def read_or_copy(self) -> tuple[Key, ...]:
        """The same, or those of the copy if the file is damaged."""
        return self.contents_or_copy().keys

    def contents(self) -> Contents:
        """All keys and organizations; none if there is no file. Raises `KeysError`."""
        return self._contents(read_whole)

    def contents_or_copy(self) -> Contents:
        """Those of the copy, if the file is damaged."""
        return self._contents(read_checked)

    def _contents(self, read: Callable[[Path, Callable[[bytes], Contents]], Contents]) -> Contents:
        try:
            found = read(self.path, self._parsed)
        except FileNotFoundError:
            return Contents()
        except OSError as error:
            raise KeysError(f"{self.path}: cannot be read: {error.strerror}") from error
        except Damaged as error:
            raise KeysError(f"{self.path}: {error}") from error
        self._check(found)
        return found

    def _parsed(self, data: bytes) -> Contents:
        """What is in a file. Raises `Damaged`, and `KeysError` for one of another version."""
        if len(data) > MAX_FILE_BYTES:
            raise Damaged(f"is larger than {MAX_FILE_BYTES} bytes")
        try:
            found = msgspec.json.decode(data, type=_File)
            if found.checksum not in (None, found.sum()):
                raise Damaged("its checksum differs (if you edited it, delete `checksum` in it)")
            if found.version != _VERSION:
                raise KeysError(f"{self.path}: is of version {found.version}, not {_VERSION}")
            keys = msgspec.json.decode(found.keys, type=tuple[Key, ...])
            if found.organizations is msgspec.UNSET:
                return Contents(keys)
            kind = tuple[Organization, ...]
            return Contents(keys, msgspec.json.decode(found.organizations, type=kind))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Damaged(f"is no file of keys: {error}") from error

    def add(self, key: Key) -> None:
        """Raises `KeyExists`, `KeyFieldError` for an organization that there is not, or `KeysError`
        if there are too many or the file cannot be written."""
        with self._locked():
            found = self.contents()
            if any(other.name == key.name for other in found.keys):
                raise KeyExists(key.name)
            _check_organization(key.organization, found)
            self._write(found._replace(keys=(*found.keys, key)))

    def remove(self, name: str) -> Key:
        """The key that was removed. Raises `KeyNotFound`, or `KeysError` if the file cannot be
        written."""
        with self._locked():
            found = self.contents()
            key = _named(name, found.keys)
            left = tuple(other for other in found.keys if other is not key)
            self._write(found._replace(keys=left))
            return key

    def assign(self, name: str, organization: str | None) -> Key:
        """The key of this name, which belongs to the organization from now on, or to none. Raises
        as `add` does, and `KeyNotFound`."""
        with self._locked():
            found = self.contents()
            key = _named(name, found.keys)
            _check_organization(organization, found)
            changed = msgspec.structs.replace(key, organization=organization)
            keys = tuple(changed if other is key else other for other in found.keys)
            self._write(found._replace(keys=keys))
            return changed

    def set_organization(self, organization: Organization) -> None:
        """Add an organization, or give the one of this name its limits. Raises `KeysError`."""
        with self._locked():
            found = self.contents()
            by_name = {each.name: each for each in found.organizations}
            by_name[organization.name] = organization
            self._write(found._replace(organizations=tuple(by_name.values())))

    def remove_organization(self, name: str) -> None:
        """Raises `OrganizationNotFound`, `OrganizationInUse`, or `KeysError` if the file cannot be
        written."""
        with self._locked():
            found = self.contents()
            left = tuple(each for each in found.organizations if each.name != name)
            if len(left) == len(found.organizations):
                raise OrganizationNotFound(name)
            if its := [key.name for key in found.keys if key.organization == name]:
                raise OrganizationInUse(name, its)
            self._write(found._replace(organizations=left))

    def _check(self, contents: Contents) -> None:
        known = {each.name for each in contents.organizations}
        if max(len(contents.keys), len(contents.organizations)) > MAX_KEYS:
            raise KeysError(f"{self.path}: more than {MAX_KEYS} keys or organizations")
        if len(known) < len(contents.organizations):
            raise KeysError(f"{self.path}: has an organization more than once")
        names: set[str] = set()
        for key in contents.keys:
            if key.name in names:
                raise KeysError(f"{self.path}: has more than one key {key.name!r}")
            if key.organization is not None and key.organization not in known:
                raise KeysError(
                    f"{self.path}: the organization {key.organization!r} of the key {key.name!r} "
                    "is not among its organizations"
                )
            names.add(key.name)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Others who change the file wait for some seconds. This one is replaced, so the lock is on
        another. Raises `KeysReadOnly` for one that is never changed here."""
        if self.read_only:
            raise KeysReadOnly(self.path)
        lock = self.path.with_name(f"{self.path.name}.lock")
        try:
            descriptor = _open_lock(lock)
        except OSError as error:
            raise KeysError(f"{lock}: cannot be written: {error.strerror}") from error
        try:
            self._take(descriptor)
            yield
        finally:
            os.close(descriptor)

    def _take(self, lock: int) -> None:
        """Raises `KeysError` if another process holds it for too long."""
        for left in reversed(range(LOCK_TRIES)):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if not left:
                    raise KeysError(f"{self.path} is locked; try again later") from error
                time.sleep(_LOCK_PAUSE_SECONDS)
            else:
                return

    def _write(self, contents: Contents) -> None:
        self._check(contents)
        file = _File(keys=msgspec.Raw(msgspec.json.encode(contents.keys)))
        if contents.organizations:
            file.organizations = msgspec.Raw(msgspec.json.encode(contents.organizations))
        file.checksum = file.sum()
        data = msgspec.json.format(msgspec.json.encode(file), indent=2)
        if len(data) > MAX_FILE_BYTES:  # it could not be read back
            raise KeysError(
                f"{self.path}: would be larger than {MAX_FILE_BYTES} bytes: "
                "name fewer models, or revoke keys that are not needed"
            )
        owned = self.path if self.path.exists() else self.path.parent
        try:
            write_checked(self.path, data, lambda descriptor: _hand_over(descriptor, owned))
        except OSError as error:
            raise KeysError(f"{self.path}: cannot be written: {error.strerror}") from error


def _open_lock(lock: Path) -> int:
    flags = os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(lock, flags, _MODE)
    try:
        found = os.fstat(descriptor)
        # Also one that root left before. A file of another name may belong to any user.
        if stat.S_ISREG(found.st_mode) and found.st_uid == _ROOT and found.st_nlink == 1:
            _hand_over(descriptor, lock.parent)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _hand_over(made: int, owned: Path) -> None:
    """If root made a file, give it to the owner of another: the daemon may run as another user, and
    has to read keys and to change them."""
    if os.geteuid() == _ROOT:
        owner = owned.stat()
        os.fchown(made, owner.st_uid, owner.st_gid)


_Of = TypeVar("_Of", Key, Organization)


class KeyRing:
    """The keys that a running appliance accepts. What the file says holds from the next request on;
    one that cannot be read changes nothing, one that is gone takes all keys with it."""

    def __init__(
        self, path: Path, *, read_only: bool = False, share: Fraction = WHOLE_LIMITS
    ) -> None:
        """Of all limits in the file, keys have a `share` here. Raises `KeysError` if there is a
        file that cannot be read, and has no copy."""
        self.file = KeyFile(path, read_only=read_only)
        self._share = share
        self._seen = self._look()
        self._refused: object = None
        """What the file was when it could not be read, so that it is said once."""
        self._hold(self.file.contents_or_copy())
        self._listeners: list[Callable[[Mapping[str, Key]], None]] = []

    def _hold(self, contents: Contents) -> None:
        self._contents = contents
        self._keys = {key.sha256: _shared(key, self._share) for key in contents.keys}
        self._organizations = {
            each.name: _shared(each, self._share) for each in contents.organizations
        }

    def on_change(self, listener: Callable[[Mapping[str, Key]], None]) -> None:
        """Have `listener` called with all keys by their hashes when they have changed."""
        self._listeners.append(listener)

    def all(self) -> tuple[Key, ...]:
        """The keys in the order of the file, also expired ones, with the limits that it says."""
        self._refresh()
        return self._contents.keys

    def organizations(self) -> tuple[Organization, ...]:
        """The organizations in the order of the file, with the limits that it says."""
        self._refresh()
        return self._contents.organizations

    @property
    def held_organizations(self) -> Mapping[str, Organization]:
        """By name, of the same reading of the file as the key that was found last."""
        return self._organizations

    def find(self, secret: str, now: float) -> Key | None:
        """The key that `secret` is, if it is one and the Unix time `now` is before its end."""
        self._refresh()
        if len(secret) > _MAX_SECRET_CHARACTERS:
            return None
        presented = digest(secret)
        key = self._keys.get(presented)
        if key is None or not hmac.compare_digest(presented, key.sha256) or key.expired(now):
            return None
        return key

    def known(self, sha256: str, now: float) -> Key | None:
        """The key of this hash, if there is one and the Unix time `now` is before its end. No
        client has proved that it has the key."""
        self._refresh()
        key = self._keys.get(sha256)
        return None if key is None or key.expired(now) else key

    def _refresh(self) -> None:
        seen = self._look()
        if seen == self._seen:
            return
        try:
            self._hold(self.file.contents())
        except KeysError as error:  # looked at again with the next request: it may be mended
            if seen != self._refused:
                log.error("the keys were not reloaded: %s", error)
            self._refused = seen
            return
        self._seen = seen
        log.info("%d keys are known", len(self._keys))
        for listener in self._listeners:
            listener(self._keys)

    def _look(self) -> tuple[int, ...] | None:
        try:
            found = self.file.path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size


def _shared(of: _Of, share: Fraction) -> _Of:
    """The same with a share of each limit, and 1 at least: none is a limit of nothing."""
    if share == WHOLE_LIMITS:
        return of
    limits = {name: getattr(of, name) for name in LIMIT_NAMES}
    changed = {name: max(1, int(n * share)) for name, n in limits.items() if n is not None}
    return msgspec.structs.replace(of, **changed)


def _named(name: str, keys: Sequence[Key]) -> Key:
    """Raises `KeyNotFound`."""
    for key in keys:
        if key.name == name:
            return key
    raise KeyNotFound(name)


def _check_organization(name: str | None, contents: Contents) -> None:
    """Raises `KeyFieldError` for an organization that there is not."""
    known = [each.name for each in contents.organizations]
    if name is not None and name not in known:
        raise unknown_organization(name, known)
