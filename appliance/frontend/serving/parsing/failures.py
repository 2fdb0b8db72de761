"""Parsers that fail say so: with their name, the model and the remedy, in the answer and the log.

vLLM makes a parser for each request. One that is not made for the model may refuse its tokenizer,
which shows when the front half is built, or meet text that it cannot read, which shows with an
answer. vLLM names flags of ``vllm serve`` for the one, and answers 500 without a word in the log
for the other.
"""

from __future__ import annotations

import logging
from functools import wraps
from typing import Any, Final

import msgspec
from starlette.datastructures import State
from vllm.exceptions import VLLMError, VLLMServerError
from vllm.parser.abstract_parser import Parser
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

from appliance.frontend.serving.parsing.without_tools import left_without_tools
from appliance.service.front_frames import FrontModel

log = logging.getLogger(__name__)

_CLIENTS: Final = (VLLMError, RecursionError)
"""What other parts of a front end tell clients of."""
_OF_REQUESTS: Final = (*_CLIENTS, ValueError, TypeError, OverflowError, NotImplementedError)
"""The same where a parser is given a request, of which the tools may be at fault."""
_FAILING: Final = {
    "__init__": _OF_REQUESTS,
    "adjust_request": _OF_REQUESTS,
    "parse": _CLIENTS,
    "parse_delta": _CLIENTS,
}
"""What vLLM's serving objects call of a parser, and which errors of it are left as they are."""


class ParserFailed(VLLMServerError):  # type: ignore[misc]  # vLLM has no types
    """A parser cannot read a model's answers; the message says which, and what to do."""


def with_usable_parsers(model: FrontModel, tokenizer: Any) -> FrontModel:
    """The model without a tool parser that `auto` chose and its tokenizer refuses, which is logged.
    Raises `ParserFailed` for a parser that the configuration names, and its tokenizer refuses."""
    if wrong := _refusal(ToolParserManager.get_tool_parser, model.tool_parser, tokenizer):
        if not model.tool_parser_is_auto:
            raise ParserFailed(_refused("tool_parser", model.tool_parser, model, wrong))
        log.warning(
            'tool_parser = "auto" means "%s" for %s, and its tokenizer refuses that: %s; the '
            'model is served without tools; give its tool_parser another name, or "" for none',
            model.tool_parser,
            model.name,
            wrong,
            extra={"fields": {"model": model.name}},
        )
        model = msgspec.structs.replace(model, tool_parser=None)
    reads = ReasoningParserManager.get_reasoning_parser
    if wrong := _refusal(reads, model.reasoning_parser, tokenizer):
        raise ParserFailed(_refused("reasoning_parser", model.reasoning_parser, model, wrong))
    return model


def _refusal(registry: Any, name: str | None, tokenizer: Any) -> str:
    """Why a parser cannot be used with a tokenizer; "" if it can."""
    if name is not None:
        try:
            registry(name)(tokenizer)
        except Exception as error:  # of the parser, about a tokenizer that is not its model's
            return str(error) or type(error).__name__
    return ""


def _refused(key: str, name: str | None, model: FrontModel, wrong: str) -> str:
    return (
        f'{key} = "{name}" cannot be used with the tokenizer of {model.name}: {wrong}; '
        f'use "auto", "" for none, or another name for {key} of the model'
    )


def adapt_parsers(state: State, model: FrontModel) -> None:
    """Change the parsers of a model's serving objects and renderer, in place: they leave answers
    without tools alone, and what they raise is logged, and names them."""
    for serving, attribute in (
        (state.openai_serving_chat, "parser_cls"),
        (state.openai_serving_chat_batch, "parser_cls"),
        (state.anthropic_serving_messages, "parser_cls"),
        (state.openai_serving_responses, "parser"),
        (state.online_renderer, "parser"),
    ):
        if (parser := getattr(serving, attribute, None)) is not None:
            setattr(serving, attribute, naming_failures(left_without_tools(parser), model))


def naming_failures(parser: type[Parser], model: FrontModel) -> type[Parser]:
    """The same parser, whose failures are those of `model`."""
    methods = {name: _named(getattr(parser, name), model, left) for name, left in _FAILING.items()}
    return type(f"{parser.__name__}Of", (parser,), methods)


def _named(method: Any, model: FrontModel, left: tuple[type[Exception], ...]) -> Any:
    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except left:
            raise
        except Exception as error:  # of a parser, about whatever a model wrote
            failed = ParserFailed(f"{_parsers(model)} failed: {type(error).__name__}: {error}")
            log.error("%s", failed, extra={"fields": {"model": model.name}})
            raise failed from error

    return call


def _parsers(model: FrontModel) -> str:
    """The parsers of a model, as its table has them."""
    keys = (("tool_parser", model.tool_parser), ("reasoning_parser", model.reasoning_parser))
    named = [f'{key} "{name}"' for key, name in keys if name is not None]
    return f"{' or '.join(named)} of the model {model.name}"
