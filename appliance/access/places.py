"""How many sequences of a key, and of its organization, run at once; more wait until others of
them end. Sans-IO.

One HTTP request may ask for more than a hundred sequences, so requests alone bound nothing.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from itertools import count
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from appliance.vocabulary import ModelName, RequestClass

_Item = TypeVar("_Item")

Line: TypeAlias = tuple[ModelName, RequestClass]
"""Items of one line wait for each other. Those of another class may run on other instances."""


class Bounds(NamedTuple):
    """Sequences that may run at once; None: as many as come."""

    of_key: int | None = None
    """Of the key, whatever model they are of."""
    of_model: int | None = None
    """Of the key, of one model."""
    starting: int | None = None
    """Of the key, of one model and class, without their first tokens yet."""
    organization: str = ""
    """Of the key; "": it belongs to none."""
    of_organization: int | None = None
    """Of all keys of the organization, whatever models they are of."""


class _Waiting(NamedTuple, Generic[_Item]):
    number: int
    """In the order in which they came."""
    item: _Item


class _OfKey(Generic[_Item]):
    """What a key has."""

    def __init__(self) -> None:
        self.running: Counter[ModelName] = Counter()
        self.starting: Counter[Line] = Counter()
        """Those of `running` without their first tokens."""
        self.waiting: dict[Line, deque[_Waiting[_Item]]] = {}
        """Only lines with waiting items."""

    def may_run(self, line: Line, bounds: Bounds) -> bool:
        counts = self.running.total(), self.running[line[0]], self.starting[line]
        most = bounds.of_key, bounds.of_model, bounds.starting
        return all(bound is None or has < bound for has, bound in zip(counts, most, strict=True))

    def run(self, line: Line) -> None:
        self.running[line[0]] += 1
        self.starting[line] += 1

    def waits(self) -> int:
        return sum(map(len, self.waiting.values()))


class Places(Generic[_Item]):
    """The places that sequences of keys have, and the items that wait for one.

    Items of one key and one line are served in the order in which they came. A call costs time in
    proportion to the lines of the key; to let an item wait, to the keys, too.
    """

    def __init__(self, most_waiting: int) -> None:
        """`most_waiting` items wait, more or less: a key may add one as long as it has less than an
        equal part."""
        self._most_waiting = most_waiting
        self._keys: dict[Hashable, _OfKey[_Item]] = {}
        self._organizations: Counter[str] = Counter()
        """How many places those have taken that have taken some."""
        self._numbers = count()

    def __len__(self) -> int:
        return sum(key.waits() for key in self._keys.values())

    def __iter__(self) -> Iterator[_Item]:
        """All that wait, by key."""
        for key in self._keys.values():
            for line in key.waiting.values():
                yield from (waiting.item for waiting in line)

    def waiting_keys(self) -> list[Hashable]:
        """Those with waiting items, the key with the fewest places first."""
        waiting = [key for key, has in self._keys.items() if has.waiting]
        return sorted(waiting, key=self.running)

    def running(self, key: Hashable) -> int:
        """How many places a key has taken."""
        return self._keys[key].running.total() if key in self._keys else 0

    def running_of(self, organization: str) -> int:
        """How many places the keys of an organization have taken."""
        return self._organizations[organization]

    def take(self, key: Hashable, line: Line, bounds: Bounds) -> bool:
        """Take a place, which is to be given back, if there is one that no earlier item of the line
        waits for. One that was taken within an organization is given back to that."""
        has = self._keys.get(key)
        if has is None:
            has = self._keys[key] = _OfKey()
        if line in has.waiting or not self._may_run(has, line, bounds):
            self._tidy(key)
            return False
        self._run(has, line, bounds)
        return True

    def started(self, key: Hashable, line: Line) -> None:
        """A sequence that has a place has its first token."""
        self._keys[key].starting[line] -= 1

    def give_back(
        self, key: Hashable, line: Line, *, started: bool, organization: str = ""
    ) -> None:
        """A sequence that had a place is over; whether it had `started`."""
        has = self._keys[key]
        if organization:
            self._organizations[organization] -= 1
            if not self._organizations[organization]:
                del self._organizations[organization]
        has.running[line[0]] -= 1
        has.starting[line] -= not started
        self._tidy(key)

    def wait(self, key: Hashable, line: Line, item: _Item) -> bool:
        """Let an item wait for a place; False if too many of its key do."""
        has = self._keys.setdefault(key, _OfKey())
        others = sum(bool(other.waiting) for other in self._keys.values() if other is not has)
        if has.waits() >= self._most_waiting // (others + 1):
            self._tidy(key)
            return False
        has.waiting.setdefault(line, deque()).append(_Waiting(next(self._numbers), item))
        return True

    def leave(self, key: Hashable, line: Line, item: _Item) -> None:
        """An item does not want to wait any more."""
        has = self._keys[key]
        rest = deque(waiting for waiting in has.waiting[line] if waiting.item is not item)
        has.waiting[line] = rest
        if not rest:
            del has.waiting[line]
        self._tidy(key)

    def next(self, key: Hashable, bounds: Callable[[_Item], Bounds]) -> _Item | None:
        """The item of a key that has waited longest of those with a place now, which it has taken;
        None if there is none."""
        has = self._keys.get(key)
        if has is None:
            return None
        lines = has.waiting.items()
        able = [line for line, items in lines if self._may_run(has, line, bounds(items[0].item))]
        line = min(able, key=lambda line: has.waiting[line][0].number, default=None)
        if line is None:
            return None
        items = has.waiting[line]
        item = items.popleft().item
        if not items:
            del has.waiting[line]
        self._run(has, line, bounds(item))
        return item

    def _may_run(self, has: _OfKey[_Item], line: Line, bounds: Bounds) -> bool:
        most = bounds.of_organization
        full = most is not None and self._organizations[bounds.organization] >= most
        return not full and has.may_run(line, bounds)

    def _run(self, has: _OfKey[_Item], line: Line, bounds: Bounds) -> None:
        has.run(line)
        if bounds.organization:
            self._organizations[bounds.organization] += 1

    def _tidy(self, key: Hashable) -> None:
        has = self._keys[key]
        if not has.running.total() and not has.waiting:
            del self._keys[key]
