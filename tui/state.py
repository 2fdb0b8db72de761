"""What is known of a daemon: its state, what happened, what was computed when. No clock, no I/O.

    messages  ->  State.hear  ->  views read it

A message costs what changed by it. Everything that grows is bounded.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Any

from tui.asking import Polled
from tui.drawing.series import Counter
from tui.messages import Document, Kind, Message

MOST_NOTICES = 2000
MOST_SPANS = 4000
"""Of all instances together."""
SAME_START_SECONDS = 1.0
"""The age of a daemon says when it started, and so never twice the same to the last digit."""

COUNTED = {
    "instances": ("switches", "busy_seconds", "moved_bytes"),
    "models": ("output_tokens",),
}
"""Members of the rows that only go up."""


def merge(document: Document, patch: Document) -> Document:
    """The document, with a JSON merge patch (RFC 7396) carried out in it. O(patch)."""
    for key, value in patch.items():
        if value is None:
            document.pop(key, None)
        elif isinstance(value, dict):
            inner = document.get(key)
            document[key] = merge(inner if isinstance(inner, dict) else {}, value)
        else:
            document[key] = value
    return document


class State:
    """One reader, one writer: who hears a message and who shows it take turns."""

    def __init__(self) -> None:
        self.tree: Document = {}
        """As `GET /api/watch` tells it: `readiness`, `instances`, `models`, `requests`, …"""
        self.notices: deque[Document] = deque(maxlen=MOST_NOTICES)
        """What happened, the oldest first. One of the kind `missed` replaces missed events."""
        self.spans: dict[str, Document] = {}
        """What was computed and moved, by number, the oldest first; also what is over and the
        daemon has forgotten. Another daemon counts anew: of the one before nothing is left."""
        self.complete_since = 0.0
        """All spans that ended since then are in `spans`, Unix seconds."""
        self.daemons = 0
        """How many daemons there were: one that is started again is another one."""
        self.lost: str | None = "connecting"
        """Why nothing arrives, if that is so."""
        self.retry_at = 0.0
        """When it is tried again, by the listener's clock."""
        self.version = 0
        """Counts messages."""
        self.numbers: dict[str, int] = {}
        """Models in the order in which they were met: a colour each."""
        self._answers: dict[str, Polled] = {}
        self._unix_seconds = 0.0
        self._heard_at = 0.0
        self._counters: defaultdict[tuple[str, str, str], Counter] = defaultdict(Counter)

    # --- what views read -------------------------------------------------------------------------

    def now(self, clock: float) -> float:
        """The daemon's time, Unix seconds, when the listener's clock says `clock`."""
        return self._unix_seconds + max(0.0, clock - self._heard_at)

    def rows(self, table: str) -> dict[str, Document]:
        """`instances`, `models` or `requests`, by id."""
        rows: dict[str, Document] = self.tree.get(table, {})
        return rows

    def counter(self, table: str, key: str, member: str) -> Counter:
        """One of `COUNTED`."""
        found = self._counters.get((table, key, member))
        return Counter() if found is None else found

    def answer(self, path: str) -> Polled:
        """What was answered to a view that asked for it."""
        return self._answers.get(path, Polled())

    # --- what was asked --------------------------------------------------------------------------

    def answered(self, path: str, document: Any) -> None:
        """It takes the place of what was answered before."""
        self._answers[path] = Polled(document)
        self.version += 1

    def refused(self, path: str, why: str) -> None:
        """What was answered before stays."""
        self._answers[path] = self.answer(path)._replace(refused=why)
        self.version += 1

    # --- what arrives ----------------------------------------------------------------------------

    def hear(self, message: Message) -> None:
        """Know more. Messages come in the order in which they were sent."""
        self.version += 1
        data = message.data
        if message.kind is Kind.LOST:
            self.lost, self.retry_at = data["reason"], message.at + data["seconds"]
            return
        self.lost = None
        if message.kind is Kind.NOTICE:
            self.notices.append(data)
            return
        self._unix_seconds, self._heard_at = data["unix_seconds"], message.at
        if message.kind is Kind.STATE:
            if data["missed"] and self.tree:
                facts: Document = {}
                self.notices.append(
                    {"kind": "missed", "unix_seconds": data["unix_seconds"], "facts": facts}
                )
            if self._is_another(data["state"]):
                self.spans.clear()
                self.daemons += 1
            self.tree = data["state"]
            self.complete_since = self._whole_since()
            self._changed(data["state"])
            for number in self.spans.keys() - self.rows("spans").keys():
                self._let_go(number)
            for table, members in COUNTED.items():
                self._forget(table, members, self._known(table) - set(self.tree.get(table, {})))
        else:
            merge(self.tree, data["patch"])
            self._changed(data["patch"])

    def _is_another(self, tree: Document) -> bool:
        """Whether this is of another daemon than the messages before."""
        before: float = self.tree.get("started_unix_seconds", 0.0)
        now: float = tree.get("started_unix_seconds", 0.0)
        return abs(now - before) > SAME_START_SECONDS

    def _whole_since(self) -> float:
        """A state has the newest spans of each instance: those of all are known since the instance
        of which it goes back least."""
        earliest: dict[Any, float] = {}
        for span in self.rows("spans").values():
            if (ended := span.get("ended_unix_seconds")) is not None:
                instance = span.get("instance")
                earliest[instance] = min(ended, earliest.get(instance, ended))
        return max(earliest.values(), default=self._unix_seconds)

    def _changed(self, patch: Document) -> None:
        """Look at the rows that a patch names."""
        for table, members in COUNTED.items():
            gone = []
            for key, row in patch.get(table, {}).items():
                if row is None:
                    gone.append(key)
                    continue
                for member in members:
                    if member in row:
                        self._sample(table, key, member)
            self._forget(table, members, gone)
        for model in patch.get("models", {}):
            self.numbers.setdefault(model, len(self.numbers))
        for number, span in patch.get("spans", {}).items():
            if span is None:
                self._let_go(number)
            else:
                self.spans[number] = self.tree["spans"][number]
        while len(self.spans) > MOST_SPANS:
            oldest = self.spans.pop(next(iter(self.spans)))
            ended = oldest.get("ended_unix_seconds", 0.0)
            self.complete_since = max(self.complete_since, ended)

    def _let_go(self, number: str) -> None:
        """The daemon knows no more of it. One that is over stays as it was; of one that is not, the
        end did not arrive and never will."""
        if "ended_unix_seconds" not in self.spans.get(number, {}):
            self.spans.pop(number, None)

    def _sample(self, table: str, key: str, member: str) -> None:
        value: Any = self.tree[table][key][member]
        total = sum(value.values()) if isinstance(value, dict) else value
        self._counters[table, key, member].sample(self._unix_seconds, total)

    def _known(self, table: str) -> set[str]:
        return {key for found, key, _ in self._counters if found == table}

    def _forget(self, table: str, members: Iterable[str], keys: Iterable[str]) -> None:
        for key in keys:
            for member in members:
                self._counters.pop((table, key, member), None)
