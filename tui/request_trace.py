"""How a request fared, as `State` tells it: where it was computed, and which models had their turns
there meanwhile. No clock, no I/O."""

from __future__ import annotations

from collections import deque
from itertools import takewhile
from typing import NamedTuple

from tui.messages import Document
from tui.state import State

MOST_SWITCHES = 1000


class TraceSwitch(NamedTuple):
    """From then on this model ran there."""

    instance: str
    model: str


class RequestTrace:
    """Of one request. It reads what is new in the state, as often as it is called."""

    def __init__(self, state: State) -> None:
        """Before the request is sent: what happened until then is none of it."""
        self.request = ""
        """The daemon's name for it; nothing is read before the answer has it."""
        self.instances: list[str] = []
        """Where it was computed, in order."""
        self.over = False
        """Its end arrived, or cannot arrive any more."""
        self.missed = False
        """Events were missed."""
        self.output_tokens: int | None = None
        """Once it is over, if that arrived."""
        self._arrived = False
        self._switches: deque[TraceSwitch] = deque(maxlen=MOST_SWITCHES)
        self._newest = state.notices[-1] if state.notices else None
        """What arrived last."""
        self._span = max(map(int, state.spans), default=0)

    @property
    def switches(self) -> list[TraceSwitch]:
        """Those on its instances, while it was live."""
        return [switch for switch in self._switches if switch.instance in self.instances]

    def hear(self, state: State) -> None:
        """O(what is new)."""
        # An end is reported at once, and where it was computed with the next change of the state.
        if not self.request or (self.over and self.instances):
            return
        row = state.rows("requests").get(self.request)
        if row is not None and row.get("instance") is not None:
            self._was_on(row["instance"])
        before = self._span
        new = takewhile(lambda one: int(one[0]) > before, reversed(state.spans.items()))
        for number, span in reversed(list(new)):
            self._span = int(number)
            if self.request in (*span.get("requests", ()), *span.get("prompts", ())):
                self._was_on(span["instance"])
        self._hear_notices(state)
        if self.missed and row is None:
            self.over = True

    def _hear_notices(self, state: State) -> None:
        new = list(takewhile(lambda notice: notice is not self._newest, reversed(state.notices)))
        if not new:
            return
        self._newest = new[0]
        if len(new) == state.notices.maxlen:
            self.missed = True
        for notice in reversed(new):
            self._note(str(notice["kind"]), notice["facts"])

    def _note(self, kind: str, facts: Document) -> None:
        mine = facts.get("id") == self.request
        if kind == "missed":
            self.missed = True
        elif kind == "request_arrived" and mine:
            self._arrived = True
        elif kind == "request_ended" and mine:
            self.over, self.output_tokens = True, facts.get("output_tokens")
        elif kind == "model_switched" and self._arrived and not self.over:
            self._switches.append(TraceSwitch(str(facts["instance"]), str(facts["model"])))

    def _was_on(self, instance: object) -> None:
        if (name := str(instance)) not in self.instances:
            self.instances.append(name)
