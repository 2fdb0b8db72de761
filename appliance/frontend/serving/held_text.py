"""Streamed answers end with the text that a tool parser held back.

A tool parser of vLLM's holds back text that may begin a call: the `<` that may become
`<tool_call>`, or an answer that begins with `{`. Where the answer then ends without a call, vLLM
hands the text over only from parsers built on its own parser engine. The others lose it: the
stream says less than the same answer would in one piece.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from starlette.datastructures import State
from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.parser.abstract_parser import DelegatingParser, Parser


def keep_held_text(state: State) -> bool:
    """Change the parsers of a model's serving objects, in place; whether there was one to change,
    which then has to read one token at a time (`single_tokens`)."""
    changed = False
    for serving, attribute in (
        (state.openai_serving_chat, "parser_cls"),
        (state.anthropic_serving_messages, "parser_cls"),
        (state.openai_serving_responses, "parser"),
    ):
        if serving is not None:
            parser = getattr(serving, attribute)
            setattr(serving, attribute, with_held_text(parser))
            changed = changed or getattr(serving, attribute) is not parser
    return changed


@cache
def with_held_text(parser: type[Parser] | None) -> type[Parser] | None:
    """The same parser, whose streams give back what was held; itself where vLLM sees to that."""
    if (
        parser is None
        or not issubclass(parser, DelegatingParser)
        or parser.tool_parser_cls is None
        or parser.tool_parser_cls.engine_based_streaming
    ):
        return parser
    return type(f"{parser.__name__}WithHeldText", (_GivesBackHeldText, parser), {})


class _GivesBackHeldText(DelegatingParser):  # type: ignore[misc]  # vLLM has no types
    """One per stream, as vLLM's parsers are."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._streamed: list[str] = []
        """The content of the stream, from where calls of tools may begin."""
        self._called = False

    def parse_delta(
        self,
        delta_text: str,
        delta_token_ids: list[int],
        request: Any,
        prompt_token_ids: list[int] | None = None,
        *,
        finished: bool,
    ) -> DeltaMessage | None:
        delta = super().parse_delta(
            delta_text, delta_token_ids, request, prompt_token_ids, finished=finished
        )
        if not self._stream_state.tool_call_text_started:
            return delta
        if delta is not None:
            self._streamed.append(delta.content or "")
            self._called = self._called or bool(delta.tool_calls)
        held = self._held_text(request) if finished else ""
        if held:
            delta = delta or DeltaMessage()
            delta.content = (delta.content or "") + held
        return delta

    def _held_text(self, request: Any) -> str:
        """What a whole answer's content has more than the stream."""
        said, streamed = self._stream_state.previous_text, "".join(self._streamed)
        if self._called or len(streamed) >= len(said) or not said.startswith(streamed):
            return ""
        tool_parser = self.tool_parser
        if (
            tool_parser is not None
            and tool_parser.supports_required_and_named
            and request.tool_choice not in (None, "auto")
        ):
            return ""  # all of the text is a call's, or none was held
        whole = self.extract_tool_calls(said, request)
        return "" if whole.tools_called else said[len(streamed) :]
