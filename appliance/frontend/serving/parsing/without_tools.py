"""A parser of tool calls leaves answers alone that cannot have any.

Parsers on vLLM's parser engine read every answer, and have every request show special tokens, also
where a client sends no tools. A model that gets its tool parser unasked (`auto`) has to answer such
requests as it did without one.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.parser.abstract_parser import Parser


@cache
def left_without_tools(parser: type[Parser]) -> type[Parser]:
    """The same parser, which does nothing where there are no tools to call; only reasoning is read
    there, if it reads that."""
    kind: type[Parser] = _OnlyForTools
    if parser.reasoning_parser_cls is not None:
        if parser.tool_parser_cls is None:
            return parser
        kind = _SetsToolsAside
    return type(f"{parser.__name__}ForTools", (kind, parser), {})


def may_call(request: Any) -> bool:
    """Whether the answer to a request may have calls of tools."""
    return bool(request.tools) and request.tool_choice != "none"


class _OnlyForTools(Parser):  # type: ignore[misc]  # vLLM has no types
    def adjust_request(self, request: Any) -> Any:
        return super().adjust_request(request) if may_call(request) else request

    def parse(
        self, model_output: str, request: Any, *args: Any, **kwargs: Any
    ) -> tuple[str | None, str | None, Any]:
        if not may_call(request):
            return None, model_output, None
        found: tuple[str | None, str | None, Any] = super().parse(
            model_output, request, *args, **kwargs
        )
        return found

    def parse_delta(
        self, delta_text: str, delta_token_ids: list[int], request: Any, *args: Any, **kwargs: Any
    ) -> DeltaMessage | None:
        if not may_call(request):
            return DeltaMessage(content=delta_text)
        return super().parse_delta(delta_text, delta_token_ids, request, *args, **kwargs)


class _SetsToolsAside(Parser):  # type: ignore[misc]  # vLLM has no types
    """One for each answer. Without tools to call it becomes, before it reads anything, what vLLM
    makes of the same reasoning parser alone."""

    _tool_parser: Any
    _engine_based: bool

    def adjust_request(self, request: Any) -> Any:
        self._set_aside(request)
        return super().adjust_request(request)

    def parse(
        self, model_output: str, request: Any, *args: Any, **kwargs: Any
    ) -> tuple[str | None, str | None, Any]:
        self._set_aside(request)
        found: tuple[str | None, str | None, Any] = super().parse(
            model_output, request, *args, **kwargs
        )
        return found

    def parse_delta(
        self, delta_text: str, delta_token_ids: list[int], request: Any, *args: Any, **kwargs: Any
    ) -> DeltaMessage | None:
        self._set_aside(request)
        return super().parse_delta(delta_text, delta_token_ids, request, *args, **kwargs)

    def _set_aside(self, request: Any) -> None:
        if self._tool_parser is not None and not may_call(request):
            self._tool_parser = None
            self._engine_based = self._reasoning_parser.engine_based_streaming
            self._stream_state.engine_based = self._engine_based
