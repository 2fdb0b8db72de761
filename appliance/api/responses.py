"""OpenAI's ``/v1/responses``, without a memory: nothing is stored, so nothing can be gone on from.

A request is put into a chat's words and planned like one.
"""

from __future__ import annotations

import time
import uuid
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from litestar import Request, post
from litestar.handlers import HTTPRouteHandler
from litestar.response.base import ASGIResponse
from msgspec import Meta

from appliance.api.choices import Choices
from appliance.api.errors import BadRequest, Unsupported
from appliance.api.plan import plan_chat
from appliance.api.responses_input import messages_of
from appliance.api.responses_replies import ResponseDialect
from appliance.api.schemas import (
    MAX_TOOLS,
    ChatRequest,
    Function,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    Message,
    NamedFunction,
    NamedTool,
    ResponseFormat,
    Strict,
    TextFormat,
    Tool,
    ToolName,
    check_variables,
    parse,
)
from appliance.api.service import Service
from appliance.api.stream import answer

_Nothing: TypeAlias = Annotated[list[None], Meta(max_length=0)]


class SchemaFormat(Strict, kw_only=True, tag_field="type", tag="json_schema"):
    """The answer is JSON that the schema allows."""

    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class FunctionTool(Strict, kw_only=True):
    """A tool that the model may call. It always is held to its schema where it has to call."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def openai(self) -> Tool:
        """The same in a chat's words."""
        function = Function(
            name=self.name,
            description=self.description,
            parameters=self.parameters,
            strict=self.strict,
        )
        return Tool(type="function", function=function)


class NamedFunctionTool(Strict, kw_only=True):
    """The tool that the model has to call."""

    type: Literal["function"]
    name: ToolName


class TextOptions(Strict, kw_only=True):
    """What the text of the answer is to be."""

    format: TextFormat | JsonObjectFormat | SchemaFormat | None = None
    verbosity: None = None


class ResponsesRequest(Strict, kw_only=True):
    """``POST /v1/responses``."""

    model: str
    input: str | Annotated[list[msgspec.Raw], Meta(min_length=1)]
    """Of a list, items of `appliance.api.responses_input`."""
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=2**31)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    stream: bool | None = None
    text: TextOptions | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default", "flex"] | None = None
    truncation: Literal["disabled"] | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool | None = None
    parallel_tool_calls: bool | None = None
    include: _Nothing | None = None
    background: bool | None = None
    previous_response_id: None = None
    conversation: None = None
    prompt: None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """As of chats: vLLM's."""
    reasoning: None = None
    max_tool_calls: None = None
    top_logprobs: None = None
    stream_options: None = None
    # Labels for the caller's own use: they change nothing about the answer.
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def chat(self) -> ChatRequest:
        """The same request in a chat's words. Raises `BadRequest`."""
        for field in ("store", "background"):
            if getattr(self, field):
                raise Unsupported(field)
        check_variables(self.chat_template_kwargs)
        messages = [] if self.instructions is None else [_message("system", self.instructions)]
        if isinstance(self.input, str):
            messages.append(_message("user", self.input))
        else:
            messages += messages_of(self.input)
        return ChatRequest(
            model=self.model,
            messages=messages,
            max_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            stream=self.stream,
            service_tier=self.service_tier,
            chat_template_kwargs=self.chat_template_kwargs,
            tools=[tool.openai() for tool in self.tools] if self.tools else None,
            tool_choice=_choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=_format(self.text),
        )


def response_routes(service: Service, keep_alive_seconds: float) -> list[HTTPRouteHandler]:
    """The endpoint."""

    @post("/v1/responses", status_code=200, operation_id="createResponse")
    async def respond(request: Request[Any, Any, Any]) -> ASGIResponse:
        asked = parse(await request.body(), ResponsesRequest)
        name = uuid.uuid4().hex
        try:
            plan = await plan_chat(asked.chat(), service, f"resp_{name}")
        except BadRequest as error:
            raise _in_these_words(error) from error
        dialect = ResponseDialect(name, int(time.time()), asked.model, _echo(asked))
        return await answer(
            request.receive,
            Choices.submit(plan, service),
            dialect,
            stream=plan.stream,
            keep_alive_seconds=keep_alive_seconds,
        )

    return [respond]


def _message(role: Literal["system", "user"], text: str) -> Message:
    return Message(role=role, content=text)


def _choice(
    choice: Literal["none", "auto", "required"] | NamedFunctionTool | None,
) -> Literal["none", "auto", "required"] | NamedTool | None:
    if not isinstance(choice, NamedFunctionTool):
        return choice
    return NamedTool(type="function", function=NamedFunction(name=choice.name))


def _format(text: TextOptions | None) -> ResponseFormat | None:
    wanted = None if text is None else text.format
    if not isinstance(wanted, SchemaFormat):
        return wanted
    return JsonSchemaFormat(json_schema=JsonSchema(name=wanted.name, schema=wanted.schema))


def _echo(asked: ResponsesRequest) -> dict[str, Any]:
    """What of the request is said again in the answer."""
    return {
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "metadata": asked.metadata or {},
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": None,
        "store": False,
        "temperature": 1.0 if asked.temperature is None else asked.temperature,
        "text": {"format": {"type": "text"}} if asked.text is None else asked.text,
        "tool_choice": asked.tool_choice or "auto",
        "tools": asked.tools or [],
        "top_p": 1.0 if asked.top_p is None else asked.top_p,
        "truncation": "disabled",
    }


_FIELDS = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format": "text.format",
    "tool_choice.function.name": "tool_choice.name",
}
"""Fields of a chat, and what they are called here."""


def _in_these_words(error: BadRequest) -> BadRequest:
    detail = error.body.error
    here = _FIELDS.get(detail.param or "")
    if here is None or detail.param is None:
        return error
    return BadRequest(detail.message.replace(detail.param, here, 1), here, detail.code)
