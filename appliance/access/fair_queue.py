"""Which request goes next when the appliance is full: a bounded queue for each key, fair in tokens.

The virtual token counter of "Fairness in Serving Large Language Models" (OSDI 2024): every key has
a counter of the tokens it was served, prompts when they leave the queue and outputs as they come,
and the one that was served least goes next. The counter of a key that begins to wait is raised to
the level of the others, so that no key saves credit for later; when no request waits any more, all
counters are deleted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

_Item = TypeVar("_Item")


class FairQueue(Generic[_Item]):
    """Items wait in the order in which their key brought them; keys take turns by their counters.

    Taking one costs time in proportion to the keys that wait.
    """

    def __init__(self, per_key: int) -> None:
        """`per_key` items of a key wait at most."""
        self._per_key = per_key
        self._waiting: dict[Hashable, deque[_Item]] = {}
        """Only keys with waiting requests, in the order in which they began to wait."""
        self._served: dict[Hashable, float] = {}
        self._level = 0.0
        """The counter of the key that went last."""

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[_Item]:
        """All that wait, by key."""
        for queue in self._waiting.values():
            yield from queue

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def push(self, key: Hashable, item: _Item) -> bool:
        """Let an item wait; False if too many of its key's do."""
        queue = self._waiting.get(key)
        if queue is None:
            queue = self._waiting[key] = deque()
            self._served[key] = max(self._served.get(key, 0.0), self._level)
        elif len(queue) >= self._per_key:
            return False
        queue.append(item)
        return True

    def has_room(self, key: Hashable) -> bool:
        """Whether another item of the key may wait."""
        return len(self._waiting.get(key, ())) < self._per_key

    def peek(self) -> tuple[Hashable, _Item] | None:
        """The key and the item that go next; None if no item waits."""
        if not self._waiting:
            return None
        key = min(self._waiting, key=self._served.__getitem__)
        return key, self._waiting[key][0]

    def pop(self, key: Hashable, tokens: float) -> None:
        """A key's first item leaves, which serves the key so many tokens."""
        self._level = max(self._level, self._served[key])
        self._served[key] += tokens
        self._waiting[key].popleft()
        self._tidy(key)

    def remove(self, key: Hashable, item: _Item) -> None:
        """An item does not want to wait any more."""
        self._waiting[key].remove(item)
        self._tidy(key)

    def charge(self, key: Hashable, tokens: float) -> None:
        """A key was served so many tokens more. Without waiting requests nothing is counted."""
        if self._waiting:
            self._served[key] = self._served.get(key, self._level) + tokens

    def _tidy(self, key: Hashable) -> None:
        if not self._waiting[key]:
            del self._waiting[key]
        if not self._waiting:
            self._served.clear()
            self._level = 0.0
