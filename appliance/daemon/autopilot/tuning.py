"""Changed parameters: which choices have some, and how often such a choice has to win.

A window of a load that changes, or of a backlog that is served, speaks for parameters that are
worse as soon as it is over. And of many sets of parameters the best is ahead by chance.
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from appliance.service.policy_report import PolicyChoice

REPLAYS: Final = 2
"""In a row that have to recommend changed parameters before they decide."""


def untuned(choice: PolicyChoice, configured: PolicyChoice) -> PolicyChoice:
    """The same policies with no parameters but those that the configuration sets."""
    return replace(choice, parameters=configured.parameters).pruned()


def is_tuned(choice: PolicyChoice, configured: PolicyChoice) -> bool:
    """Whether it has parameters that the configuration does not set."""
    return choice.pruned() != untuned(choice, configured)


class Streak:
    """How often in a row replays recommended the same choice instead of the same other one."""

    def __init__(self) -> None:
        self._last: tuple[PolicyChoice, PolicyChoice | None] | None = None
        self._count = 0

    def add(self, current: PolicyChoice, chosen: PolicyChoice | None) -> int:
        """A replay recommends `chosen` instead of `current`, None to keep that: how often it is
        now."""
        found = current.pruned(), None if chosen is None else chosen.pruned()
        self._count = self._count + 1 if found == self._last else 1
        self._last = found
        return self._count

    @property
    def wanted(self) -> PolicyChoice | None:
        """What the newest replay recommends."""
        return None if self._last is None else self._last[1]

    def end(self) -> None:
        """A replay said nothing."""
        self._last = None
