"""What clients may ask in Ollama's dialect, decoded strictly, and the same in OpenAI's words.

Fields that are not declared are refused by name. Of `options`, those that Ollama does not know are
ignored, as it does, and so are those about how it loads a model; those that it would obey and we
cannot are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from appliance.api.errors import BadRequest, Unsupported
from appliance.api.schemas import (
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_STOPS,
    MAX_TOOLS,
    ChatRequest,
    CompletionRequest,
    Function,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    ResponseFormat,
    Tool,
)
from appliance.api.schemas import CalledFunction as ChatFunction
from appliance.api.schemas import Message as ChatMessage
from appliance.api.schemas import ToolCall as ChatCall
from appliance.api.service import ModelCard
from appliance.api.tools import thinking

_Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)]
_Stop: TypeAlias = Annotated[str, Meta(min_length=1)]
_Number: TypeAlias = Annotated[int, Meta(ge=-(2**31), le=2**31)]

_TEMPERATURE: Final = 0.8
_TOP_K: Final = 40
_TOP_P: Final = 0.9
"""What Ollama takes when the client says nothing."""

_DURATION: Final = re.compile(r"[-+]?(0|((\d+\.?\d*|\.\d+)(ns|us|µs|μs|ms|s|m|h))+)", re.ASCII)
"""A duration as Go reads it: ``5m``, ``1h30m``, ``-1s``."""

_UNSUPPORTED: Final = (
    *("images", "suffix", "template", "context"),
    *("truncate", "shift"),
)
"""Fields of Ollama's that are refused by name, unless they ask for nothing."""

FIELDS: Final = dict.fromkeys(("response_format", "response_format.json_schema.schema"), "format")
"""Ollama's names of fields, by OpenAI's."""


class Options(msgspec.Struct, kw_only=True):
    """How tokens are drawn, in Ollama's names. Whatever else a client sends is ignored."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_k: _Number | None = None
    """Not positive: no such limit."""
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1 - MAX_CHOICES)] | None = None
    """Negative: drawn at random."""
    num_predict: _Number | None = None
    """Negative: until the context is full."""
    num_ctx: Annotated[int, Meta(ge=1, le=2**31)] | None = None
    stop: Annotated[list[_Stop], Meta(max_length=MAX_STOPS)] | None = None
    repeat_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repeat_last_n: _Number | None = None
    typical_p: float | None = None

    def fields(self, context_tokens: int) -> dict[str, Any]:
        """The same in the names of `appliance.api.schemas.Common`, with Ollama's defaults.

        Raises `BadRequest` for what cannot be had from a model of this context.
        """
        if self.num_predict == 0:
            raise BadRequest("options.num_predict: at least one token is made", "options")
        if self.num_ctx is not None and self.num_ctx > context_tokens:
            raise BadRequest(
                f"options.num_ctx: the model's context is {context_tokens} tokens", "options"
            )
        if self.typical_p not in (None, 1):
            raise Unsupported("options.typical_p")
        penalties = (self.presence_penalty, self.frequency_penalty)
        penalized = self.repeat_penalty not in (None, 1) or any(penalties)
        if penalized and self.repeat_last_n not in (None, -1):
            raise Unsupported("options.repeat_last_n")
        return {
            "temperature": _TEMPERATURE if self.temperature is None else self.temperature,
            "top_k": max(0, _TOP_K if self.top_k is None else self.top_k),
            "top_p": _TOP_P if self.top_p is None else self.top_p,
            "min_p": self.min_p,
            "seed": None if self.seed is None or self.seed < 0 else self.seed,
            "max_tokens": None if (self.num_predict or -1) < 0 else self.num_predict,
            "stop": self.stop,
            "repetition_penalty": self.repeat_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
        }


class _Request(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields that both endpoints share. What is declared as Any is for `check` to refuse."""

    model: str
    stream: bool | None = None
    """Unless it is false, the answer is streamed."""
    options: Options | None = None
    keep_alive: str | float | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    format: str | dict[str, Any] | None = None
    """``json``, or a schema."""
    think: Any = None
    truncate: bool | None = None
    shift: bool | None = None

    @property
    def unloads(self) -> bool:
        """Whether the model shall not stay loaded."""
        if isinstance(self.keep_alive, str):
            return not any(digit in self.keep_alive for digit in "123456789")
        return self.keep_alive == 0

    def check(self) -> None:
        """Refuse what is not supported by name, and what is no duration. Raises `BadRequest`."""
        if not isinstance(self.think, bool | None):  # levels of thinking
            raise Unsupported("think")
        for field in _UNSUPPORTED:
            if getattr(self, field, None) not in (None, "", [], False):
                raise Unsupported(field)
        check_keep_alive(self.keep_alive)

    def _common(self, card: ModelCard) -> dict[str, Any]:
        options = (self.options or Options()).fields(card.max_context_tokens)
        return {
            "model": card.id,
            "stream": self.stream is not False,
            "response_format": self._response_format(),
            **options,
        }

    def _template_variables(self) -> dict[str, Any] | None:
        return None if self.think is None else thinking(self.think)

    def _response_format(self) -> ResponseFormat | None:
        match self.format:
            case None | "":
                return None
            case "json":
                return JsonObjectFormat()
            case str():
                raise BadRequest(
                    f'format: {self.format!r} is neither "json" nor a schema', "format"
                )
            case schema:
                return JsonSchemaFormat(json_schema=JsonSchema(name="format", schema=schema))


def check_keep_alive(keep_alive: str | float | None) -> None:
    """Raise `BadRequest` for what is no duration."""
    if isinstance(keep_alive, str) and not _DURATION.fullmatch(keep_alive):
        raise BadRequest(f'keep_alive: {keep_alive!r} is no duration, such as "5m"', "keep_alive")


class _Strict(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    pass


class CalledFunction(_Strict, kw_only=True):
    """What a model called."""

    name: str
    arguments: dict[str, Any]
    index: int | None = None
    description: str | None = None


class ToolCall(_Strict, kw_only=True):
    """A call that the model made earlier in the conversation."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] | None = None


class OllamaMessage(_Strict, kw_only=True):
    """One message of a chat."""

    role: str
    content: str = ""
    images: Annotated[list[None], Meta(max_length=0)] | None = None
    thinking: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaTool(_Strict, kw_only=True):
    """A tool that the model may call."""

    function: Function
    type: Literal["function"] | None = None


class OllamaChat(_Request, kw_only=True):
    """``POST /api/chat``."""

    messages: list[OllamaMessage] = []
    tools: Annotated[list[OllamaTool], Meta(max_length=MAX_TOOLS)] | None = None

    @property
    def loads(self) -> bool:
        """Whether the client only wants the model to be loaded."""
        return not self.messages

    def openai(self, card: ModelCard) -> ChatRequest:
        """The same request to a model in OpenAI's words. Raises `BadRequest`."""
        tools = [Tool(type="function", function=tool.function) for tool in self.tools or ()]
        return ChatRequest(
            messages=_messages(self.messages),
            tools=tools or None,
            chat_template_kwargs=self._template_variables(),
            logprobs=self.logprobs,
            top_logprobs=self.top_logprobs,
            **self._common(card),
        )


class OllamaGenerate(_Request, kw_only=True):
    """``POST /api/generate``."""

    prompt: str = ""
    system: str | None = None
    raw: bool | None = None
    suffix: Any = None
    template: Any = None
    context: Any = None
    images: Any = None

    @property
    def loads(self) -> bool:
        """Whether the client only wants the model to be loaded."""
        return not self.prompt

    def check(self) -> None:
        super().check()
        if self.raw and self.system:
            raise BadRequest("system: not allowed with raw", "system")
        if self.raw and self.think:
            raise BadRequest("think: not allowed with raw", "think")

    def openai(self, card: ModelCard) -> ChatRequest | CompletionRequest:
        """The same request to a model in OpenAI's words: a chat of one message, or a plain
        completion of what is sent raw. Raises `BadRequest`."""
        common = self._common(card)
        if self.raw:
            logprobs = (self.top_logprobs or 0) if self.logprobs else None
            return CompletionRequest(prompt=self.prompt, logprobs=logprobs, **common)
        system = [ChatMessage(role="system", content=self.system)] if self.system else []
        return ChatRequest(
            messages=[*system, ChatMessage(role="user", content=self.prompt)],
            chat_template_kwargs=self._template_variables(),
            logprobs=self.logprobs,
            top_logprobs=self.top_logprobs,
            **common,
        )


class OllamaPull(msgspec.Struct, kw_only=True):
    """``POST /api/pull``; `name` is the old name of `model`."""

    model: str | None = None
    name: str | None = None
    stream: bool = True


class OllamaShow(msgspec.Struct, kw_only=True):
    """``POST /api/show``; `name` is the old name of `model`."""

    model: str | None = None
    name: str | None = None


def _messages(messages: Sequence[OllamaMessage]) -> list[ChatMessage]:
    """The same in a chat's words. Calls without ids get some, and results the id of the oldest call
    of their tool, or of any, that has none yet. Raises `BadRequest`."""
    translated: list[ChatMessage] = []
    waiting: list[ChatCall] = []
    for i, message in enumerate(messages):
        role = message.role.lower()
        if role not in ("system", "user", "assistant", "tool"):
            field = f"messages[{i}].role"
            raise BadRequest(f"{field}: {message.role!r} is not supported", field)
        own = {"thinking": "assistant", "tool_calls": "assistant"}
        own |= {"tool_name": "tool", "tool_call_id": "tool"}
        for field, whose in own.items():
            if getattr(message, field) and role != whose:
                raise Unsupported(f"messages[{i}].{field}")
        calls = [_call(f"call_{i}_{j}", call) for j, call in enumerate(message.tool_calls or ())]
        waiting += calls
        translated.append(
            ChatMessage(
                role=role,  # type: ignore[arg-type]
                content=message.content,
                reasoning=message.thinking or None,
                tool_calls=calls or None,
                tool_call_id=_answered(message, waiting) if role == "tool" else None,
                name=message.tool_name or None,
            )
        )
    return translated


def _call(name: str, call: ToolCall) -> ChatCall:
    """`name` is its id, unless it has one."""
    arguments = msgspec.json.encode(call.function.arguments).decode()
    function = ChatFunction(name=call.function.name, arguments=arguments)
    return ChatCall(id=call.id or name, function=function)


def _answered(result: OllamaMessage, waiting: list[ChatCall]) -> str | None:
    """The id of the call that a result belongs to, which waits no longer."""
    if result.tool_call_id:
        waiting[:] = [call for call in waiting if call.id != result.tool_call_id]
        return result.tool_call_id
    named = [call for call in waiting if call.function.name == result.tool_name]
    call = next(iter(named or waiting), None)
    if call is None:
        return None
    waiting.remove(call)
    return call.id
