"""What to write instead of a value that cannot be used, where the value shows it."""

from __future__ import annotations

import re
from typing import Any, Final

from appliance.config.schema import Model, choices, fields, may_be_auto, plain_type
from appliance.config.tables.remote import Remote
from appliance.errors import alternatives
from appliance.platform.admin_socket import AUTO
from appliance.units import Bytes, Seconds, toml

LEAST_BYTES: Final = 1024
"""Fewer bytes than this are no size that a key could have; the unit was forgotten."""
_SCALES: Final = {"k": 1 << 10, "m": 1 << 20}
_SHORT: Final = re.compile(r"(\d+)\s*([km]?)i?", re.IGNORECASE)
_BOOLEANS: Final = {"true": "true", "yes": "true", "on": "true", "1": "true"} | {
    "false": "false", "no": "false", "off": "false", "0": "false",
}  # fmt: skip


def instead_of_key(kind: type, key: str) -> str | None:
    """What does what an unknown key of this section does elsewhere; None if that is not known."""
    if kind is Model and key == "keep_alive":  # Ollama's
        return (
            "weights stay until other models need their memory; pin = true keeps them in host "
            "memory, load = true loads them at the start"
        )
    if kind is Model and key in fields(Remote):
        return 'add remote = "http://HOST:PORT" in place of path, or leave it out'
    if kind is Remote and key in fields(Model):
        return f"leave it out: a model with remote has only {', '.join(fields(Remote))}"
    return None


def wrong_and_remedy(kind: Any, value: object, error: str) -> tuple[str, str]:
    """Of a value that a field of this type cannot have; `error` is what msgspec says of it."""
    if words := _words(kind, value):
        return f"{shown(value)} is not a choice", f"use {alternatives(words)}"
    if may_be_auto(kind) and isinstance(value, str) and value.isalpha():
        number = "a whole number from 1 on" if plain_type(kind) is int else "a size"
        return f"{shown(value)} is not a choice", f"use {toml(AUTO)}, or {number}"
    remedy = _better(plain_type(kind), value)
    if remedy is None and "regex" in error and (sample := _sample(kind)):
        remedy = f"got {shown(value)}; use one such as {toml(sample)}"
    return error[:1].lower() + error[1:], remedy or f"got {shown(value)}"


def _words(kind: Any, value: object) -> tuple[str, ...]:
    """What a field may be that has a number of choices, or a number besides."""
    if (words := choices(kind)) or not isinstance(value, str):
        return words
    kinds = getattr(plain_type(kind), "__args__", ())
    named = [word for one in kinds for word in choices(one)]
    if not named:
        return ()
    return ("true", "false", *named) if bool in kinds else (*named, "a whole number from 1 on")


def _sample(kind: Any) -> object:
    """An example of the schema."""
    for meta in getattr(kind, "__metadata__", ()):
        return next(iter(meta.examples or ()), None)
    return None


def _better(kind: Any, value: object) -> str | None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int and isinstance(value, str) and (match := _SHORT.fullmatch(value.strip())):
        return f"write {int(match[1]) * _SCALES.get(match[2].lower(), 1)}"
    if kind is bool and (word := _BOOLEANS.get(str(value).strip().lower())) is not None:
        return f"write {word}"
    if isinstance(kind, type) and issubclass(kind, Seconds) and number:
        return f'write "{value}s" or "{value}ms"'
    if kind is str and number:
        return f"write {toml(str(value))}"
    if getattr(kind, "__origin__", None) is tuple and isinstance(value, str):
        return f"write [{toml(value)}]"
    return None


def unit_forgotten(value: object, read: object) -> tuple[str, str] | None:
    """What is wrong with a size that was read from a bare number, and the remedy; None if it may
    have been meant."""
    bare = isinstance(value, int) or (isinstance(value, str) and value.strip().isdigit())
    if not (isinstance(read, Bytes) and bare and read < LEAST_BYTES):
        return None
    return f"{int(read)} means bytes", f'write "{int(read)}MiB" or "{int(read)}GiB"'


def shown(value: object) -> str:
    """A value in a message, not too long."""
    text = toml(value) if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
