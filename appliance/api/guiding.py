"""What an answer has to follow: OpenAI's `response_format` and vLLM's `structured_outputs`."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from appliance.api.errors import BadRequest
from appliance.api.schemas import Common, JsonObjectFormat, JsonSchemaFormat, StructuredOutputs
from appliance.engines.protocol import Guide, GuideKind

LONGEST_GUIDE: Final = 65_536
"""Characters; a compiler's time and memory grow with them."""


def guide_of(request: Common) -> tuple[str, Guide] | None:
    """The guide that a request asks for, and the field that does; None if it asks for none.

    Raises `BadRequest` for two of them, for one that is too long, and for sampling that
    contradicts any.
    """
    found = [
        asked
        for asked in (_of_format(request), _of_structured_outputs(request.structured_outputs))
        if asked is not None
    ]
    if not found:
        return None
    if len(found) > 1:
        raise BadRequest("structured_outputs: contradicts response_format", "structured_outputs")
    ((field, guide),) = found
    check_guide(field, guide, request)
    return field, guide


def check_guide(field: str, guide: Guide, request: Common) -> None:
    """Raises `BadRequest` for a guide that is too long, or that the sampling contradicts."""
    if len(guide.text) > LONGEST_GUIDE:
        raise BadRequest(f"{field}: more than {LONGEST_GUIDE} characters", field)
    # The guide says where the output ends.
    for other in ("min_tokens", "ignore_eos"):
        if getattr(request, other):
            raise BadRequest(f"{other}: not supported together with {field}", other)


def _of_format(request: Common) -> tuple[str, Guide] | None:
    match request.response_format:
        case JsonObjectFormat():
            return "response_format", Guide(GuideKind.JSON_OBJECT)
        case JsonSchemaFormat(json_schema=asked):
            schema = Guide(GuideKind.JSON, _json(asked.schema))
            return "response_format.json_schema.schema", schema
    return None


def _of_structured_outputs(asked: StructuredOutputs | None) -> tuple[str, Guide] | None:
    if asked is None:
        return None
    given = {
        kind: value
        for kind in GuideKind
        if (value := getattr(asked, kind.value)) is not None and value is not False
    }
    if len(given) != 1:
        raise BadRequest("structured_outputs: exactly one kind is needed", "structured_outputs")
    ((kind, value),) = given.items()
    if kind is GuideKind.JSON_OBJECT:
        text = ""
    else:
        text = value if isinstance(value, str) else _json(value)
    return f"structured_outputs.{kind.value}", Guide(kind, text)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
