"""What an answer of a chat took, and how the appliance got there, in lines of `Chat`."""

from __future__ import annotations

from collections.abc import Iterable

from rich.cells import cell_len

from tui.conversation import PHASES, AnswerState, ChatAnswer
from tui.drawing.amounts import divide, duration, rate
from tui.drawing.canvas import Line
from tui.drawing.theme import ColourTheme
from tui.drawing.wrapping import Wrapped
from tui.request_trace import RequestTrace
from tui.view import ViewContext
from tui.views.requests import waits_for

BAR = 24
"""Cells."""
GLYPHS = ("░", "↓", "▸", "█", "▒")
"""Of `PHASES`."""
GAP = 2
MOST_NAMED = 8
"""Switches that are listed by name, the last ones."""


def stats_lines(answer: ChatAnswer, context: ViewContext, width: int) -> list[Line]:
    """No longer than `width` cells, where no word is."""
    lines = _stands(answer, context, width)
    switches = _switches(answer.trace, context, width)
    for parts in (_speed(answer, context), _phases(answer, context), switches):
        lines += _flow(parts, width)
    return lines


def _stands(answer: ChatAnswer, context: ViewContext, width: int) -> list[Line]:
    """Where one is that comes, and what it waits for; why one is no whole answer."""
    theme = context.theme
    if answer.outcome is AnswerState.FAILED:
        why = Wrapped(width)
        why.add(answer.why)
        return [[(text, theme.bad)] for text in why.lines]
    if answer.outcome is AnswerState.CANCELLED:
        return [[("cancelled", theme.warn)]]
    if answer.outcome is AnswerState.DONE:
        return [[("cut at the limit of tokens", theme.warn)]] if answer.why == "length" else []
    row = context.state.rows("requests").get(answer.trace.request)
    if row is None:
        return [[("answering" if answer.text else "on its way", theme.accent)]]
    where = "" if row.get("instance") is None else f" on instance {row['instance']}"
    parts: list[Line] = [
        [(f"{row['phase']}{where}", theme.accent)],
        [(duration(max(0.0, context.now - row["arrived_unix_seconds"])), theme.dim)],
        [(f"{row['output_tokens']} tokens", theme.dim)],
    ]
    if (why_not := waits_for(answer.trace.request, row, context)) is not None:
        parts.append([(f"waits: {why_not}", theme.warn)])
    return _flow(parts, width)


def _speed(answer: ChatAnswer, context: ViewContext) -> list[Line]:
    """As it was seen from here; and a bar of what its time went to."""
    theme = context.theme
    parts: list[Line] = []
    if (ttft := answer.ttft_seconds) is not None:
        parts.append([(f"first token {duration(ttft)}", theme.strong)])
    tokens = answer.trace.output_tokens if answer.tokens is None else answer.tokens
    if tokens is not None:
        parts.append([(f"{tokens} tokens", theme.dim)])
    if tbt := answer.tbt_seconds:
        parts.append([(f"{rate(1 / tbt)}/s", theme.dim)])
        parts.append([(f"{duration(tbt)} each", theme.dim)])
    if answer.phases:
        cells = divide(BAR, [answer.phases.get(phase, 0.0) for phase in PHASES])
        bar = zip(GLYPHS, _styles(theme), cells, strict=True)
        parts.append([(glyph * width, style) for glyph, style, width in bar])
    return parts


def _phases(answer: ChatAnswer, context: ViewContext) -> list[Line]:
    """As the daemon counts: queue, load, …; those that took no time are left out."""
    parts: list[Line] = []
    for phase, glyph, style in zip(PHASES, GLYPHS, _styles(context.theme), strict=True):
        if seconds := answer.phases.get(phase):
            often = answer.preemptions if phase == "preempted" else 0
            text = f" {phase} {duration(seconds)}" + (f" ({often} times)" if often else "")
            parts.append([(glyph, style), (text, context.theme.dim)])
    return parts


def _switches(trace: RequestTrace, context: ViewContext, width: int) -> list[Line]:
    """Which models had their turns meanwhile, where it was computed; by name the last ones, as many
    as there is room for."""
    theme = context.theme
    parts: list[Line] = []
    for instance in trace.instances:
        models = [one.model for one in trace.switches if one.instance == instance]
        count = {0: "no switch", 1: "1 switch"}.get(len(models), f"{len(models)} switches")
        turns = f"{count} on instance {instance}"
        names: list[str] = []
        room = width - cell_len(turns) - len(": … ")
        for model in reversed(models):
            room -= cell_len(model) + len(", ") * bool(names)
            if room < 0 or len(names) == MOST_NAMED:
                break
            names.insert(0, model)
        line: Line = [(turns, theme.dim)]
        for place, model in enumerate(names):
            between = ", " if place else ": … " if len(names) < len(models) else ": "
            line += [(between, theme.dim), (model, context.model_style(model))]
        parts.append(line)
    if trace.missed and parts:
        parts.append([("some events were missed", theme.warn)])
    return parts


def _styles(theme: ColourTheme) -> tuple[str, ...]:
    """Of `PHASES`."""
    return theme.dim, theme.weights, theme.accent, theme.good, theme.warn


def _flow(parts: Iterable[Line], width: int) -> list[Line]:
    """Parts side by side, as many in a line as fit."""
    lines: list[Line] = []
    room = 0
    for part in parts:
        cells = GAP + sum(cell_len(text) for text, _ in part)
        if lines and cells <= room:
            lines[-1] += [(" " * GAP, ""), *part]
        else:
            lines.append([*part])
            room = width + GAP
        room -= cells
    return lines
