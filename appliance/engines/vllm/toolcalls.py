"""Tool calls and reasoning of one chat, read by vLLM's parsers for its model."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import cache
from typing import Any, cast

import msgspec
from pydantic import ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.parser.abstract_parser import DelegatingParser, Parser, structured_outputs_to_format
from vllm.parser.parser_manager import ParserManager
from vllm.reasoning import ReasoningParser, ReasoningParserManager
from vllm.renderers.chat_utils import make_tool_call_id
from vllm.sampling_params import StructuredOutputsParams
from vllm.tokenizers import cached_get_tokenizer
from vllm.tokenizers.registry import cached_resolve_tokenizer_args
from vllm.tool_parsers import ToolParser, ToolParserManager
from vllm.v1.structured_output.request import get_structured_output_key
from xgrammar.structural_tag import AnyTextFormat, SequenceFormat, StructuralTag, TagFormat

from appliance.dialogue import Begin, Parsers, ParserUnusable
from appliance.engines.protocol import Guide, GuideKind
from appliance.toolcalls import CallPiece, Heard

_HARMONY = "openai_gptoss"

_stamps: dict[str, object] = {}
"""What the files of each path were like when they were read."""


class ToolConversation:
    """Implements `appliance.interpreter.Conversation`."""

    def __init__(self, begin: Begin) -> None:
        """Raises `ParserUnusable`, and `ValueError` for a chat that vLLM refuses."""
        try:
            request = ChatCompletionRequest.model_validate_json(begin.chat)
        except ValidationError as error:
            raise ValueError("; ".join(one["msg"] for one in error.errors())) from error
        except VLLMValidationError as error:
            raise ValueError(str(error)) from error
        try:
            self._prepare(begin, request)
        except (ParserUnusable, ValueError):
            raise
        except Exception as error:  # parsers take for granted that a schema is one
            reason = str(error) or type(error).__name__
            raise ValueError(f"the parser cannot make anything of the chat: {reason}") from error

    def _prepare(self, begin: Begin, request: Any) -> None:
        _heed_new_files(begin.path)
        tokenizer = cached_get_tokenizer(begin.path)
        # Who has to call gives arguments of the schema, as models of no known format do; vLLM
        # alone would want `strict` in the tool for that.
        strictness = "auto" if request.tool_choice == "auto" else "parameter"
        # What somebody writes who cannot call is text, whatever it looks like.
        calls = bool(request.tools) and request.tool_choice != "none"
        self._prompt = list(begin.prompt)

        def make(parsers: Parsers) -> Parser:
            kind = _parser_class(parsers, begin.path, calls, strictness)
            variables = dict(request.chat_template_kwargs or {})
            parser = kind(tokenizer, request.tools, chat_template_kwargs=variables)
            parser.set_prompt_token_ids(self._prompt)
            return parser

        parsers, first = begin.parsers, make(begin.parsers)
        self._reasons = parsers.reasoning is not None
        if self._reasons and first.is_reasoning_end(self._prompt):
            self._reasons = False
            if not request.stream:  # whole answers are read regardless of the prompt
                parsers = msgspec.structs.replace(parsers, reasoning=None)
        self._parsers = [make(parsers) for _ in range(begin.choices)]
        self._request = self._parsers[0].adjust_request(request)
        structured = self._request.extract_structured_outputs()
        self.guide = None if structured is None else self._guide(structured)
        self.special_tokens = not self._request.skip_special_tokens
        self._tokens: list[list[int]] = [[] for _ in range(begin.choices)]

    def hear(self, choice: int, text: str, tokens: Sequence[int], finished: bool) -> Heard:
        """What the text is; it is all of the choice's text if the chat is not streamed."""
        parser = self._parsers[choice]
        heard = (self._delta if self._request.stream else self._whole)(
            parser, text, tokens, finished
        )
        calls, counted = heard.calls, 0
        if self._request.parallel_tool_calls is False:
            calls = tuple(call for call in calls if call.index == 0)
        if self._reasons:
            self._tokens[choice] += tokens
            if finished:
                counted = parser.count_reasoning_tokens(self._tokens[choice])
        return Heard(heard.content, calls, heard.reasoning, counted)

    def _whole(self, parser: Parser, text: str, tokens: Sequence[int], finished: bool) -> Heard:
        reasoning, content, calls = parser.parse(
            text, self._request, enable_auto_tools=True, model_output_token_ids=tokens
        )
        pieces = [
            CallPiece(i, call.id or make_tool_call_id(), call.name, call.arguments)
            for i, call in enumerate(calls or ())
        ]
        return Heard(content or "", tuple(pieces), reasoning or "")

    def _delta(self, parser: Parser, text: str, tokens: Sequence[int], finished: bool) -> Heard:
        delta = parser.parse_delta(
            text, list(tokens), self._request, self._prompt, finished=finished
        )
        if delta is None:
            return Heard()
        calls = []
        for call in delta.tool_calls:
            function = call.function
            name = None if function is None else function.name
            arguments = "" if function is None else function.arguments or ""
            calls.append(CallPiece(call.index, call.id, name, arguments))
        return Heard(delta.content or "", tuple(calls), delta.reasoning or "")

    def _guide(self, structured: StructuredOutputsParams) -> Guide:
        """What the whole answer has to follow; who reasons first follows it from then on."""
        own = self._request._grammar_from_parser  # which knows of reasoning
        if own or not self._reasons:
            kind, text = get_structured_output_key(structured)
            return Guide(GuideKind(kind.name.lower()), text)
        reasoning = self._parsers[0].reasoning_parser
        if not reasoning or not reasoning.reasoning_end_str:
            raise ValueError(
                "the model's reasoning parser does not say where reasoning ends, and so not from "
                "where on the answer has to follow anything"
            )
        wanted = structured_outputs_to_format(structured)
        thought = TagFormat(begin="", content=AnyTextFormat(), end=reasoning.reasoning_end_str)
        tag = StructuralTag(format=SequenceFormat(elements=[thought, wanted]))
        return Guide(GuideKind.STRUCTURAL_TAG, json.dumps(tag.model_dump()))


def _heed_new_files(path: str) -> None:
    """Read tokenizers anew if there are other files than before: another model of the same name.
    Chats are begun by one thread."""
    try:
        with os.scandir(path) as entries:
            stamp = {entry.name: _stamp(entry.stat()) for entry in entries}
    except OSError:  # what was read of it, if anything was, is what there is
        return
    if _stamps.setdefault(path, stamp) != stamp:
        _stamps[path] = stamp
        for cached in (cached_get_tokenizer, cached_resolve_tokenizer_args, _parser_class):
            cached.cache_clear()


def _stamp(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_ino, found.st_size, found.st_mtime_ns


@cache
def _parser_class(parsers: Parsers, path: str, calls: bool, strictness: str) -> type[Parser]:
    """Raises `ParserUnusable` for parsers that there are not, or not for this model."""
    reasoning = None if parsers.reasoning is None else _reasoning_parser(parsers.reasoning, path)
    tool = parsers.tool if calls else None
    if tool is None and (calls or reasoning is None):
        return _json_parser(reasoning)
    try:
        return cast(
            type[Parser],
            ParserManager.get_parser(
                tool_parser_name=tool,
                reasoning_parser_name=parsers.reasoning,
                enable_auto_tools=True,
                tool_strict_level=strictness,
                tokenizer=cached_get_tokenizer(path),
            ),
        )
    except Exception as error:
        known = ", ".join(ToolParserManager.list_registered())
        raise ParserUnusable(f"tool parser {parsers.tool!r}: {error}; vLLM has {known}") from error


def _reasoning_parser(name: str, path: str) -> type[ReasoningParser]:
    try:
        if name == _HARMONY:
            raise TypeError("no chat template writes the prompts of this format")
        found = cast(type[ReasoningParser], ReasoningParserManager.get_reasoning_parser(name))
        found(cached_get_tokenizer(path), chat_template_kwargs={})
    except Exception as error:
        known = ", ".join(ReasoningParserManager.list_registered())
        raise ParserUnusable(f"reasoning parser {name!r}: {error}; vLLM has {known}") from error
    return found


def _json_parser(reasoning: type[ReasoningParser] | None) -> type[Parser]:
    """For tools of models of no known format: JSON, to which their answers are guided."""

    class JsonParser(DelegatingParser):  # type: ignore[misc]
        reasoning_parser_cls = reasoning
        tool_parser_cls = ToolParser

    return cast(type[Parser], JsonParser)
