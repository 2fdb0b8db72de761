"""A body for a model of this box, as the server that computes the model is to have it.

What would reach further than to that model is refused: stored responses and hosted tools of the
operator's account there, URLs that the server would fetch, and what says how it schedules.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from appliance.http.errors import BadRequest, Unsupported
from appliance.service.front_frames import FrontModel
from appliance.vocabulary import RequestClass

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
EMBEDDINGS: Final = "/v1/embeddings"
RESPONSES: Final = "/v1/responses"
PATHS: Final = (CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES)

MOST_CHOICES: Final = 1024
BYTES_OF_TOKEN: Final = 4
_DATA_URL: Final = re.compile(rb'"data:[^"]*"')
_REFUSED: Final = frozenset(
    {
        *("priority", "kv_transfer_params", "ec_transfer_params", "data_parallel_rank"),
        *("web_search_options", "previous_response_id", "conversation", "prompt_id"),
    }
)
_GUIDES: Final = (
    *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("grammar", "json_schema"),
)
_TOOLS: Final = frozenset({"function", "custom"})
"""Those that the client runs itself."""

T = TypeVar("T")


class Outgoing(NamedTuple):
    """What is sent, and what the core has to know of it."""

    body: bytes
    streams: bool
    wants_usage: bool
    prompt_tokens: int
    max_tokens: int
    choices: int
    guided: bool
    request_class: RequestClass


def outgoing(path: str, fields: Mapping[str, Any], model: FrontModel) -> Outgoing:
    """`fields` are those of the body, not decoded but for `model`. Raises `ApiError`."""
    sent = {name: raw for name, raw in fields.items() if name != "model"}
    for name in _REFUSED & sent.keys():
        if _value(sent, name, object) is not None:
            raise Unsupported(name)
    _check_urls(sent)
    tier = _value(sent, "service_tier", object)
    sent.pop("service_tier", None)  # which costs at other servers: keys decide about classes here
    sent.pop("store", None)
    if path == RESPONSES:
        _check_response(sent)
        sent["store"] = msgspec.Raw(b"false")
    streams = path != EMBEDDINGS and bool(_value(sent, "stream", bool))
    wants_usage = False
    if streams and path != RESPONSES:
        options = _value(sent, "stream_options", dict[str, Any]) or {}
        wants_usage = bool(options.get("include_usage"))
        sent["stream_options"] = msgspec.Raw(msgspec.json.encode(options | {"include_usage": True}))
    body = msgspec.json.encode({"model": model.remote} | sent)
    prompt_tokens = min(_prompt_tokens(body), model.max_context)
    return Outgoing(
        body=body,
        streams=streams,
        wants_usage=wants_usage,
        prompt_tokens=prompt_tokens,
        max_tokens=_max_tokens(path, sent, model.max_context - prompt_tokens),
        choices=_choices(path, sent),
        guided=_guided(sent),
        request_class=RequestClass.BATCH if tier == "flex" else RequestClass.INTERACTIVE,
    )


def _prompt_tokens(body: bytes) -> int:
    """About as many as a body has; images in it are not counted."""
    return max(1, len(_DATA_URL.sub(b"", body)) // BYTES_OF_TOKEN)


def _max_tokens(path: str, sent: Mapping[str, Any], rest: int) -> int:
    """Of each answer at most: what is asked for, or the `rest` of the context."""
    if path == EMBEDDINGS:
        return 0
    for name in ("max_completion_tokens", "max_tokens", "max_output_tokens"):
        if (asked := _value(sent, name, int)) is not None:
            if asked < 0:
                raise BadRequest(f"{name}: has to be 1 or more", name)
            return min(asked, max(rest, 1))
    return max(rest, 1)


def _choices(path: str, sent: Mapping[str, Any]) -> int:
    """How many answers are asked for."""
    if path not in (CHAT, COMPLETIONS):
        return 1
    choices = 1
    for name in ("n", "best_of"):
        asked = _value(sent, name, int)
        if asked is not None and not 1 <= asked <= MOST_CHOICES:
            raise BadRequest(f"{name}: has to be from 1 to {MOST_CHOICES}", name)
        choices = max(choices, asked or 1)
    prompt = _value(sent, "prompt", object)
    if (
        path == COMPLETIONS
        and isinstance(prompt, list)
        and not isinstance(next(iter(prompt), 0), int)
    ):
        choices *= len(prompt)
    return choices


def _guided(sent: Mapping[str, Any]) -> bool:
    """Whether an answer is to follow a guide."""
    form = _value(sent, "response_format", object)
    text = _value(sent, "text", object)
    choice = _value(sent, "tool_choice", object)
    tools = _value(sent, "tools", object)
    return (
        _is_format(form)
        or (isinstance(text, dict) and _is_format(text.get("format")))
        or any(_value(sent, name, object) is not None for name in _GUIDES)
        or choice not in (None, "none", "auto")
        or _value(sent, "parallel_tool_calls", object) is False
        or (isinstance(tools, list) and any(map(_is_strict, tools)))
    )


def _is_format(form: object) -> bool:
    return form is not None and not (isinstance(form, dict) and form.get("type") == "text")


def _is_strict(tool: object) -> bool:
    if not isinstance(tool, dict):
        return False
    inner = tool.get("function")
    return bool(tool.get("strict") or (isinstance(inner, dict) and inner.get("strict")))


def _check_response(sent: dict[str, Any]) -> None:
    """Raise `ApiError` for what goes on from what the server has stored, or uses its own tools."""
    if _value(sent, "background", object):
        raise Unsupported("background")
    if _value(sent, "prompt", object) is not None:
        raise Unsupported("prompt")
    tools = _value(sent, "tools", object)
    for tool in tools if isinstance(tools, list) else ():
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind not in _TOOLS:
            raise BadRequest(
                f"tools: with a model of another server only tools of type "
                f"{' and '.join(sorted(_TOOLS))} are passed on",
                "tools",
                "unsupported_field",
            )
    given = _value(sent, "input", object)
    for item in given if isinstance(given, list) else ():
        if isinstance(item, dict) and item.get("type") == "item_reference":
            raise BadRequest(
                "input: nothing is stored of models of other servers; send the items themselves",
                "input",
                "unsupported_field",
            )


def _check_urls(sent: Mapping[str, Any]) -> None:
    """Raise `BadRequest` for a file that the other server would fetch, or has of its own."""
    for field in ("messages", "input"):
        for key, value in _pairs(_value(sent, field, object)):
            if key in ("file_id", "file_ids"):
                raise BadRequest(
                    f"{field}: files of another server are not asked for; send their data", field
                )
            url = value.get("url") if isinstance(value, dict) else value
            if key.endswith("_url") and isinstance(url, str) and not url.startswith("data:"):
                raise BadRequest(
                    f"{field}: nothing is fetched for a model of another server; send it as a data "
                    "URL with base64",
                    field,
                )


def _pairs(value: object) -> Iterator[tuple[str, Any]]:
    """All pairs of all objects within a value."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            yield from one.items()
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one


def _value(fields: Mapping[str, Any], name: str, kind: type[T]) -> T | None:
    """A field; None if it is not there, or null. Raises `BadRequest` for another type."""
    if (raw := fields.get(name)) is None:
        return None
    try:
        return msgspec.json.decode(raw, type=kind | None)
    except msgspec.ValidationError as error:
        raise BadRequest(f"{name}: {error}", name) from error
    except RecursionError as error:
        raise BadRequest("the body is nested too deeply", code="invalid_json") from error
