"""How many sequences of a key run at once; more wait until others of their key end. Sans-IO.

One HTTP request may ask for more than a hundred sequences, so requests alone bound nothing.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from itertools import count
from typing import Generic, NamedTuple, TypeVar

from appliance.vocabulary import ModelName

_Item = TypeVar("_Item")


class Bounds(NamedTuple):
    """Sequences that may run at once; None: as many as come."""

    of_key: int | None = None
    """Of the key, whatever model they are of."""
    of_model: int | None = None
    """Of the key, of one model."""
    starting: int | None = None
    """Of the key, of one model, without their first tokens yet."""


class _Waiting(NamedTuple, Generic[_Item]):
    number: int
    """In the order in which they came."""
    item: _Item


class _OfKey(Generic[_Item]):
    """What a key has."""

    def __init__(self) -> None:
        self.running: Counter[ModelName] = Counter()
        self.starting: Counter[ModelName] = Counter()
        """Those of `running` without their first tokens."""
        self.waiting: dict[ModelName, deque[_Waiting[_Item]]] = {}
        """Only models with waiting items."""

    def may_run(self, model: ModelName, bounds: Bounds) -> bool:
        counts = self.running.total(), self.running[model], self.starting[model]
        return all(bound is None or has < bound for has, bound in zip(counts, bounds, strict=True))

    def run(self, model: ModelName) -> None:
        self.running[model] += 1
        self.starting[model] += 1


class Places(Generic[_Item]):
    """The places that sequences of keys have, and the items that wait for one.

    Items of one key and one model are served in the order in which they came. A call costs time in
    proportion to the models that the key asks.
    """

    def __init__(self, most_waiting: int) -> None:
        """`most_waiting` items of a key wait at most."""
        self._most_waiting = most_waiting
        self._keys: dict[Hashable, _OfKey[_Item]] = {}
        self._numbers = count()

    def __len__(self) -> int:
        return sum(len(line) for key in self._keys.values() for line in key.waiting.values())

    def __iter__(self) -> Iterator[_Item]:
        """All that wait, by key."""
        for key in self._keys.values():
            for line in key.waiting.values():
                yield from (waiting.item for waiting in line)

    def waiting_keys(self) -> list[Hashable]:
        """Those with waiting items."""
        return [key for key, has in self._keys.items() if has.waiting]

    def running(self, key: Hashable) -> int:
        """How many places a key has taken."""
        return self._keys[key].running.total() if key in self._keys else 0

    def take(self, key: Hashable, model: ModelName, bounds: Bounds) -> bool:
        """Take a place, which is to be given back, if there is one that no earlier item waits
        for."""
        has = self._keys.get(key)
        if has is None:
            has = self._keys[key] = _OfKey()
        if model in has.waiting or not has.may_run(model, bounds):
            self._tidy(key)
            return False
        has.run(model)
        return True

    def started(self, key: Hashable, model: ModelName) -> None:
        """A sequence that has a place has its first token."""
        self._keys[key].starting[model] -= 1

    def give_back(self, key: Hashable, model: ModelName, *, started: bool) -> None:
        """A sequence that had a place is over; whether it had `started`."""
        has = self._keys[key]
        has.running[model] -= 1
        has.starting[model] -= not started
        self._tidy(key)

    def wait(self, key: Hashable, model: ModelName, item: _Item) -> bool:
        """Let an item wait for a place; False if too many of its key do."""
        has = self._keys.setdefault(key, _OfKey())
        if sum(map(len, has.waiting.values())) >= self._most_waiting:
            self._tidy(key)
            return False
        has.waiting.setdefault(model, deque()).append(_Waiting(next(self._numbers), item))
        return True

    def leave(self, key: Hashable, model: ModelName, item: _Item) -> None:
        """An item does not want to wait any more."""
        has = self._keys[key]
        rest = deque(waiting for waiting in has.waiting[model] if waiting.item is not item)
        has.waiting[model] = rest
        if not rest:
            del has.waiting[model]
        self._tidy(key)

    def next(self, key: Hashable, bounds: Callable[[_Item], Bounds]) -> _Item | None:
        """The item of a key that has waited longest of those with a place now, which it has taken;
        None if there is none."""
        has = self._keys.get(key)
        if has is None:
            return None
        lines = has.waiting.items()
        able = [model for model, line in lines if has.may_run(model, bounds(line[0].item))]
        model = min(able, key=lambda model: has.waiting[model][0].number, default=None)
        if model is None:
            return None
        line = has.waiting[model]
        item = line.popleft().item
        if not line:
            del has.waiting[model]
        has.run(model)
        return item

    def _tidy(self, key: Hashable) -> None:
        has = self._keys[key]
        if not has.running.total() and not has.waiting:
            del self._keys[key]
