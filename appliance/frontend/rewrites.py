"""Changes of a body before vLLM reads it: what published schemas have and vLLM lacks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, TypeAlias, TypeVar, get_args

import msgspec
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

from appliance.http.errors import BadRequest

Value = TypeVar("Value")
_LEAST_BUDGET: Final = 1024
"""Of `thinking.budget_tokens`, as published; vLLM refuses less."""


class Body:
    """A body by its top-level fields, copied when first changed, and the names of what is ignored
    of it."""

    def __init__(self, fields: Mapping[str, msgspec.Raw], ignored: list[str]) -> None:
        self._sent = fields
        self._new: dict[str, msgspec.Raw] | None = None
        self._ignored = ignored

    @property
    def is_new(self) -> bool:
        return self._new is not None

    @property
    def fields(self) -> dict[str, msgspec.Raw]:
        """The fields, to be changed."""
        if self._new is None:
            self._new = dict(self._sent)
        return self._new

    def __contains__(self, name: str) -> bool:
        return name in (self._sent if self._new is None else self._new)

    def read(self, name: str, kind: type[Value]) -> Value | None:
        """A field's value; None if it is missing, null or of another kind, which vLLM tells."""
        raw = (self._sent if self._new is None else self._new).get(name)
        if raw is None:
            return None
        try:
            return msgspec.json.decode(raw, type=kind | None)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None

    def write(self, name: str, value: object) -> None:
        self.fields[name] = msgspec.Raw(msgspec.json.encode(value))

    def drop(self, name: str) -> None:
        self.fields.pop(name, None)

    def ignore(self, name: str) -> None:
        """Name it in the header."""
        self._ignored.append(name)


_DEARER_TIERS: Final = ("priority", "scale")
"""There are none here. An answer that repeats the tier says `default`, as OpenAI's does where a
project has not the one that it asks for."""
Object: TypeAlias = dict[str, Any]
Objects: TypeAlias = list[Object]
_Names: TypeAlias = list[str]


# --- tools ---------------------------------------------------------------------------------------


def _chat(body: Body, reasons: bool) -> None:
    _note(body, "stream_options", "include_obfuscation")
    left_out = _leave_out_tools(body, lambda tool: tool.get("type", "function") == "function")
    choice = body.read("tool_choice", Object)
    if choice is not None and choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools")
        _allow_tools(body, allowed if isinstance(allowed, dict) else {})
    elif choice is not None and choice.get("type") not in (None, "function"):
        _refuse_choice(str(choice["type"]))
    _settle_choice(body, left_out)


def _responses(body: Body, reasons: bool) -> None:
    if body.read("service_tier", str) in _DEARER_TIERS:
        body.write("service_tier", "default")
    _note(body, "text", "verbosity")
    _note(body, "reasoning", "summary")
    left_out = _leave_out_tools(body, _is_callable)
    choice = body.read("tool_choice", Object)
    if choice is not None and choice.get("type") == "allowed_tools":
        _allow_tools(body, choice)
    elif choice is not None and choice.get("type") not in (None, "function", "custom"):
        _refuse_choice(str(choice["type"]))
    elif choice is not None and choice.get("name") in left_out:
        _refuse_choice(str(choice["name"]))
    _settle_choice(body, left_out)
    if include := body.read("include", _Names):
        for name in include:
            if name not in _OBEYED_INCLUDES:
                body.ignore(f"include.{name}")
        if not _KNOWN_INCLUDES.issuperset(include):
            body.write("include", [name for name in include if name in _KNOWN_INCLUDES])


_OBEYED_INCLUDES: Final = frozenset(
    {"message.output_text.logprobs", "message.input_image.image_url"}
)


def _known_includes() -> frozenset[str]:
    (listed, _) = get_args(ResponsesRequest.model_fields["include"].annotation)
    return frozenset(get_args(get_args(listed)[0]))


_KNOWN_INCLUDES: Final = _known_includes()


def _is_callable(tool: Mapping[str, Any]) -> bool:
    """Whether vLLM shows it to the model: functions, and custom tools of free text."""
    if tool.get("type") == "custom":
        described = tool.get("format")
        return not (isinstance(described, dict) and described.get("type") == "grammar")
    return tool.get("type") in ("function", "namespace")


def _leave_out_tools(body: Body, keeps: Callable[[Object], bool]) -> set[str]:
    """Drop and name the tools that nothing here can call; their names are returned."""
    if "tools" not in body:
        return set()
    tools = body.read("tools", Objects) or []
    kept = [tool for tool in tools if keeps(tool)]
    if len(kept) == len(tools):
        return set()
    body.write("tools", kept)
    left_out = set[str]()
    for tool in tools:
        if not keeps(tool):
            kind = str(tool.get("type"))
            body.ignore(f"tools.{kind}")
            left_out |= {kind, str(tool.get("name", kind))}
    return left_out


def _allow_tools(body: Body, allowed: Mapping[str, Any]) -> None:
    """Show the model only the tools that it may call."""
    listed = allowed.get("tools")
    wanted = {_name_of(one) for one in listed} if isinstance(listed, list) else set()
    tools = body.read("tools", Objects) or []
    kept = [tool for tool in tools if _name_of(tool) in wanted]
    if not kept:
        raise BadRequest("tool_choice: allows none of tools; name some of them", "tool_choice")
    body.write("tools", kept)
    body.write("tool_choice", allowed.get("mode", "auto"))


def _name_of(tool: object) -> object:
    if not isinstance(tool, dict):
        return None
    inner = tool.get("function")
    name = inner.get("name") if isinstance(inner, dict) else tool.get("name")
    return name if isinstance(name, str) else None


def _settle_choice(body: Body, left_out: Collection[str]) -> None:
    """Where no tool is left there is nothing to choose."""
    tools = body.read("tools", Objects)
    if tools or not left_out:
        return
    if body.read("tool_choice", str) == "required":
        _refuse_choice(min(left_out))
    body.drop("tools")
    body.drop("tool_choice")


def _refuse_choice(tool: str) -> None:
    raise BadRequest(
        f"tool_choice: {tool[:64]!r} is not a function, and nothing here can run it: choose a"
        " function, or remove it",
        "tool_choice",
        "unsupported_tool",
    )


# --- Anthropic -----------------------------------------------------------------------------------


def _messages(body: Body, reasons: bool) -> None:
    _thinking(body, reasons)
    _output_format(body)
    _note(body, "output_config", "task_budget")
    if "tools" not in body:
        return
    left_out = _leave_out_tools(
        body, lambda tool: tool.get("input_schema") is not None or tool.get("type") is None
    )
    choice = body.read("tool_choice", Object)
    if choice is not None and choice.get("type") == "tool" and choice.get("name") in left_out:
        _refuse_choice(str(choice["name"]))
    if body.read("tools", Objects) == []:
        if left_out and choice is not None and choice.get("type") == "any":
            _refuse_choice(min(left_out))
        body.drop("tools")
        body.drop("tool_choice")


def _thinking(body: Body, reasons: bool) -> None:
    """A model that does not think is not asked to; nothing bounds how long another one thinks."""
    thinking = body.read("thinking", Object)
    if thinking is None or thinking.get("type") not in ("enabled", "adaptive"):
        return
    if not reasons:
        body.ignore("thinking")
        body.drop("thinking")
        return
    if thinking.get("display") is not None:
        body.ignore("thinking.display")
    budget, most = thinking.get("budget_tokens"), body.read("max_tokens", int)
    if not isinstance(budget, int) or thinking["type"] != "enabled":
        return
    if budget >= _LEAST_BUDGET and (most is None or budget < most):  # else vLLM refuses it
        body.ignore("thinking.budget_tokens")
        body.write("thinking", {"type": "adaptive"})


def _output_format(body: Body) -> None:
    """`output_format` is the beta's name of `output_config.format`."""
    described = body.read("output_format", Object)
    if described is None:
        return
    config = body.read("output_config", Object) or {}
    body.write("output_config", {"format": described, **config})
    body.drop("output_format")


def _note(body: Body, name: str, inner: str) -> None:
    """Name an inner field that is a hint."""
    if name in body and (body.read(name, Object) or {}).get(inner) is not None:
        body.ignore(f"{name}.{inner}")


Rewrite: TypeAlias = Callable[[Body, bool], None]
OF_PATH: Final[Mapping[str, Rewrite]] = {
    "/v1/chat/completions": _chat,
    "/v1/chat/completions/render": _chat,
    "/v1/responses": _responses,
    "/v1/messages": _messages,
    "/v1/messages/count_tokens": _messages,
}
"""By path; its second argument says whether the model thinks before it answers."""
