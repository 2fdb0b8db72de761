"""What clients may ask: the request bodies of OpenAI's dialect, decoded strictly.

Every field that is not declared here is refused by name. A field declared as ``None`` is known
and not supported: only null is accepted for it.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, NoReturn, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from appliance.api.errors import BadRequest

MAX_CHOICES = 16
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_PROMPTS = 128

_Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)]
_Count: TypeAlias = Annotated[int, Meta(ge=1, le=2**31)]
_Stop: TypeAlias = Annotated[str, Meta(min_length=1)]
_TokenId: TypeAlias = Annotated[int, Meta(ge=0)]
# Room above for the seeds of further choices, which are counted up from this one.
_Seed: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1 - MAX_CHOICES)]


class _Strict(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    pass


class StreamOptions(_Strict, kw_only=True):
    """What else a stream shall hold."""

    include_usage: bool | None = None


class TextPart(_Strict, kw_only=True):
    """A part of a message; the only kind there is here."""

    type: Literal["text"]
    text: str


class TextFormat(_Strict, kw_only=True):
    """A response format that asks for nothing."""

    type: Literal["text"]


class Message(_Strict, kw_only=True):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: None = None
    refusal: None = None
    audio: None = None
    tool_calls: None = None
    function_call: None = None
    annotations: Annotated[list[None], Meta(max_length=0)] | None = None

    def plain(self) -> dict[str, str]:
        """The message as chat templates know it."""
        text = (
            self.content
            if isinstance(self.content, str)
            else "\n".join(part.text for part in self.content)
        )
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class Common(_Strict, kw_only=True):
    """Fields that chats and plain completions share."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stop: _Stop | Annotated[list[_Stop], Meta(max_length=MAX_STOPS)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: _Seed | None = None
    max_tokens: _Count | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    logit_bias: dict[_TokenId, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[_TokenId] | None = None
    return_token_ids: bool | None = None
    service_tier: Literal["auto", "default", "flex"] | None = None
    """``flex`` is batch work: slower, and behind what somebody waits for."""
    # Labels for the caller's own use: they change nothing about the answer.
    user: str | None = None
    metadata: dict[str, str] | None = None


class ChatRequest(Common, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: _Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    store: bool | None = None
    response_format: TextFormat | None = None
    modalities: list[Literal["text"]] | None = None
    tools: list[msgspec.Raw] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    functions: None = None
    function_call: None = None
    audio: None = None
    prediction: None = None
    reasoning_effort: None = None
    verbosity: None = None
    web_search_options: None = None


class CompletionRequest(Common, kw_only=True):
    """``POST /v1/completions``."""

    prompt: str | Annotated[list[str | int | list[_TokenId]], Meta(min_length=1)]
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: None = None


AnyRequest = TypeVar("AnyRequest", ChatRequest, CompletionRequest)
AnyBody = TypeVar("AnyBody")

_PLACE = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`$")
_NAMED = re.compile(r"^Object (?P<what>contains unknown|missing required) field `(?P<name>[^`]*)`")


def decode(body: bytes, schema: type[AnyRequest]) -> AnyRequest:
    """The request in `body`. Raises `BadRequest` naming the field at fault."""
    request = parse(body, schema)
    _check(request)
    return request


def parse(body: bytes, schema: type[AnyBody]) -> AnyBody:
    """What `body` says, by its types alone. Raises `BadRequest` naming the field at fault."""
    try:
        return msgspec.json.decode(body, type=schema)
    except msgspec.ValidationError as error:
        _refuse(str(error))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is not valid JSON: {error}", code="invalid_json") from error


def _refuse(message: str) -> NoReturn:
    """Say msgspec's `message` with the field's name in front."""
    place = _PLACE.search(message)
    path = place["path"].removesuffix("[...]") if place else ""
    reason = message[: place.start()] if place else message
    if named := _NAMED.match(reason):
        path = f"{path}.{named['name']}" if path else named["name"]
        if named["what"] == "missing required":
            raise BadRequest(f"{path}: a value is required", path, "missing_field")
        raise _unsupported(path)
    if reason.startswith("Expected `null`"):
        raise _unsupported(path)
    raise BadRequest(f"{path or 'body'}: {reason}", path or None)


def _unsupported(field: str) -> BadRequest:
    return BadRequest(f"{field}: this field is not supported", field, "unsupported_field")


def _check(request: ChatRequest | CompletionRequest) -> None:
    """What types alone cannot say."""
    if request.stream_options is not None and not request.stream:
        raise BadRequest("stream_options: only allowed with stream", "stream_options")
    if isinstance(request, CompletionRequest):
        if request.echo:
            raise _unsupported("echo")
        if request.best_of not in (None, request.n or 1):
            raise BadRequest("best_of: only supported equal to n", "best_of")
        return
    if request.tools:
        raise _unsupported("tools")
    if request.store:
        raise _unsupported("store")
    if request.top_logprobs is not None and not request.logprobs:
        raise BadRequest("top_logprobs: only allowed with logprobs", "top_logprobs")
    limits = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise BadRequest("max_tokens: contradicts max_completion_tokens", "max_tokens")
