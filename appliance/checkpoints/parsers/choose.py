"""The parsers that a model is served with: those that its table names, or that `auto` means."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import msgspec

from appliance.checkpoints.model_config import read_model_config
from appliance.checkpoints.parsers.families import REASONING_FAMILIES, TOOL_FAMILIES, Family
from appliance.checkpoints.parsers.names import AUTO, ParserKind
from appliance.checkpoints.parsers.templates import TOOL_USE, chat_template, reads_variable
from appliance.errors import CheckpointError
from appliance.vocabulary import Task


class ChosenParser(msgspec.Struct, frozen=True):
    """A parser of vLLM's, and why it is this one."""

    name: str = ""
    """Empty for none."""
    reason: str = ""
    """A clause for people: the configuration names it, or what of the checkpoint led to it. Empty
    if the configuration asks for none."""
    is_auto: bool = False
    """Whether `auto` led to it; a name of the configuration is kept, or refused."""


class ChosenParsers(msgspec.Struct, frozen=True):
    """Of one model."""

    tools: ChosenParser = ChosenParser()
    reasoning: ChosenParser = ChosenParser()


def choose_parsers(
    path: Path, tool_parser: str, reasoning_parser: str, task: Task = Task.GENERATE
) -> ChosenParsers:
    """For the checkpoint in `path`, of which two values of the configuration are given: a name of
    vLLM's, `auto`, or "" for none. What cannot be read of the checkpoint leads to none, and so does
    `auto` for a model that does not generate text."""
    if task is not Task.GENERATE:
        tool_parser, reasoning_parser = (
            "" if asked == AUTO else asked for asked in (tool_parser, reasoning_parser)
        )
    return ChosenParsers(
        tools=_chosen(path, tool_parser, ParserKind.TOOLS),
        reasoning=_chosen(path, reasoning_parser, ParserKind.REASONING),
    )


def _chosen(path: Path, asked: str, kind: ParserKind) -> ChosenParser:
    if asked != AUTO:
        return ChosenParser(asked, "set in the configuration" if asked else "")
    try:
        model_type = read_model_config(path).model_type
    except (CheckpointError, OSError, UnicodeDecodeError) as error:
        return ChosenParser(reason=f"config.json cannot be read: {error}")
    tools = kind is ParserKind.TOOLS
    template = chat_template(path, *([TOOL_USE] if tools else ()))
    if not template:
        return ChosenParser(reason="there is no chat template")
    if tools and not reads_variable(template, "tools"):
        return ChosenParser(reason="the chat template does not read tools")
    return _found(path, model_type, template, TOOL_FAMILIES if tools else REASONING_FAMILIES)


def _found(path: Path, model_type: str, template: str, families: Iterable[Family]) -> ChosenParser:
    for family in families:
        if not _fits(family, model_type, template):
            continue
        if family.token and not _has_token(path, family.token):
            return ChosenParser(
                reason=f"{family.parser} needs {family.token}, which tokenizer.json does not have"
            )
        return ChosenParser(
            family.parser,
            f"model type {model_type}, and {family.markers[0]} in the chat template",
            is_auto=True,
        )
    return ChosenParser(reason=f"no parser is known for the chat template of a {model_type} model")


def _fits(family: Family, model_type: str, template: str) -> bool:
    return (
        model_type in family.types
        and all(marker in template for marker in family.markers)
        and not any(marker in template for marker in family.without)
    )


def _has_token(path: Path, token: str) -> bool:
    """Whether tokenizer.json has it, written either way that JSON allows."""
    try:
        text = (path / "tokenizer.json").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return f'"{token}"' in text or json.dumps(token) in text
