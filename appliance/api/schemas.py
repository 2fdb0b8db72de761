"""What clients may ask: the request bodies of OpenAI's dialect, decoded strictly.

Every field that is not declared here is refused by name. A field declared as ``None`` is known
and not supported: only null is accepted for it.
"""

from __future__ import annotations

import contextlib
import re
from typing import Annotated, Any, Literal, NoReturn, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from appliance.api.errors import BadRequest, Unsupported

MAX_CHOICES = 16
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_PROMPTS = 128
MAX_TOOLS = 128

_Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)]
_Count: TypeAlias = Annotated[int, Meta(ge=1, le=2**31)]
_Stop: TypeAlias = Annotated[str, Meta(min_length=1)]
_TokenId: TypeAlias = Annotated[int, Meta(ge=0)]
ToolName: TypeAlias = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
# Room above for the seeds of further choices, which are counted up from this one.
_Seed: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1 - MAX_CHOICES)]


class Strict(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What refuses fields that it does not know."""


class StreamOptions(Strict, kw_only=True):
    """What else a stream shall hold."""

    include_usage: bool | None = None


class TextPart(Strict, kw_only=True):
    """A part of a message; the only kind there is here."""

    type: Literal["text"]
    text: str


class TextFormat(Strict, kw_only=True, tag_field="type", tag="text"):
    """A response format that asks for nothing."""


class JsonObjectFormat(Strict, kw_only=True, tag_field="type", tag="json_object"):
    """The answer is a JSON object."""


class JsonSchema(Strict, kw_only=True, omit_defaults=True):
    """What a JSON answer has to be. It always is exactly that, so `strict` changes nothing."""

    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(Strict, kw_only=True, tag_field="type", tag="json_schema"):
    """The answer is JSON that the schema allows."""

    json_schema: JsonSchema


ResponseFormat: TypeAlias = TextFormat | JsonObjectFormat | JsonSchemaFormat


class StructuredOutputs(Strict, kw_only=True, omit_defaults=True):
    """vLLM's field: what the answer has to follow, in exactly one way."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None


class Function(Strict, kw_only=True, omit_defaults=True):
    """What a tool does. `parameters` is a JSON schema."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict, kw_only=True):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class NamedFunction(Strict, kw_only=True):
    """Which function."""

    name: ToolName


class NamedTool(Strict, kw_only=True):
    """The tool that the model has to call."""

    type: Literal["function"]
    function: NamedFunction


class CalledFunction(Strict, kw_only=True):
    """What a model called. `arguments` is what it wrote: JSON, as a rule."""

    name: str
    arguments: str


class ToolCall(Strict, kw_only=True):
    """A call that the model made earlier in the conversation."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    def plain(self) -> dict[str, Any]:
        """The call as chat templates know it: with the arguments' values, if they are JSON."""
        arguments: object = self.function.arguments
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            arguments = msgspec.json.decode(self.function.arguments or "{}")
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": self.type, "function": function}


class Message(Strict, kw_only=True):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    """Of a tool, as older clients send it beside `tool_call_id`."""
    reasoning: str | None = None
    """What the assistant thought before it said this; `reasoning_content` is its old name."""
    reasoning_content: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[None], Meta(max_length=0)] | None = None

    @property
    def characters(self) -> int:
        """How long it is, about."""
        parts = [self.content] if isinstance(self.content, str) else self.content or ()
        texts = (part if isinstance(part, str) else part.text for part in parts)
        calls = (call.function.arguments for call in self.tool_calls or ())
        return sum(map(len, texts)) + sum(map(len, calls)) + len(self.thought or "")

    @property
    def thought(self) -> str | None:
        """Its reasoning, under either name."""
        return self.reasoning_content if self.reasoning is None else self.reasoning

    def plain(self) -> dict[str, Any]:
        """The message as chat templates know it."""
        text = (
            "\n".join(part.text for part in self.content)
            if isinstance(self.content, list)
            else self.content or ""
        )
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": text}
        if self.tool_calls:
            message["tool_calls"] = [call.plain() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.thought is not None:  # as vLLM tells it: templates know one or the other name
            message["reasoning"] = message["reasoning_content"] = self.thought
        return message


class Common(Strict, kw_only=True):
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
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
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
    modalities: list[Literal["text"]] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template, such as ``enable_thinking``; others change nothing."""
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


class TokenizeRequest(Strict, kw_only=True):
    """``POST /tokenize``: of a prompt or of a chat."""

    model: str
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Strict, kw_only=True):
    """``POST /detokenize``."""

    model: str
    tokens: list[_TokenId]


AnyRequest = TypeVar("AnyRequest", ChatRequest, CompletionRequest)
AnyBody = TypeVar("AnyBody")

_TEMPLATE_TOLD = {"messages", "tools", "documents", "add_generation_prompt"}
_PLACE = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`$")
_PART = re.compile(r"\.content\[\d*\]\.type$")
_NAMED = re.compile(r"^Object (?P<what>contains unknown|missing required) field `(?P<name>[^`]*)`")


def decode(body: bytes, schema: type[AnyRequest]) -> AnyRequest:
    """The request in `body`. Raises `BadRequest` naming the field at fault."""
    request = parse(body, schema)
    _check(request)
    return request


def decode_tokenize(body: bytes) -> TokenizeRequest:
    """The request in `body`. Raises `BadRequest` naming the field at fault."""
    request = parse(body, TokenizeRequest)
    if (request.prompt is None) == (request.messages is None):
        raise BadRequest("prompt: needed if there are no messages, and only then", "prompt")
    if request.prompt is None:
        given, others = "messages", ["add_special_tokens"]
    else:
        given, others = "prompt", ["tools", "add_generation_prompt", "chat_template_kwargs"]
    for field in others:
        if getattr(request, field) is not None:
            raise BadRequest(f"{field}: not supported together with {given}", field)
    for i, message in enumerate(request.messages or ()):
        _check_message(f"messages[{i}]", message)
    check_variables(request.chat_template_kwargs)
    return request


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
    if _PART.search(path) and "enum" in reason:
        raise BadRequest(f"{path}: models here read text only ({reason})", path)
    raise BadRequest(f"{path or 'body'}: {reason}", path or None)


def _check(request: ChatRequest | CompletionRequest) -> None:
    """What types alone cannot say."""
    if request.stream_options is not None and not request.stream:
        raise BadRequest("stream_options: only allowed with stream", "stream_options")
    if isinstance(request, CompletionRequest):
        if request.echo:
            raise Unsupported("echo")
        if request.best_of not in (None, request.n or 1):
            raise BadRequest("best_of: only supported equal to n", "best_of")
        return
    for i, message in enumerate(request.messages):
        _check_message(f"messages[{i}]", message)
    if request.store:
        raise Unsupported("store")
    if request.top_logprobs is not None and not request.logprobs:
        raise BadRequest("top_logprobs: only allowed with logprobs", "top_logprobs")
    check_variables(request.chat_template_kwargs)
    limits = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise BadRequest("max_tokens: contradicts max_completion_tokens", "max_tokens")


def _check_message(place: str, message: Message) -> None:
    if message.tool_calls and message.role != "assistant":
        field = f"{place}.tool_calls"
        raise BadRequest(f"{field}: only the assistant calls tools", field)
    if (message.tool_call_id is not None) != (message.role == "tool"):
        field = f"{place}.tool_call_id"
        raise BadRequest(f"{field}: needed for a tool's message, and for no other", field)
    if message.name is not None and message.role != "tool":
        raise Unsupported(f"{place}.name")
    if message.thought is not None and message.role != "assistant":
        field = f"{place}.{'reasoning_content' if message.reasoning is None else 'reasoning'}"
        raise BadRequest(f"{field}: only the assistant reasons", field)
    if message.content is None and not message.tool_calls and not message.thought:
        field = f"{place}.content"
        raise BadRequest(f"{field}: a value is required", field)


def check_variables(variables: dict[str, Any] | None) -> None:
    """Raises `BadRequest` for variables that a chat template is told anyway."""
    for name in _TEMPLATE_TOLD & (variables or {}).keys():
        field = f"chat_template_kwargs.{name}"
        raise BadRequest(f"{field}: the template is told this by other fields", field)
