"""What an answer of a chat took, and how the appliance got there, in lines of `Chat`."""

from __future__ import annotations

from collections.abc import Iterable

from rich.cells import cell_len

from tui.conversation import PHASES, Answer, Outcome
from tui.drawing.amounts import divide, duration, rate
from tui.drawing.canvas import Line
from tui.drawing.theme import Look
from tui.drawing.wrapping import Wrapped
from tui.request_trace import Journey
from tui.view import Sight
from tui.views.requests import waits_for

BAR = 24
"""Cells."""
GLYPHS = ("░", "↓", "▸", "█", "▒")
"""Of `PHASES`."""
GAP = 2
MOST_NAMED = 8
"""Switches that are told by name, the last ones."""


def account(answer: Answer, sight: Sight, width: int) -> list[Line]:
    """No longer than `width` cells, where no word is."""
    lines = _stands(answer, sight, width)
    switches = _switches(answer.journey, sight, width)
    for parts in (_speed(answer, sight), _phases(answer, sight), switches):
        lines += _flow(parts, width)
    return lines


def colour_of(model: str, sight: Sight) -> str:
    return sight.look.model(sight.state.numbers.get(model, 0))


def _stands(answer: Answer, sight: Sight, width: int) -> list[Line]:
    """Where one is that comes, and what it waits for; why one is no whole answer."""
    look = sight.look
    if answer.outcome is Outcome.FAILED:
        why = Wrapped(width)
        why.add(answer.why)
        return [[(text, look.bad)] for text in why.lines]
    if answer.outcome is Outcome.CANCELLED:
        return [[("cancelled", look.warn)]]
    if answer.outcome is Outcome.DONE:
        return [[("cut at the limit of tokens", look.warn)]] if answer.why == "length" else []
    row = sight.state.rows("requests").get(answer.journey.request)
    if row is None:
        return [[("answering" if answer.text else "on its way", look.accent)]]
    where = "" if row.get("instance") is None else f" on instance {row['instance']}"
    parts: list[Line] = [
        [(f"{row['phase']}{where}", look.accent)],
        [(duration(max(0.0, sight.now - row["arrived_unix_seconds"])), look.dim)],
        [(f"{row['output_tokens']} tokens", look.dim)],
    ]
    if (why_not := waits_for(answer.journey.request, row, sight)) is not None:
        parts.append([(f"waits: {why_not}", look.warn)])
    return _flow(parts, width)


def _speed(answer: Answer, sight: Sight) -> list[Line]:
    """As it was seen from here; and a bar of what its time went to."""
    look = sight.look
    parts: list[Line] = []
    if (ttft := answer.ttft_seconds) is not None:
        parts.append([(f"first token {duration(ttft)}", look.strong)])
    tokens = answer.journey.output_tokens if answer.tokens is None else answer.tokens
    if tokens is not None:
        parts.append([(f"{tokens} tokens", look.dim)])
    if tbt := answer.tbt_seconds:
        parts.append([(f"{rate(1 / tbt)}/s", look.dim)])
        parts.append([(f"{duration(tbt)} each", look.dim)])
    if answer.phases:
        cells = divide(BAR, [answer.phases.get(phase, 0.0) for phase in PHASES])
        bar = zip(GLYPHS, _styles(look), cells, strict=True)
        parts.append([(glyph * width, style) for glyph, style, width in bar])
    return parts


def _phases(answer: Answer, sight: Sight) -> list[Line]:
    """As the daemon counts: queue, load, …; those that took no time are left out."""
    parts: list[Line] = []
    for phase, glyph, style in zip(PHASES, GLYPHS, _styles(sight.look), strict=True):
        if seconds := answer.phases.get(phase):
            often = answer.preemptions if phase == "preempted" else 0
            text = f" {phase} {duration(seconds)}" + (f" ({often} times)" if often else "")
            parts.append([(glyph, style), (text, sight.look.dim)])
    return parts


def _switches(journey: Journey, sight: Sight, width: int) -> list[Line]:
    """Which models had their turns meanwhile, where it was computed; by name the last ones, as many
    as there is room for."""
    look = sight.look
    parts: list[Line] = []
    for instance in journey.instances:
        models = [one.model for one in journey.switches if one.instance == instance]
        count = {0: "no switch", 1: "1 switch"}.get(len(models), f"{len(models)} switches")
        told = f"{count} on instance {instance}"
        names: list[str] = []
        room = width - cell_len(told) - len(": … ")
        for model in reversed(models):
            room -= cell_len(model) + len(", ") * bool(names)
            if room < 0 or len(names) == MOST_NAMED:
                break
            names.insert(0, model)
        line: Line = [(told, look.dim)]
        for place, model in enumerate(names):
            between = ", " if place else ": … " if len(names) < len(models) else ": "
            line += [(between, look.dim), (model, colour_of(model, sight))]
        parts.append(line)
    if journey.missed and parts:
        parts.append([("some events were not heard", look.warn)])
    return parts


def _styles(look: Look) -> tuple[str, ...]:
    """Of `PHASES`."""
    return look.dim, look.weights, look.accent, look.good, look.warn


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
