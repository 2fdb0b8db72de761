"""State diagrams of docs/architecture.md, drawn from the transition tables.

``python -m appliance.cli.docs.states docs/architecture.md`` writes them between their marks.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Final, TypeVar

from appliance.scheduling.lifecycle import ENGINES, KV_PLACES, STAGES

BEGIN: Final = "<!-- states: written by `make generate` -->"
END: Final = "<!-- end of states -->"
S = TypeVar("S", bound=StrEnum)


def diagram(table: Mapping[S, frozenset[S]]) -> str:
    """A table as a Mermaid diagram: its first state is where everything begins."""
    order = list(table)
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {order[0]}"]
    for state, targets in table.items():
        lines += [f"    {state} --> {target}" for target in sorted(targets, key=order.index)]
        if not targets:
            lines.append(f"    {state} --> [*]")
    return "\n".join([*lines, "```"])


def states() -> str:
    """All tables, each with its name."""
    titled = {
        "A request (`Stage`)": diagram(STAGES),
        "The KV cache of a request (`KvPlace`)": diagram(KV_PLACES),
        "A model on an instance (`EngineStage`)": diagram(ENGINES),
    }
    return "\n\n".join(f"### {title}\n\n{drawn}" for title, drawn in titled.items())


def with_states(page: str) -> str:
    """The page with what is between its marks written again. Raises `ValueError` without marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page needs the marks {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{states()}\n\n{END}{after}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_states(path.read_text(encoding="utf-8")), encoding="utf-8")
