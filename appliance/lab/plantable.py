"""Plans, for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from appliance.lab.plan import Carries, Need
from appliance.lab.report import share

GIB = 1 << 30


def plan_table(title: str, policy: str, planned: Sequence[Need | Carries]) -> Table:
    """A row for each kind of GPU, or for each kind of load of a box."""
    made = Table(box=None, pad_edge=False, title=f"{title}, {policy}", title_justify="left")
    if any(isinstance(one, Carries) for one in planned):
        for heading in ("LOAD", "CARRIES", "ATTAINED", "TOO MUCH", "BOUND BY", "WITH TWICE THAT"):
            made.add_column(heading, no_wrap=True)
    else:
        for heading in ("GPU", "GPUS", "TP", "ATTAINED", "BUSY", "HOST GIB", "MASTERS", "KV", ""):
            made.add_column(heading, no_wrap=True)
    for one in planned:
        made.add_row(*(_carried(one) if isinstance(one, Carries) else _needed(one)))
    return made


def _carried(one: Carries) -> list[str]:
    relieved = [f"{name} {share(value)}" for name, value in one.relieved.items()]
    return [
        *(one.load, f"{one.largest:g}", share(one.attained)),
        *(f"{one.too_much:g}", one.bound, ", ".join(relieved)),
    ]


def _needed(one: Need) -> list[str]:
    if one.why:
        return [one.gpu, *["-"] * 7, one.why]
    return [
        *(one.gpu, str(one.gpus), str(one.tp), share(one.attained), share(one.busy_share)),
        f"{(one.masters_bytes + one.kv_peak_bytes) / GIB:.1f}",
        *(f"{one.masters_bytes / GIB:.1f}", f"{one.kv_peak_bytes / GIB:.1f}", ""),
    ]
