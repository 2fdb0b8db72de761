"""Organizations: keys with limits that hold for all of them together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Final, Protocol

import msgspec
from msgspec import Meta

from appliance.errors import KeyFieldError, nearest

NAME_PATTERN: Final = r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}\Z"
"""Of a key, and of an organization."""
NAME_RULE: Final = "begins with a letter or a digit, and has at most 64 of them and of ._@-"

Limit = Annotated[int, Meta(ge=1, le=2**53)]
Name = Annotated[str, Meta(pattern=NAME_PATTERN)]


class Limited(Protocol):
    """What has limits; one that is None does not bind."""

    @property
    def requests_per_minute(self) -> int | None: ...
    @property
    def tokens_per_minute(self) -> int | None: ...
    @property
    def tokens_per_month(self) -> int | None: ...
    @property
    def concurrency(self) -> int | None: ...


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The limits of an organization as they are wanted; what is left out does not bind."""

    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    tokens_per_month: Limit | None = None
    concurrency: Limit | None = None


class Organization(Limits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An organization as the file of keys has it."""

    name: Name


def make_organization(name: str, limits: Limits) -> Organization:
    """An organization that is in no file yet. Raises `KeyFieldError`."""
    try:
        return msgspec.convert({"name": name, **msgspec.structs.asdict(limits)}, Organization)
    except msgspec.ValidationError as error:
        raise KeyFieldError("name", NAME_RULE) from error


def unknown_organization(name: str, known: Iterable[str]) -> KeyFieldError:
    """The error for a key of an organization that there is not."""
    names = sorted(known)
    help_ = nearest(name, names) if names else "make it first: appliance key organization set"
    return KeyFieldError("organization", f"there is no organization {name[:64]!r}; {help_}")
