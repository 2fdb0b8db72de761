"""The parsers of configured models: the names that tables give are checked, `auto` is resolved."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from appliance.checkpoints.parsers.choose import ChosenParsers, choose_parsers
from appliance.checkpoints.parsers.names import AUTO, ParserKind, parser_names, remedy_for
from appliance.config.problems import ProblemReport
from appliance.config.schema import Model
from appliance.vocabulary import Task


def check_parsers(models: Sequence[Model], report: ProblemReport) -> None:
    """Report names that vLLM does not know."""
    for index, model in enumerate(models):
        for kind in ParserKind:
            name: str = getattr(model, kind)
            if name and name != AUTO and name not in parser_names(kind):
                wrong = f"{name!r} is not one of vLLM's parsers of {kind.reads}"
                report.add(("model", index, kind.value), wrong, remedy_for(name, kind))


def parsers_of(model: Model, path: Path, task: Task) -> ChosenParsers:
    """Those that a model for `task` is served with, whose checkpoint is in `path`."""
    return choose_parsers(path, model.tool_parser, model.reasoning_parser, task)
