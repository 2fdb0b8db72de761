"""JSON bodies of requests, decoded strictly: an error names the field."""

from __future__ import annotations

import re
from typing import Final, NoReturn, TypeVar

import msgspec

from appliance.http.errors import BadRequest, Unsupported

AnyBody = TypeVar("AnyBody")

_PLACE: Final = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`$")
_NAMED: Final = re.compile(
    r"^Object (?P<what>contains unknown|missing required) field `(?P<name>[^`]*)`"
)


def parse(body: bytes | msgspec.Raw, schema: type[AnyBody], place: str = "") -> AnyBody:
    """What `body` says, by its types alone; it may be part of another one, at `place`. Raises
    `BadRequest` naming the field at fault."""
    try:
        return msgspec.json.decode(body, type=schema)
    except msgspec.ValidationError as error:
        _refuse(str(error), place)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is not valid JSON: {error}", code="invalid_json") from error
    except RecursionError as error:
        raise BadRequest("the body is nested too deeply", code="invalid_json") from error


def _refuse(message: str, within: str) -> NoReturn:
    """Say msgspec's `message` with the field's name in front."""
    place = _PLACE.search(message)
    path = place["path"].removesuffix("[...]") if place else ""
    path = ".".join(part for part in (within, path) if part)
    reason = message[: place.start()] if place else message
    if named := _NAMED.match(reason):
        path = f"{path}.{named['name']}" if path else named["name"]
        if named["what"] == "missing required":
            raise BadRequest(f"{path}: a value is required", path, "missing_field")
        raise Unsupported(path)
    if reason.startswith("Expected `null`"):
        raise Unsupported(path)
    raise BadRequest(f"{path or 'body'}: {reason}", path or None)
