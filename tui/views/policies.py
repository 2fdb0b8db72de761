"""Policies: who is asked for each decision, how they fare, and what was chosen before."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from datetime import datetime
from typing import Any

from textual import events

from tui.asking import Ask
from tui.drawing.amounts import duration
from tui.drawing.canvas import Line
from tui.drawing.table import Column, TableView, member
from tui.messages import DaemonRefused, DaemonSource, Document
from tui.view import Action, Field, Given, ViewContext, details
from tui.views import autopilot
from tui.views.choices import flat, keys_of, written

PATH = "/api/policies"
MOST_PAGE_CELLS = 106
PAGE_BORDER_CELLS = 4
"""Of a page over the view, which takes nine tenths of the width."""
PAIRS = re.compile(r"[,\s]+(?=[\w.-]+=)")


def report_of(context: ViewContext) -> Document:
    """The newest answer; empty before there is one."""
    document = context.state.answer(PATH).document
    return document if isinstance(document, dict) else {}


def _ailing(states: Iterable[Document]) -> str:
    """Which ones are not asked now, and why."""
    return ", ".join(
        f"{row['name']} {'disabled' if row['disabled'] else 'busy'}"
        for row in states
        if row["disabled"] or row["busy"]
    )


def _faults(report: Document, hook: str) -> list[Document]:
    """What went wrong at a decision, the newest last."""
    return [row for row in report["events"] if row["hook"] == hook and row["what"] == "fault"]


def _row(hook: str, names: list[str], report: Document) -> Document:
    faults = _faults(report, hook)
    last = faults[-1] if faults else None
    # A daemon of an earlier version tells none.
    all_stats = [
        row["decisions"][hook]
        for row in report["policies"]
        if row["name"] in names and hook in row.get("decisions", {})
    ]
    return {
        "asked": ", ".join(names),
        "calls": max((stats["calls"] for stats in all_stats), default=0),
        "p50_seconds": _slowest(all_stats, "p50_seconds"),
        "p99_seconds": _slowest(all_stats, "p99_seconds"),
        "state": _ailing(row for row in report["policies"] if row["name"] in names) or "ok",
        "faults": sum(row["count"] for row in faults),
        "active": report["active"],
        "last_fault": "" if last is None else f"{last['policy']}: {last['reason']}",
    }


def _slowest(all_stats: list[Document], time: str) -> float | None:
    """Of those who are asked for a decision."""
    return max((stats[time] for stats in all_stats if stats[time] is not None), default=None)


def _stats_text(stats: Document) -> str:
    """Of one policy and decision: the mean of all calls, the rest of the last ones."""
    counts = f"{stats['calls']} calls, {stats['faults']} faults"
    if stats["p50_seconds"] is None:
        return counts
    times = {"mean": stats["seconds"] / stats["calls"]}
    times |= {time: stats[f"{time}_seconds"] for time in ("p50", "p99", "max")}
    return f"{counts}; " + ", ".join(f"{name} {duration(time)}" for name, time in times.items())


def _state_style(value: Any, context: ViewContext) -> str:
    return context.theme.good if value == "ok" else context.theme.bad


# --- what is chosen ------------------------------------------------------------------------------


def compared(report: Document, context: ViewContext) -> list[Line]:
    """What is chosen now against what was before; what differs is marked."""
    theme = context.theme
    if not report.get("previous"):
        return [[("there were no others before", theme.dim)]]
    now, before = keys_of(report["active"]), keys_of(report["previous"][-1])
    names = [*now, *(name for name in before if name not in now)]
    width = max(len(name) for name in names) + 4
    across = max(8, *(len(now.get(name, "-")) + 2 for name in names))
    lines: list[Line] = [[(f"{'':{width}}{'NOW':{across}}BEFORE", f"bold {theme.accent}")]]
    for name in names:
        old, new = before.get(name, "-"), now.get(name, "-")
        mark, style = ("≠ ", theme.warn) if old != new else ("  ", "")
        lines.append([(f"{mark}{name:{width - 2}}", style), (f"{new:{across}}{old}", style)])
    return lines


def changed(choice: Document, given: Given) -> Document:
    """A choice with what was given in it. Raises `DaemonRefused` for what is no pair."""
    use = [name for name in re.split(r"[,\s]+", given.get("use", "")) if name] or choice["use"]
    decisions = dict(choice["decisions"])
    for hook, name in _pairs(given.get("decisions", "")):
        decisions[hook] = name
    parameters = {name: dict(table) for name, table in choice["parameters"].items()}
    for key, text in _pairs(given.get("parameters", "")):
        policy, _, field = key.rpartition(".")
        if not policy:
            raise DaemonRefused(f"parameters: NAME.KEY=VALUE, not {key}={text}")
        parameters.setdefault(policy, {})[field] = _value(text)
    return {
        "use": use,
        "decisions": {hook: name for hook, name in decisions.items() if name},
        "parameters": parameters,
    }


def _pairs(text: str) -> list[tuple[str, str]]:
    """`a=1, b=2`; nothing behind the sign takes a decision back."""
    found = []
    for pair in PAIRS.split(text.strip()) if text.strip() else ():
        key, sign, value = pair.partition("=")
        if not sign or not key:
            raise DaemonRefused(f"{pair!r} is not NAME=VALUE")
        found.append((key.strip(), value.strip()))
    return found


def _value(text: str) -> object:
    """As it would be written in the configuration; anything else is a text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


async def _set(source: DaemonSource, key: str, given: Given) -> str:
    report = await source.ask("GET", PATH)
    report = await source.ask("PUT", PATH, changed(report["active"], given))
    return f"{', '.join(report['active']['use'])} decide from now on"


async def _rollback(source: DaemonSource, key: str, given: Given) -> str:
    report = await source.ask("POST", f"{PATH}/rollback")
    return f"{', '.join(report['active']['use'])} decide again"


async def _enable(source: DaemonSource, key: str, given: Given) -> str:
    """Of the policies that are asked for a decision those that failed too often."""
    report = await source.ask("GET", PATH)
    names = report["decisions"].get(key, ())
    disabled = [row["name"] for row in report["policies"]
                if row["disabled"] and row["name"] in names]  # fmt: skip
    if not disabled:
        raise DaemonRefused("no policy that is asked for it is disabled")
    for name in disabled:
        await source.ask("POST", f"{PATH}/{name}/enable")
    return f"{', '.join(disabled)}: asked again"


class PoliciesView(TableView):
    """A row for each decision."""

    title = "Policies"
    names = ("policies", "policy", "p")
    asks = (Ask("GET", PATH, 2.0, ("policies_chosen", "config_reloaded", "autopilot")),)
    help = (("c", "compare with before"), ("i", "installed"), ("a", "autopilot"))
    columns = (
        Column("DECISION", lambda key, row, context: key),
        Column("ASKED, IN THIS ORDER", member("asked"),
               style=lambda value, context: context.theme.accent),
        Column("STATE", member("state"), style=_state_style),
        Column("FAULTS", member("faults"), right=True,
               style=lambda value, context: context.theme.warn if value else context.theme.dim),
        Column("CALLS", member("calls"), right=True),
        Column("P50", member("p50_seconds"), duration, right=True),
        Column("P99", member("p99_seconds"), duration, right=True),
        Column("LAST FAULT", member("last_fault"), style=lambda value, context: context.theme.warn),
    )  # fmt: skip
    actions = (
        Action("e", "set", "have other policies decide", _set, each_row=False, fields=(
            Field("use", "asked in this order, such as serverlessllm,aegaeon",
                  lambda row: ",".join(row["active"]["use"]) if row else ""),
            Field("decisions", "asked first, such as round=aegaeon; round= takes it back",
                  lambda row: written(row["active"]["decisions"]) if row else ""),
            Field("parameters", "such as aegaeon.q_max_seconds=3",
                  lambda row: written(flat(row["active"]["parameters"])) if row else ""),
        )),
        Action("B", "rollback", "go back to the policies before", _rollback,
               "Go back to the policies before these? (`c` compares them.)", each_row=False),
        Action("E", "enable", "ask policies again that failed too often", _enable),
    )  # fmt: skip

    def rows(self, context: ViewContext) -> dict[str, Document]:
        report = report_of(context)
        decisions: dict[str, list[str]] = report.get("decisions", {})
        return {hook: _row(hook, names, report) for hook, names in decisions.items()}

    def status(self) -> str:
        context = self._view_context
        pilot = context is not None and autopilot.is_on(report_of(context))
        return super().status() + (", autopilot" if pilot else "")

    def nothing(self, context: ViewContext) -> str:
        return context.state.answer(PATH).refused or "asking …"

    def detail(self, key: str, context: ViewContext) -> list[Line] | None:
        """Who is asked, with parameters, and what went wrong."""
        report = report_of(context)
        names = report.get("decisions", {}).get(key)
        if names is None:
            return None
        theme = context.theme
        parameters = report["active"]["parameters"]
        lines: list[Line] = []
        for state in report["policies"]:
            if state["name"] in names:
                facts = {name: value for name, value in state.items()
                         if name not in ("name", "decisions")}  # fmt: skip
                stats = state.get("decisions", {}).get(key)
                facts |= {f"for {key}": _stats_text(stats) if stats else "not asked yet"}
                given = parameters.get(state["name"], {})
                lines += [[(state["name"], f"bold {theme.accent}")], *details(facts, theme, 1)]
                lines += [*details({"parameters": given or "as it ships"}, theme, 1), []]
        for row in reversed(_faults(report, key)):
            at = datetime.fromtimestamp(row["unix_seconds"]).strftime("%Y-%m-%d %H:%M:%S")
            times = f" x{row['count']}" if row["count"] > 1 else ""
            lines.append([(f"{at}{times}  ", theme.dim),
                          (f"{row['policy']}: {row['reason']}", theme.warn)])  # fmt: skip
        return lines

    def path(self, key: str) -> str | None:
        return PATH

    def on_key(self, event: events.Key) -> None:
        if event.character == "c":
            event.stop()
            self.open("now and before", lambda context: compared(report_of(context), context))
        elif event.character == "i":
            event.stop()
            self.open("installed", _installed)
        elif event.character == "a":
            event.stop()
            self.open("autopilot", self._autopilot)

    def _autopilot(self, context: ViewContext) -> list[Line]:
        width = min(MOST_PAGE_CELLS, self.size.width * 9 // 10 - PAGE_BORDER_CELLS)
        return autopilot.page(report_of(context), context, width)


def _installed(context: ViewContext) -> list[Line]:
    """What could decide, and what each of them makes."""
    theme = context.theme
    lines: list[Line] = []
    for row in report_of(context).get("installed", ()):
        lines.append([(row["name"], f"bold {theme.accent}"),
                      (f"  {row['version']} {row['distribution']}", theme.dim)])  # fmt: skip
        about = (row["error"], theme.bad) if row["error"] else (row["about"], "")
        lines += [[("  ", ""), about], [(f"  {', '.join(row['hooks'])}", theme.dim)], []]
    return lines
