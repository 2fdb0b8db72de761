"""The autopilot's page: what it may do, does, advised, applied and took back, and what it knows."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Final

from tui.drawing.amounts import duration
from tui.drawing.canvas import Line
from tui.drawing.theme import ColourTheme
from tui.drawing.wrapping import Wrapped, harmless
from tui.messages import Document
from tui.view import ViewContext
from tui.views.choices import in_a_line

LEAST_WIDTH: Final = 40
INDENT: Final = "    "
NONE_YET: Final = "none yet"


def is_on(report: Document) -> bool:
    """Whether there is one, and it may do something."""
    pilot = report.get("autopilot")
    return pilot is not None and pilot["mode"] != "off"


def page(report: Document, context: ViewContext, width: int) -> list[Line]:
    """All of it, in lines of so many cells."""
    theme, width = context.theme, max(LEAST_WIDTH, width)
    if not report:
        return [[("asking …", theme.dim)]]
    pilot = report.get("autopilot")
    if pilot is None:
        return _wrapped("this daemon has none: it is of an earlier version", theme.dim, width)
    lines = _state(pilot, theme, width)
    if pilot["mode"] == "off":
        return lines
    newest_first = pilot["notes"][::-1]
    changes = [note for note in newest_first if not _changed_nothing(note)]
    advice = [note for note in newest_first if note["what"] == "applied" or note not in changes]
    lines += [[], _title("LAST ADVICE", theme), *_notes(advice[:1], theme, width)]
    lines += [[], _title("APPLIED, ROLLED BACK", theme), *_notes(changes, theme, width)]
    lines += [[], _title("BARRED", theme), *_barred(pilot["barred"], context, width)]
    lines += [[], _title("THIS HOUR OF THE WEEK", theme), *_hour(pilot, theme, width)]
    return lines


def _state(pilot: Document, theme: ColourTheme, width: int) -> list[Line]:
    mode = pilot["mode"]
    if mode == "off":
        said = 'off; `autopilot = "propose"` or "apply" in [policy] has it begin'
        return _wrapped(said, theme.dim, width)
    style = theme.good if mode == "apply" and not pilot["held"] else theme.accent
    lines: list[Line] = [[("mode      ", theme.accent), (mode, f"bold {style}")]]
    if pilot["held"]:
        said = "an operator chose policies: it only proposes, until a reload of another [policy]"
        lines += _wrapped(said, theme.warn, width)
    used = f"{pilot['cpu_seconds']:.0f} s of {pilot['cpu_seconds_per_hour']:.0f} s"
    lines.append([("phase     ", theme.accent), (pilot["phase"], "")])
    lines.append([("CPU time  ", theme.accent), (f"{used} were charged in the last hour", "")])
    return lines


def _changed_nothing(note: Document) -> bool:
    """What a replay came to, of which nothing was changed."""
    failed = note["what"] == "failed" and note["choice"] is None
    return failed or note["what"] in ("kept", "proposed")


def _notes(notes: Iterable[Document], theme: ColourTheme, width: int) -> list[Line]:
    styles = {
        "applied": theme.good, "confirmed": theme.good, "proposed": theme.accent,
        "rolled_back": theme.bad, "failed": theme.bad, "left": theme.warn, "forgot": theme.warn,
    }  # fmt: skip
    lines: list[Line] = []
    for note in notes:
        at = datetime.fromtimestamp(note["unix_seconds"]).strftime("%Y-%m-%d %H:%M:%S")
        what = harmless(note["what"].replace("_", " "))
        lines.append([(f"{at}  ", theme.dim), (what, f"bold {styles.get(note['what'], '')}")])
        if note["choice"] is not None:
            lines += _wrapped(in_a_line(note["choice"]), theme.accent, width)
        if figures := _figures(note):
            lines += _wrapped(figures, "", width)
        lines += _wrapped(note["reason"], theme.dim, width)
    return lines or _wrapped(NONE_YET, theme.dim, width)


def _figures(note: Document) -> str:
    """Shares of what clients got, and differences of these."""
    gain, error, before, after = (note[name] for name in ("gain", "error", "before", "after"))
    words = [
        "" if gain is None else f"gain {100 * gain:+.1f} points",
        "" if error is None else f"error {100 * error:.1f} points",
        "" if before is None else f"kept before {before:.1%}",
        "" if after is None else f"after {after:.1%}",
    ]
    return ", ".join(filter(None, words))


def _barred(rows: Iterable[Document], context: ViewContext, width: int) -> list[Line]:
    lines: list[Line] = []
    for row in rows:
        left = duration(max(0.0, row["until_unix_seconds"] - context.now))
        said = f"{in_a_line(row['choice'])}, for {left} more"
        lines += _wrapped(said, context.theme.warn, width)
    return lines or _wrapped("nothing", context.theme.dim, width)


def _hour(pilot: Document, theme: ColourTheme, width: int) -> list[Line]:
    """What is remembered of it; the best first."""
    lines: list[Line] = []
    for row in pilot.get("hour", ()):
        weeks = "1 week" if row["wins"] == 1 else f"{row['wins']} weeks"
        kept, gain, error = row["kept"], row["gain"], row["error"]
        words = [f"won in {weeks}" if row["wins"] else "won in no week"]
        if gain is not None:
            words.append(f"{100 * abs(gain):.1f} points {'ahead' if gain >= 0 else 'behind'}")
        if error is not None:
            words.append(f"error {100 * error:.1f} points")
        if kept is not None:
            words.append(f"kept {kept:.1%}")
        lines += _wrapped(in_a_line(row["choice"]), theme.accent, width)
        lines += _wrapped(", ".join(words), "", width)
    return lines or _wrapped("nothing is known of it", theme.dim, width)


def _title(text: str, theme: ColourTheme) -> Line:
    return [(text, f"bold {theme.accent}")]


def _wrapped(text: str, style: str, width: int) -> list[Line]:
    """Below a title, in lines of so many cells."""
    wrapped = Wrapped(width - len(INDENT))
    wrapped.add(text)
    return [[(INDENT + line, style)] for line in wrapped.lines]
