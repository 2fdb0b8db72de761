"""Items that clients send to ``/v1/responses``, also those that were output before, decoded
strictly, and the same in a chat's words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from appliance.api.errors import BadRequest
from appliance.api.schemas import CalledFunction, Message, Strict, ToolCall, parse

_Nothing: TypeAlias = Annotated[list[None], Meta(max_length=0)]
_Status: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class InputPart(Strict, kw_only=True):
    """A part of a message; also one that was the answer to an earlier request."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: _Nothing | None = None
    logprobs: _Nothing | None = None


class InputMessage(Strict, kw_only=True):
    """One message."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputPart]
    type: Literal["message"] | None = None
    id: str | None = None
    status: _Status | None = None


class CallItem(Strict, kw_only=True):
    """A call that the model made. `arguments` is what it wrote: JSON, as a rule."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: _Status | None = None
    caller: None = None
    namespace: None = None


class CallOutput(Strict, kw_only=True):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[InputPart]
    id: str | None = None
    status: _Status | None = None
    name: str | None = None
    caller: None = None
    namespace: None = None


class Thought(Strict, kw_only=True):
    """A part of what the model thought."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Strict, kw_only=True):
    """What the model thought before the items that follow."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: _Nothing | None = None
    content: list[Thought] | None = None
    status: _Status | None = None
    encrypted_content: None = None


class _Kind(msgspec.Struct, kw_only=True):
    type: str | None = None


_Item: TypeAlias = InputMessage | CallItem | CallOutput | ReasoningItem

_ITEMS: Final[dict[str | None, type[_Item]]] = {
    None: InputMessage,
    "message": InputMessage,
    "function_call": CallItem,
    "function_call_output": CallOutput,
    "reasoning": ReasoningItem,
}


def messages_of(items: Sequence[msgspec.Raw]) -> list[Message]:
    """Items of JSON as messages of a chat, where thoughts, words and calls that follow each other
    are one message of the assistant. Raises `BadRequest`."""
    messages: list[Message] = []
    answer: Message | None = None
    """The assistant's message that is being put together."""
    for i, raw in enumerate(items):
        item = _item(raw, f"input[{i}]")
        match item:
            case InputMessage(role=role, content=content):
                if role == "assistant" and answer and not (answer.content or answer.tool_calls):
                    answer.content = _text(content)  # there were only thoughts
                    continue
                messages.append(Message(role=role, content=_text(content)))
                answer = messages[-1] if role == "assistant" else None
            case CallOutput(call_id=name, output=output):
                messages.append(Message(role="tool", content=_text(output), tool_call_id=name))
                answer = None
            case ReasoningItem(content=content):
                thoughts = "\n".join(thought.text for thought in content or ())
                messages.append(Message(role="assistant", content="", reasoning=thoughts or None))
                answer = messages[-1]
            case CallItem(call_id=name, arguments=arguments):
                if answer is None:
                    messages.append(answer := Message(role="assistant", content=""))
                function = CalledFunction(name=item.name, arguments=arguments)
                answer.tool_calls = [
                    *(answer.tool_calls or ()),
                    ToolCall(id=name, function=function),
                ]
    return messages


def _item(raw: msgspec.Raw, place: str) -> _Item:
    kind = parse(raw, _Kind, place).type
    if kind not in _ITEMS:
        raise BadRequest(f"{place}.type: {kind!r} is not supported", f"{place}.type")
    return parse(raw, _ITEMS[kind], place)


def _text(content: str | Sequence[InputPart]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.text for part in content)
