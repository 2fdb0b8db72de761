"""Tools that a chat may call, and its reasoning: what the template is told, who reads the answer,
what guides it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import msgspec

from appliance.api.errors import BadRequest
from appliance.api.guiding import check_guide, guide_of
from appliance.api.schemas import ChatRequest, NamedTool
from appliance.api.service import (
    ChatRefused,
    GenerationFailed,
    Interpretation,
    ModelCard,
    Service,
)
from appliance.engines.protocol import Guide


def template_tools(request: ChatRequest) -> list[dict[str, Any]] | None:
    """The tools as chat templates know them; None without any."""
    if not request.tools:
        return None
    tools: list[dict[str, Any]] = msgspec.to_builtins(request.tools)
    return tools


def may_call(request: ChatRequest) -> bool:
    """Whether the answer may call tools."""
    return bool(request.tools) and request.tool_choice != "none"


def has_to_be_read(request: ChatRequest, card: ModelCard) -> bool:
    """Whether the answer may be more than what the model says."""
    return may_call(request) or card.reasoning_parser is not None


def thinking(wanted: bool) -> dict[str, Any]:
    """Variables that have a chat template ask for reasoning, or for none; families have two names
    for it, and templates without either ignore both."""
    return {"enable_thinking": wanted, "thinking": wanted}


def check_reasons(field: str, card: ModelCard) -> None:
    """Raises `BadRequest` for a model that does not reason."""
    if card.reasoning_parser is None:
        raise BadRequest(
            f"{field}: {card.id} does not reason, as no reasoning_parser is configured for it",
            field,
            "reasoning_parser_missing",
        )


def called_object(arguments: str, cut: bool) -> dict[str, Any] | None:
    """Arguments of a call as dialects have them that know no text of JSON; None if they are no
    object because the answer was `cut` off. Raises `GenerationFailed` if the model wrote none."""
    with contextlib.suppress(msgspec.DecodeError, RecursionError):
        value = msgspec.json.decode(arguments or "{}")
        if isinstance(value, dict):
            return value
    if cut:
        return None
    raise GenerationFailed("tool_arguments_invalid", "the model called a tool without JSON")


def check_choice(request: ChatRequest, card: ModelCard) -> None:
    """Raises `BadRequest` for tools that cannot be, and where the model would have to choose, and
    cannot be understood."""
    _check_tools(request)
    auto = may_call(request) and request.tool_choice in (None, "auto")
    if auto and card.tool_parser is None:
        raise BadRequest(
            f"tool_choice: {card.id} cannot choose whether to call tools, as no tool_parser is "
            'configured for it; "none", "required" and a named function are supported',
            "tool_choice",
            "tool_parser_missing",
        )


async def interpret(
    request: ChatRequest, prompt: Sequence[int], service: Service
) -> Interpretation:
    """Have the answers read. Raises `BadRequest`, and `GenerationFailed` if nobody can."""
    chat: dict[str, Any] = {
        "model": request.model,
        # The prompt is made of the true ones; vLLM wants some.
        "messages": [{"role": "user", "content": ""}],
        "stream": bool(request.stream),
        "chat_template_kwargs": request.chat_template_kwargs or {},
    }
    if request.tools:
        chat["tools"] = request.tools
        chat["tool_choice"] = request.tool_choice or "auto"
        chat["parallel_tool_calls"] = request.parallel_tool_calls is not False
    for field in ("response_format", "structured_outputs"):
        if (value := getattr(request, field)) is not None:
            chat[field] = value
    try:
        return await service.interpret(
            request.model, msgspec.json.encode(chat), prompt, request.n or 1
        )
    except ChatRefused as refused:
        field = "tools" if request.tools else "messages"
        if (asked := guide_of(request)) is not None and not may_call(request):
            field = asked[0]
        raise BadRequest(f"{field}: {refused}", field) from refused


def guide_of_chat(request: ChatRequest, interpretation: Interpretation) -> tuple[str, Guide] | None:
    """What the answer has to follow, and the field that says so. Raises `BadRequest`."""
    asked = guide_of(request)
    guide = interpretation.guide
    if guide is None:
        return None
    own = asked is not None and (asked[1] == guide or not may_call(request))
    field = asked[0] if asked is not None and own else "tools"
    check_guide(field, guide, request)
    return field, guide


def _check_tools(request: ChatRequest) -> None:
    choice = request.tool_choice
    names = [tool.function.name for tool in request.tools or ()]
    if len(set(names)) < len(names):
        raise BadRequest("tools: two functions have the same name", "tools")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        field = "tool_choice.function.name"
        raise BadRequest(f"{field}: no such function in tools", field)
    if choice == "required" and not names:
        raise BadRequest("tool_choice: there are no tools", "tool_choice")
