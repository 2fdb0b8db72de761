"""What clients may ask in Anthropic's dialect, decoded strictly, and the same in OpenAI's words.

As in `appliance.api.schemas`, a field that is not declared is refused by name, and one declared as
``None`` is known and not supported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from appliance.api.errors import BadRequest, Unsupported
from appliance.api.schemas import (
    MAX_STOPS,
    MAX_TOOLS,
    CalledFunction,
    ChatRequest,
    Function,
    JsonSchema,
    JsonSchemaFormat,
    NamedFunction,
    NamedTool,
    ToolCall,
)
from appliance.api.schemas import Message as ChatMessage
from appliance.api.schemas import Tool as ChatTool
from appliance.api.tools import thinking

_Count: TypeAlias = Annotated[int, Meta(ge=1, le=2**31)]
_Stop: TypeAlias = Annotated[str, Meta(min_length=1)]
_ToolName: TypeAlias = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]

FIELDS: Final = {
    "response_format.json_schema.schema": "output_config.format.schema",
    "tool_choice.function.name": "tool_choice.name",
}
"""Anthropic's names of fields, by OpenAI's."""


class _Strict(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    pass


class CacheControl(_Strict, kw_only=True):
    """Where a prompt may be cached. Prompts are cached by their beginnings anyway."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(_Strict, kw_only=True, tag_field="type", tag="text"):
    """A block of content: text."""

    text: str
    cache_control: CacheControl | None = None
    citations: None = None


class OnlyText(_Strict, kw_only=True):
    """The same where there is no other kind of block: a tag would not have to be there then."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: None = None


class ThinkingBlock(_Strict, kw_only=True, tag_field="type", tag="thinking"):
    """What the assistant thought. Nothing is signed here, so no signature is looked at."""

    thinking: str
    signature: str = ""


class ToolUse(_Strict, kw_only=True, tag_field="type", tag="tool_use"):
    """A call that the assistant made."""

    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: None = None
    toolset_name: None = None


class ToolResult(_Strict, kw_only=True, tag_field="type", tag="tool_result"):
    """What a call gave. Models are told no more of an error than its text says."""

    tool_use_id: str
    content: str | list[OnlyText] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    toolset_name: None = None


Block: TypeAlias = TextBlock | ThinkingBlock | ToolUse | ToolResult


class Message(_Strict, kw_only=True):
    """One turn of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Metadata(_Strict, kw_only=True):
    """Labels for the caller's own use."""

    user_id: str | None = None


class ThinkingDisabled(_Strict, kw_only=True, tag_field="type", tag="disabled"):
    """The model shall say at once what it has to say."""


class ThinkingEnabled(_Strict, kw_only=True, tag_field="type", tag="enabled"):
    """The model shall think first. What bounds it is the limit on all tokens: the budget for
    thoughts is a wish."""

    budget_tokens: Annotated[int, Meta(ge=1024, le=2**31)]
    display: Literal["summarized"] | None = None


class ThinkingAdaptive(_Strict, kw_only=True, tag_field="type", tag="adaptive"):
    """The model thinks as much as it wants."""

    display: Literal["summarized"] | None = None


class JsonFormat(_Strict, kw_only=True):
    """The answer is JSON that the schema allows."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(_Strict, kw_only=True):
    """What the answer has to be."""

    effort: None = None
    format: JsonFormat | None = None


class Tool(_Strict, kw_only=True):
    """A tool of the client's own, which the model may call."""

    name: _ToolName
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None
    """Input is streamed as it is written anyway."""
    defer_loading: None = None
    allowed_callers: None = None
    input_examples: None = None

    def openai(self) -> ChatTool:
        """The same in a chat's words."""
        function = Function(
            name=self.name,
            description=self.description,
            parameters=self.input_schema,
            strict=self.strict,
        )
        return ChatTool(type="function", function=function)


class _Choice(_Strict, kw_only=True):
    disable_parallel_tool_use: bool | None = None


class ChoiceAuto(_Choice, kw_only=True, tag_field="type", tag="auto"):
    """The model calls what it wants, or says something."""


class ChoiceAny(_Choice, kw_only=True, tag_field="type", tag="any"):
    """The model has to call one tool or more."""


class ChoiceTool(_Choice, kw_only=True, tag_field="type", tag="tool"):
    """The model has to call this tool."""

    name: _ToolName


class ChoiceNone(_Strict, kw_only=True, tag_field="type", tag="none"):
    """The model knows of the tools, and calls none."""

    disable_parallel_tool_use: None = None


class CountRequest(_Strict, kw_only=True):
    """``POST /v1/messages/count_tokens``: what makes up the prompt."""

    model: str
    messages: Annotated[list[Message], Meta(min_length=1)]
    system: str | list[OnlyText] | None = None
    cache_control: CacheControl | None = None
    thinking: ThinkingDisabled | ThinkingEnabled | ThinkingAdaptive | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ChoiceAuto | ChoiceAny | ChoiceTool | ChoiceNone | None = None
    output_config: OutputConfig | None = None

    @property
    def thinks(self) -> bool:
        """Whether the client asks for thoughts."""
        return isinstance(self.thinking, ThinkingEnabled | ThinkingAdaptive)

    def chat(self) -> ChatRequest:
        """What makes up the prompt in OpenAI's words. Raises `BadRequest`."""
        messages = []
        if self.system is not None:
            messages.append(ChatMessage(role="system", content=_text(self.system)))
        for i, message in enumerate(self.messages):
            messages += _messages(f"messages[{i}]", message)
        last = len(self.messages) - 1
        if self.messages[last].role == "assistant":
            field = f"messages[{last}].role"
            raise BadRequest(
                f"{field}: an assistant message that is to be continued is not supported",
                field,
                "unsupported_field",
            )
        choice = self.tool_choice
        if choice is not None and not self.tools:
            raise BadRequest("tool_choice: there are no tools", "tool_choice")
        return ChatRequest(
            model=self.model,
            messages=messages,
            tools=None if self.tools is None else [tool.openai() for tool in self.tools],
            tool_choice=_choice(choice),
            parallel_tool_calls=not choice.disable_parallel_tool_use if choice else None,
            chat_template_kwargs=None if self.thinking is None else thinking(self.thinks),
        )


class MessagesRequest(CountRequest, kw_only=True):
    """``POST /v1/messages``."""

    max_tokens: _Count
    stream: bool | None = None
    stop_sequences: Annotated[list[_Stop], Meta(max_length=MAX_STOPS)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31)] | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    container: None = None
    inference_geo: None = None
    mcp_servers: Annotated[list[None], Meta(max_length=0)] | None = None

    def chat(self) -> ChatRequest:
        """The same request in OpenAI's words. Raises `BadRequest`."""
        asked = self.thinking
        if isinstance(asked, ThinkingEnabled) and asked.budget_tokens >= self.max_tokens:
            field = "thinking.budget_tokens"
            raise BadRequest(f"{field}: has to be less than max_tokens", field)
        chat = super().chat()
        chat.max_tokens = self.max_tokens
        chat.stream = self.stream
        chat.stop = self.stop_sequences
        chat.temperature = self.temperature
        chat.top_p = self.top_p
        chat.top_k = self.top_k
        chat.response_format = self._response_format()
        return chat

    def _response_format(self) -> JsonSchemaFormat | None:
        asked = None if self.output_config is None else self.output_config.format
        if asked is None:
            return None
        return JsonSchemaFormat(json_schema=JsonSchema(name="output", schema=asked.schema))


def _choice(
    choice: ChoiceAuto | ChoiceAny | ChoiceTool | ChoiceNone | None,
) -> Literal["none", "auto", "required"] | NamedTool | None:
    match choice:
        case ChoiceAuto():
            return "auto"
        case ChoiceAny():
            return "required"
        case ChoiceTool(name=name):
            return NamedTool(type="function", function=NamedFunction(name=name))
        case ChoiceNone():
            return "none"
    return None


_MADE_BY: Final[dict[type[Block], str]] = {
    ThinkingBlock: "assistant",
    ToolUse: "assistant",
    ToolResult: "user",
}


def _messages(place: str, message: Message) -> list[ChatMessage]:
    """The message in a chat's words, where every result of a tool is a message of its own."""
    if isinstance(message.content, str):
        return [ChatMessage(role=message.role, content=message.content)]
    for i, block in enumerate(message.content):
        if _MADE_BY.get(type(block), message.role) != message.role:
            raise Unsupported(f"{place}.content[{i}].type")
    if message.role == "assistant":
        return [_assistant(message.content)]
    messages: list[ChatMessage] = []
    texts: list[TextBlock] = []
    for block in message.content:
        if isinstance(block, TextBlock):
            texts.append(block)
        elif isinstance(block, ToolResult):
            if texts:
                messages.append(ChatMessage(role=message.role, content=_text(texts)))
                texts = []
            content = _text(block.content or "")
            messages.append(
                ChatMessage(role="tool", content=content, tool_call_id=block.tool_use_id)
            )
    if texts or not messages:
        messages.append(ChatMessage(role=message.role, content=_text(texts)))
    return messages


def _assistant(blocks: Sequence[Block]) -> ChatMessage:
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [
        ToolCall(
            id=block.id,
            function=CalledFunction(
                name=block.name, arguments=msgspec.json.encode(block.input).decode()
            ),
        )
        for block in blocks
        if isinstance(block, ToolUse)
    ]
    return ChatMessage(
        role="assistant",
        content=_text([block for block in blocks if isinstance(block, TextBlock)]),
        reasoning="\n".join(thoughts) if thoughts else None,
        tool_calls=calls or None,
    )


def _text(content: str | Sequence[TextBlock | OnlyText]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(block.text for block in content)
